//! Translated ports (and ICMP ids): which are free, and for which destination.
//!
//! # Theory of operation
//! Mapping is address and port dependent: a port is busy only toward the destination it is used
//! for, so that the default range of 4,536 ports serves as many flows to *each* destination. A
//! destination's busy ports are a short list, then a bitmap. A port is picked at random (RFC 6056
//! section 3.3.1: unguessable). In a bitmap this is the first free port from a random start, at
//! worst a look at each of the range's words.
//!
//! A freed port rests ([`PORT_REST_NS`], RFC 6888 REQ-8) before it is used toward the same
//! destination again, unless its flow shows that reuse is safe ([`Freed::Safe`]): then it is free
//! at once. When no other port is left, the VM that used it last may reuse it early: for a SYN with
//! timestamps (RFC 6191), or after [`EARLY_NS`] when the peer can hold no end of a connection
//! ([`Freed::RestsForOthers`]).
//!
//! A port of an inspected flow has no such exceptions ([`Freed::Inspected`]). As long as a SYN
//! cookie of its server is valid (RFC 4987 section 3.6), an old acknowledgement is enough to open a
//! connection that is not inspected. Such a port rests for the whole time.
//!
//! In user mode a flow ends in a socket of the host, whose TIME-WAIT it is that follows where the guest
//! closes first. The host lets such a tuple be used again only if that connection had timestamps, which
//! is not known before it is tried. So a port of such a flow is free at once until the host has refused
//! one toward the destination ([`Freed::HostWaits`]). From then on these ports rest, as long as any port
//! toward it is busy ([`Freed::GuestFirst`]).
//!
//! The number of resting ports is bounded ([`MAX_RESTING`]). Past the bound the oldest are freed
//! early. For ports of inspected flows the bound holds because no further flow is inspected that
//! might leave one ([`PortPool::may_inspect`]).
//!
//! # Shares
//! No VM can use up the ports toward a destination that other VMs want too (RFC 6888 REQ-4). With
//! several VMs a quarter of the range is a [`Reserve`]: a VM may take a port of it only while its
//! ports toward that destination, resting ones included, are fewer than an equal part. So each VM
//! can have 1/4 of the range divided by the number of VMs, whatever the others do.
//!
//! Each process has a part of the range of its own ([`PortPool::share_with`]).
//!
//! Endpoint-independent mappings have a range of their own ([`crate::flow::mappings`]).
use std::{
    collections::VecDeque,
    hash::{Hash, Hasher},
    net::IpAddr,
    ops::RangeInclusive,
};

use hashbrown::{HashMap, hash_map::Entry};
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use slipgate_abi::{Protocol, VmId, maps::MAX_OWNERS, timeout::PORT_REST_NS};
use slipgate_model::FlowTuple;

use crate::{clock::SECOND_NS, quota::Reserve};

mod occupancy;
mod parts;
mod toward;

use parts::Parts;
use toward::{Busy, Rest, Toward};

/// Default range of translated ports. It is disjoint from Linux's default `ip_local_port_range`,
/// 32768 to 60999.
pub const DEFAULT_RANGE: RangeInclusive<u16> = 61_000..=65_535;
/// Most resting ports of all destinations together, and as many again of inspected flows: 18 MiB
/// each.
pub const MAX_RESTING: usize = 262_144;
/// Shortest rest of a port that the same VM may reuse early, ns. Late answers belong to the same
/// guest, and most arrive within this time.
pub const EARLY_NS: u64 = 10 * SECOND_NS;

/// Translated address and peer toward which a port is busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    /// Translated address that the peer sees.
    pub nat: IpAddr,
    /// Address of the peer.
    pub remote: IpAddr,
    /// The peer's port; 0 for ICMP.
    pub remote_port: u16,
    /// Protocol of the flows, as in rules: ICMP in both families.
    pub protocol: Protocol,
}

impl Destination {
    /// Returns the tuple, as seen on uplinks, of the flow with this translated port.
    pub fn world(&self, nat_port: u16) -> FlowTuple {
        FlowTuple {
            scope: FlowTuple::WORLD,
            local: self.nat,
            remote: self.remote,
            local_port: nat_port,
            remote_port: self.remote_port,
            protocol: FlowTuple::number(self.remote, self.protocol),
        }
    }
}

impl Hash for Destination {
    /// Hashes few words instead of one value per field: this is on the path of every admission.
    fn hash<H: Hasher>(&self, state: &mut H) {
        match (self.nat, self.remote) {
            (IpAddr::V4(nat), IpAddr::V4(remote)) => {
                state.write_u64(u64::from(nat.to_bits()) << 32 | u64::from(remote.to_bits()));
            }
            (nat, remote) => {
                for addr in [nat, remote] {
                    state.write_u128(match addr {
                        IpAddr::V4(addr) => addr.to_bits().into(),
                        IpAddr::V6(addr) => addr.to_bits(),
                    });
                }
            }
        }
        state.write_u32(u32::from(self.remote_port) << 8 | self.protocol as u32);
    }
}

/// Condition under which a freed port can be used again toward the same destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// Reusable at once, by any VM.
    Safe,
    /// After a rest, or earlier by the same VM for a SYN with timestamps.
    Rests,
    /// After a rest, or after a shorter one by the same VM: there was no connection, or it was
    /// reset.
    RestsForOthers,
    /// After a whole rest, with no exception: the flow was inspected.
    Inspected,
    /// The guest closed a connection first, so the TIME-WAIT is not the server's. At once, unless the
    /// host has refused a port toward this destination since the TIME-WAIT was its own: then as
    /// [`Freed::HostWaits`].
    GuestFirst,
    /// After a rest of [`HOST_WAIT_NS`] with no exception: the host has the tuple in TIME-WAIT.
    HostWaits,
    /// After a rest with no exception: another process was found to use the port, and no VM is
    /// charged for it meanwhile.
    Taken,
}

/// Rest of a port whose tuple the host has in TIME-WAIT, ns: Linux's 60 s, and what its timers are late.
pub const HOST_WAIT_NS: u64 = 65 * SECOND_NS;
/// Random tries for a port before the range is searched in order.
const RANDOM_TRIES: usize = 8;
/// Most resting ports that are examined for one that the VM may reuse early.
const RESTING_LOOKS: usize = 64;
/// Ports freed in one call after their rest, about 0.1 ms: first packets wait meanwhile.
pub(crate) const PORTS_AT_ONCE: usize = 1_024;
/// Holder of a port that another process uses.
const NOBODY: VmId = VmId::new(FlowTuple::WORLD);

/// Rests in the order in which they end: end in ns, destination and port.
type RestOrder = VecDeque<(u64, Destination, u16)>;

/// Port that a flow returns which is about to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GivenBack {
    /// The translated port that is returned.
    pub port: u16,
    /// Id of the VM that used the port.
    pub vm: VmId,
    /// Condition under which the port can be used again.
    pub how: Freed,
    /// Whether the flow ends because ports ran short: a VM may reuse its own port at once then.
    pub is_reclaimed: bool,
}

/// The translated ports of this process, by destination.
#[derive(Debug)]
pub struct PortPool {
    range: RangeInclusive<u16>,
    vms: usize,
    reserve: Reserve,
    /// Parts of the range that are kept for each process.
    parts: Parts,
    /// Ports that are bound by sockets of the host, by protocol.
    reserved: HashMap<(Protocol, u16), (), foldhash::fast::RandomState>,
    /// Ports by destination. The values are small to keep the table small: it doubles in the middle
    /// of an admission, which waits until all elements have moved to fresh memory.
    toward: HashMap<Destination, Busy, foldhash::fast::RandomState>,
    /// Rests of ports whose flow was not inspected, those of ports that were reused early included.
    rests: RestOrder,
    /// Those of ports that the host has in TIME-WAIT, which are shorter.
    host_waits: RestOrder,
    /// Rests of ports of inspected flows.
    inspected: RestOrder,
    /// Number of rests in `inspected`, by VM id.
    inspected_of: HashMap<VmId, usize, foldhash::fast::RandomState>,
    /// Share of each VM in [`MAX_RESTING`] rests of inspected flows.
    inspected_reserve: Reserve,
    /// Rest that the last pick ended early; kept until the next pick, for [`PortPool::put_back`].
    early: Option<(Destination, Rest)>,
    rng: SmallRng,
}

impl PortPool {
    /// Creates a pool over `range`, seeded from the system's entropy.
    pub fn new(range: RangeInclusive<u16>) -> Self {
        Self::with_rng(range, SmallRng::from_rng(&mut rand::rng()))
    }

    /// Creates a pool with the given random number generator, for tests.
    pub fn with_rng(range: RangeInclusive<u16>, rng: SmallRng) -> Self {
        Self {
            vms: 1,
            reserve: Reserve::new(range.len(), 1),
            parts: Parts::new(range.len(), 0, 0),
            range,
            reserved: HashMap::default(),
            toward: HashMap::default(),
            rests: VecDeque::new(),
            host_waits: VecDeque::new(),
            inspected: VecDeque::new(),
            inspected_of: HashMap::default(),
            inspected_reserve: Reserve::new(MAX_RESTING, 1),
            early: None,
            rng,
        }
    }

    /// Returns the number of ports in the range.
    pub fn size(&self) -> usize {
        self.range.len()
    }

    /// Sets the number of VMs among which the ports are shared.
    pub fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.reserve = Reserve::new(self.usable(), vms);
        self.inspected_reserve = Reserve::new(MAX_RESTING, vms);
    }

    /// Sets the rows of `OWNERS` that other processes hold, one bit each, and the row of this
    /// process. While there are others, a part of the range is kept for each process: the parts of
    /// others are not used, and the own part is for VMs that have few ports.
    pub fn share_with(&mut self, own_row: u32, others: u64) {
        let parts = Parts::new(self.range.len(), own_row, others);
        if parts != self.parts {
            self.parts = parts;
            self.reserve = Reserve::new(self.usable(), self.vms);
        }
    }

    /// Returns the number of ports in the range that are not kept for a process.
    fn usable(&self) -> usize {
        self.range.len() - self.parts.kept()
    }

    /// Whether another flow of a VM may be inspected: its port has to rest for the whole time
    /// afterwards.
    pub fn may_inspect(&self, vm: VmId) -> bool {
        let free = MAX_RESTING.saturating_sub(self.inspected.len());
        let held = || self.inspected_of.get(&vm).copied().unwrap_or_default();
        free > 0 && self.inspected_reserve.allows(free, held)
    }

    /// Sets the ports that are bound by sockets of the host; they are not picked any more.
    pub fn set_reserved(&mut self, ports: impl IntoIterator<Item = (Protocol, u16)>) {
        self.reserved = ports.into_iter().map(|p| (p, ())).collect();
    }

    /// Picks a free port toward a destination for a VM and marks it busy. Returns `None` when no
    /// port is free, or the VM has used up its share. `timestamps`: whether the port is for a SYN
    /// with TCP timestamps.
    pub fn pick(
        &mut self,
        to: Destination,
        vm: VmId,
        timestamps: bool,
        now_ns: u64,
    ) -> Option<u16> {
        let size = self.range.len();
        if size == 0 {
            return None;
        }
        let first = *self.range.start();
        let usable = self.usable();
        let mut start = random_below(&mut self.rng, size);
        self.early = None;
        let mut toward = match self.toward.entry(to) {
            Entry::Occupied(toward) => toward,
            Entry::Vacant(none) => {
                let port = first + start as u16;
                let may = self.reserve.allows(usable, || 0);
                let is_common = self.parts.behind_kept(start).is_none();
                if may && is_common && !is_reserved(&self.reserved, to, port) {
                    none.insert(Busy::One(start as u16, vm));
                    return Some(port);
                }
                none.insert_entry(Busy::default())
            }
        };
        let toward = toward.get_mut().whole();
        let free = usable.saturating_sub(toward.busy.len());
        let may = self.reserve.allows(free, || toward.busy.held_by(vm));
        // Reserved ports are few; each costs one more try, as does what is kept for a process.
        let parts = if self.parts.kept() > 0 {
            RANDOM_TRIES + MAX_OWNERS as usize
        } else {
            0
        };
        let tries = if may {
            1 + self.reserved.len().min(64) + parts
        } else {
            0
        };
        for tried in 0..tries {
            let Some(offset) = toward.busy.first_free_from(start, size) else {
                break;
            };
            if let Some(behind) = self.parts.behind_kept(offset) {
                // By chance again, or what lies behind would be likelier than others.
                start = match tried {
                    ..RANDOM_TRIES => random_below(&mut self.rng, size),
                    _ => behind % size,
                };
                continue;
            }
            let port = first + offset as u16;
            if !is_reserved(&self.reserved, to, port) {
                toward.busy.set(offset, vm, size);
                return Some(port);
            }
            start = (offset + 1) % size;
        }
        if toward.busy.len() == 0 {
            self.toward.remove(&to);
            return None;
        }
        // One of its own that rests; the look is bounded, the oldest are the likeliest.
        let toward = self.toward.get(&to)?.many()?;
        let mut oldest = toward.resting.iter().take(RESTING_LOOKS);
        let may = |rest: &Rest| self.may_have_early(to, rest, vm, timestamps, now_ns);
        let at = oldest.position(may)?;
        let rest = self.toward.get_mut(&to)?.whole().resting.remove(at)?;
        self.early = Some((to, rest));
        Some(rest.port)
    }

    /// Whether a VM would get a port toward a destination if the ports in `given_back` had been
    /// returned: by [`PortPool::pick`], [`PortPool::pick_kept`] or [`PortPool::take`].
    pub fn has_port(
        &self,
        to: Destination,
        vm: VmId,
        timestamps: bool,
        now_ns: u64,
        given_back: &[GivenBack],
    ) -> bool {
        let toward = self.toward.get(&to);
        if self.has_plenty(toward, vm) && given_back.is_empty() {
            return true;
        }
        let is_reserved = |port: u16| is_reserved(&self.reserved, to, port);
        let is_own = |given: &&GivenBack| {
            given.vm == vm && !is_reserved(given.port) && self.offset(given.port).is_some()
        };
        let own = || given_back.iter().filter(is_own);
        let host_waits = toward.is_some_and(Busy::has_waited);
        let is_safe = |how| how == Freed::Safe || how == Freed::GuestFirst && !host_waits;
        let is_its_again = |how| is_safe(how) || how == Freed::RestsForOthers;
        if own().any(|given| given.is_reclaimed && is_its_again(given.how)) {
            return true;
        }
        let (none, mut one) = (Toward::default(), Toward::default());
        let toward = toward.map_or(&none, |toward| toward.view(&mut one));
        let safe = given_back.iter().filter(|given| is_safe(given.how));
        let freed: Vec<(usize, VmId)> = safe
            .filter_map(|given| Some((self.offset(given.port)?, given.vm)))
            .collect();
        let busy = toward.busy.len().saturating_sub(freed.len());
        let freed_own = freed.iter().filter(|(_, of)| *of == vm).count();
        let held = || toward.busy.held_by(vm).saturating_sub(freed_own);
        let (first, size) = (*self.range.start(), self.range.len());
        let is_free = |offset: &usize| {
            let is_busy = toward.busy.contains(*offset);
            (!is_busy || freed.iter().any(|(freed, _)| freed == offset))
                && !is_reserved(first + *offset as u16)
        };
        if self
            .reserve
            .allows(self.usable().saturating_sub(busy), held)
            && busy < size
        {
            let is_common = |offset: &usize| self.parts.behind_kept(*offset).is_none();
            // Reserved ports are few: mostly there is nothing to search.
            if size - busy > self.reserved.len() + self.parts.kept()
                || (0..size).filter(is_common).any(|offset| is_free(&offset))
            {
                return true;
            }
        }
        let mut oldest = toward.resting.iter().take(RESTING_LOOKS);
        let rests = |how| matches!(how, Freed::Rests | Freed::RestsForOthers);
        if oldest.any(|rest| self.may_have_early(to, rest, vm, timestamps, now_ns))
            || timestamps
                && toward.resting.len() < RESTING_LOOKS
                && own().any(|given| rests(given.how))
        {
            return true;
        }
        held() < self.kept_for_each()
            && self.parts.own().any(|offset| {
                let port = first + offset as u16;
                let is_for = |rest: &Rest| rest.is_for(port, vm);
                is_free(&offset)
                    || !is_reserved(port) && toward.resting.iter().any(is_for)
                    || own().any(|given| given.port == port && is_its_again(given.how))
            })
    }

    /// Whether a VM may take a port toward a destination, and there are more free ones than those that
    /// might be reserved or kept for a process: mostly there is nothing to search.
    fn has_plenty(&self, toward: Option<&Busy>, vm: VmId) -> bool {
        let busy = toward.map_or(0, Busy::len);
        let held = || toward.map_or(0, |toward| toward.held_by(vm));
        let free = self.range.len().saturating_sub(busy);
        self.reserve
            .allows(self.usable().saturating_sub(busy), held)
            && free > self.reserved.len() + self.parts.kept()
    }

    /// Returns how many of the ports that are kept for this process one VM may have toward a
    /// destination.
    fn kept_for_each(&self) -> usize {
        (self.parts.own().len() / self.vms.max(1)).max(1)
    }

    /// Whether a VM may reuse a resting port before the end of its rest.
    fn may_have_early(
        &self,
        to: Destination,
        rest: &Rest,
        vm: VmId,
        timestamps: bool,
        now_ns: u64,
    ) -> bool {
        let is_early = timestamps && !rest.is_firm || rest.early_ns <= now_ns;
        rest.vm == vm && is_early && !is_reserved(&self.reserved, to, rest.port)
    }

    /// Returns a port that was just picked and not used, and restores its former state.
    pub fn put_back(&mut self, to: Destination, port: u16, vm: VmId) {
        let (Some(offset), Entry::Occupied(mut entry)) = (self.offset(port), self.toward.entry(to))
        else {
            return;
        };
        match self.early.take() {
            Some((of, rest)) if of == to && rest.port == port => {
                entry.get_mut().whole().resting.push_front(rest);
            }
            _ => clear(entry, offset, vm),
        }
    }

    /// Whether the port that was picked last was resting, so that the peer may have a former connection
    /// of it in TIME-WAIT.
    pub fn is_last_early(&self) -> bool {
        self.early.is_some()
    }

    /// Picks a free port from the part that is kept for this process, for a VM that has less than
    /// an equal share of that part toward the destination.
    pub fn pick_kept(&mut self, to: Destination, vm: VmId) -> Option<u16> {
        let own = self.parts.own();
        let held = self.toward.get(&to).map_or(0, |t| t.held_by(vm));
        if held >= self.kept_for_each() {
            return None;
        }
        let first = *self.range.start();
        let mut ports = own.map(|offset| first + offset as u16);
        ports.find(|port| self.take(to, *port, vm))
    }

    /// Takes a port for a VM that has just returned it for this purpose, whatever its share.
    /// Returns false when the port is neither free nor resting for others only.
    pub fn take(&mut self, to: Destination, port: u16, vm: VmId) -> bool {
        let Some(offset) = self.offset(port) else {
            return false;
        };
        if is_reserved(&self.reserved, to, port) {
            return false;
        }
        let size = self.range.len();
        let toward = self.toward.entry(to).or_default().whole();
        if !toward.busy.contains(offset) {
            self.early = None;
            toward.busy.set(offset, vm, size);
            return true;
        }
        // The newest rest of the port.
        let at = toward
            .resting
            .iter()
            .rposition(|rest| rest.is_for(port, vm));
        let rest = at.and_then(|at| toward.resting.remove(at));
        self.early = rest.map(|rest| (to, rest)).or(self.early);
        rest.is_some()
    }

    /// Has room for ports toward so many more destinations.
    pub fn expect(&mut self, destinations: usize) {
        self.toward.reserve(destinations);
    }

    /// Marks a port busy that a VM's flow uses already (adoption). A busy one keeps its holder.
    pub fn mark(&mut self, to: Destination, port: u16, vm: VmId) {
        if let Some(offset) = self.offset(port) {
            let size = self.range.len();
            match self.toward.entry(to) {
                Entry::Vacant(none) => drop(none.insert(Busy::One(offset as u16, vm))),
                Entry::Occupied(mut toward) => toward.get_mut().whole().busy.set(offset, vm, size),
            }
        }
    }

    /// Frees a VM's port. A port outside the range (a forward's) is not managed by the pool:
    /// nothing is done.
    pub fn free(&mut self, to: Destination, port: u16, vm: VmId, how: Freed, now_ns: u64) {
        let Some(offset) = self.offset(port) else {
            return;
        };
        let Entry::Occupied(mut entry) = self.toward.entry(to) else {
            return;
        };
        match how {
            Freed::Safe => clear(entry, offset, vm),
            Freed::GuestFirst if !entry.get().has_waited() => clear(entry, offset, vm),
            Freed::GuestFirst | Freed::HostWaits => {
                let toward = entry.get_mut().whole();
                toward.has_waited = true;
                let ready_ns = now_ns + HOST_WAIT_NS;
                toward.resting.push_back(Rest {
                    port,
                    vm,
                    ready_ns,
                    early_ns: u64::MAX,
                    is_firm: true,
                });
                self.host_waits.push_back((ready_ns, to, port));
                if self.host_waits.len() > MAX_RESTING
                    && let Some(first) = self.host_waits.pop_front()
                {
                    self.end_rest(first, |toward| &mut toward.resting);
                }
            }
            Freed::Rests | Freed::RestsForOthers | Freed::Taken => {
                let toward = entry.get_mut().whole();
                let holder = if how == Freed::Taken { NOBODY } else { vm };
                if holder != vm {
                    toward.busy.hand_over(offset, vm, holder);
                }
                let ready_ns = now_ns + PORT_REST_NS;
                toward.resting.push_back(Rest {
                    port,
                    vm: holder,
                    ready_ns,
                    early_ns: match how {
                        Freed::RestsForOthers => now_ns + EARLY_NS,
                        _ => u64::MAX,
                    },
                    is_firm: false,
                });
                self.rests.push_back((ready_ns, to, port));
                if self.rests.len() > MAX_RESTING
                    && let Some(first) = self.rests.pop_front()
                {
                    self.end_rest(first, |toward| &mut toward.resting);
                }
            }
            Freed::Inspected => {
                let ready_ns = now_ns + PORT_REST_NS;
                let rest = Rest {
                    port,
                    vm,
                    ready_ns,
                    early_ns: u64::MAX,
                    is_firm: true,
                };
                entry.get_mut().whole().inspected.push_back(rest);
                self.inspected.push_back((ready_ns, to, port));
                *self.inspected_of.entry(vm).or_default() += 1;
            }
        }
    }

    /// Frees ports whose rest has ended, so many at once. Returns whether these were all.
    pub fn wake(&mut self, now_ns: u64) -> bool {
        let is_over = |rest: &mut (u64, Destination, u16)| rest.0 <= now_ns;
        let mut left = PORTS_AT_ONCE;
        while left > 0
            && let Some(rest) = self.rests.pop_front_if(is_over)
        {
            left -= 1;
            self.end_rest(rest, |toward| &mut toward.resting);
        }
        while left > 0
            && let Some(rest) = self.host_waits.pop_front_if(is_over)
        {
            left -= 1;
            self.end_rest(rest, |toward| &mut toward.resting);
        }
        while left > 0
            && let Some(rest) = self.inspected.pop_front_if(is_over)
        {
            left -= 1;
            let ended = self.end_rest(rest, |toward| &mut toward.inspected);
            if let Some(Rest { vm, .. }) = ended
                && let Entry::Occupied(mut count) = self.inspected_of.entry(vm)
            {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        left > 0
    }

    /// Ends a rest in the list that `of` selects and frees its port. Returns `None` and frees
    /// nothing when the port was reused early: its next rest is another one.
    fn end_rest(
        &mut self,
        (ready_ns, to, port): (u64, Destination, u16),
        of: impl FnOnce(&mut Toward) -> &mut VecDeque<Rest>,
    ) -> Option<Rest> {
        let offset = self.offset(port)?;
        let Entry::Occupied(mut entry) = self.toward.entry(to) else {
            return None;
        };
        entry.get().many()?;
        let rests = of(entry.get_mut().whole());
        let is_it = |rest: &Rest| rest.port == port && rest.ready_ns == ready_ns;
        let rest = rests
            .iter()
            .position(is_it)
            .and_then(|at| rests.remove(at))?;
        clear(entry, offset, rest.vm);
        Some(rest)
    }

    /// Returns the number of busy ports toward a destination, resting ones included.
    pub fn busy(&self, to: &Destination) -> usize {
        self.toward.get(to).map_or(0, Busy::len)
    }

    /// Whether ports toward a destination run short, so that closed flows should be ended early.
    pub fn is_pressed(&self, to: &Destination) -> bool {
        self.busy(to) * 2 > self.range.len()
    }

    /// Returns the next `most` ports of the range, for a search among a destination's flows that
    /// continues where the previous one stopped ([`PortPool::looked_at`]).
    pub fn next_ports(&self, to: &Destination, most: usize) -> impl Iterator<Item = u16> + use<> {
        let (first, size) = (*self.range.start(), self.range.len());
        let toward = self.toward.get(to).and_then(Busy::many);
        let start = toward.map_or(0, |t| usize::from(t.looked_at));
        (0..most.min(size)).map(move |i| first + ((start + i) % size) as u16)
    }

    /// Records that the next `ports` ports toward a destination have been searched.
    pub fn looked_at(&mut self, to: &Destination, ports: usize) {
        let size = self.range.len();
        if let Some(toward) = self.toward.get_mut(to) {
            let toward = toward.whole();
            let next = (usize::from(toward.looked_at) + ports.min(size)) % size.max(1);
            toward.looked_at = next as u16;
        }
    }

    /// Returns the number of destinations with a busy port, and the number of resting ports.
    pub fn sizes(&self) -> (usize, usize) {
        let rests = self.rests.len() + self.host_waits.len() + self.inspected.len();
        (self.toward.len(), rests)
    }

    fn offset(&self, port: u16) -> Option<usize> {
        self.range
            .contains(&port)
            .then(|| usize::from(port - self.range.start()))
    }
}

fn is_reserved(
    reserved: &HashMap<(Protocol, u16), (), foldhash::fast::RandomState>,
    to: Destination,
    port: u16,
) -> bool {
    !reserved.is_empty() && reserved.contains_key(&(to.protocol, port))
}

/// Frees a port of a holder, and forgets the destination if it was the last one.
fn clear(
    mut toward: hashbrown::hash_map::OccupiedEntry<
        '_,
        Destination,
        Busy,
        foldhash::fast::RandomState,
    >,
    offset: usize,
    holder: VmId,
) {
    if toward.get_mut().clear(offset, holder) {
        toward.remove();
    }
}

fn random_below(rng: &mut impl Rng, size: usize) -> usize {
    rng.random_range(0..size)
}

#[cfg(test)]
#[path = "nat_ports_test.rs"]
mod tests;
