//! Inspected flows: what their packets lead to. [`crate::inspect`] says what is looked for.
//!
//! A flow that an inspect rule lets in opens with the verdict `Engine`, and a session beside it.
//! Each packet of its comes here, from either side, until the session lets the flow go to the
//! kernel or ends it. A flow of such a rule that is held and has no session (its engine is gone) is
//! ended: nobody knows what went by.
//!
//! Books: what a session of TCP holds is dropped as [`DropReason::Held`]; what it sends to the server is
//! counted in the flow by the kernel, and what it sends to the guest as the engine's own. A
//! datagram that waits is counted when it goes on, in the flow, or when it does not, as dropped.
use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{
    Command, DropReason, Ip4, PortHeader, Protocol, Refusal, Tuple, Verdict, segment::Segments,
};

use super::{
    core::{Core, VmState},
    dispatch::{Change, Disposition, Finish, Job},
};
use crate::{
    datapath::Datapath,
    flow::{self, EndReason, State},
    inspect::{
        HostName, Refused, RefusedCounts,
        quic::{self, Passage},
        tcp::{Fate, Outcome, Received, SLOW_NS, Segment, Session, Wire, build_header},
    },
    packet::{
        Ipv4, Packet, Transport, checksum::Sum, icmp::Unreachable, ipv4, transport::UDP_HEADER_LEN,
    },
    port::{ETHERNET_LEN, ETHERTYPE_IPV4, Outbox, OutboxFull, VirtioNetHdr, single},
    reply::IcmpError,
    rules::{self, Http, LearntName, SharedJudge},
    stats::VmStats,
    vm::VmNet,
};

/// Inspected flows of a VM at once.
pub(crate) const MAX_SESSIONS: usize = 4_096;
/// What is held for a VM at once, bytes.
pub(crate) const MAX_HELD: usize = 8 << 20;
/// Names that a connection named are remembered, so many.
const MAX_NAMED: usize = 16;

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Inspected {
    sessions: HashMap<u32, Box<Inspection>>,
    timers: BTreeSet<(u64, u32)>,
    vms: HashMap<u32, OfVm>,
}

#[derive(Debug)]
struct Inspection {
    generation: u32,
    vm: u32,
    stats: VmStats,
    due_ns: Option<u64>,
    held: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Tcp(Box<Session>),
    Quic {
        flow: quic::Flow,
        /// By when what waits must be whole, ns.
        ends_ns: Option<u64>,
        named: Vec<Rc<LearntName>>,
    },
}

impl Kind {
    fn due_ns(&self) -> Option<u64> {
        match self {
            Self::Tcp(session) => session.due_ns(),
            Self::Quic { ends_ns, .. } => *ends_ns,
        }
    }

    fn held(&self) -> usize {
        match self {
            Self::Tcp(session) => session.held(),
            Self::Quic { flow, .. } => flow.held(),
        }
    }

    fn is_let_in(&self) -> bool {
        match self {
            Self::Tcp(session) => session.is_let_in(),
            Self::Quic { flow, .. } => flow.is_open(),
        }
    }

    fn begin_timers(&mut self, now_ns: u64) {
        match self {
            Self::Tcp(session) => session.begin_timers(now_ns),
            Self::Quic { ends_ns, .. } => *ends_ns = ends_ns.map(|_| now_ns + SLOW_NS),
        }
    }
}

#[derive(Debug, Default)]
struct OfVm {
    sessions: usize,
    held: usize,
    counts: RefusedCounts,
}

impl Inspected {
    /// Whether a VM may have another session.
    fn has_room(&self, vm: u32) -> bool {
        let of_vm = self.vms.get(&vm);
        of_vm.is_none_or(|of_vm| of_vm.sessions < MAX_SESSIONS && of_vm.held < MAX_HELD)
    }

    /// What was refused of a VM's.
    pub(crate) fn counts(&self, vm: u32) -> RefusedCounts {
        self.vms
            .get(&vm)
            .map(|of_vm| of_vm.counts)
            .unwrap_or_default()
    }

    pub(crate) fn count(&mut self, vm: u32, why: Refused) {
        self.vms.entry(vm).or_default().counts.add(why);
    }

    fn add(&mut self, slot: u32, generation: u32, vm: &VmNet, kind: Kind) {
        self.forget(slot);
        self.vms.entry(vm.id).or_default().sessions += 1;
        let inspection = Inspection {
            generation,
            vm: vm.id,
            stats: vm.stats,
            due_ns: None,
            held: 0,
            kind,
        };
        self.put(slot, Box::new(inspection));
    }

    fn take(&mut self, slot: u32, generation: u32) -> Option<Box<Inspection>> {
        let inspection = self.sessions.get(&slot)?;
        if inspection.generation != generation {
            return None;
        }
        self.sessions.remove(&slot)
    }

    /// Brings a session back, with what changed in it.
    fn put(&mut self, slot: u32, mut inspection: Box<Inspection>) {
        let due_ns = inspection.kind.due_ns();
        if due_ns != inspection.due_ns {
            if let Some(at) = std::mem::replace(&mut inspection.due_ns, due_ns) {
                self.timers.remove(&(at, slot));
            }
            self.timers.extend(due_ns.map(|at| (at, slot)));
        }
        let held = inspection.kind.held();
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held = of_vm.held + held - inspection.held;
        }
        inspection.held = held;
        self.sessions.insert(slot, inspection);
    }

    /// Ends a session that is taken out.
    fn end(&mut self, slot: u32, inspection: &Inspection) {
        if let Kind::Quic { flow, .. } = &inspection.kind {
            for (vnet, l3) in flow.waiting() {
                let segments = held_segments(*vnet, l3);
                inspection.stats.dropped(DropReason::Refused, segments);
            }
        }
        if let Some(at) = inspection.due_ns {
            self.timers.remove(&(at, slot));
        }
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held -= inspection.held;
            of_vm.sessions -= 1;
        }
    }

    /// A flow has ended, if this was its generation.
    pub(crate) fn flow_ended(&mut self, slot: u32, generation: u32) {
        if let Some(inspection) = self.take(slot, generation) {
            self.end(slot, &inspection);
        }
    }

    fn forget(&mut self, slot: u32) {
        if let Some(inspection) = self.sessions.remove(&slot) {
            self.end(slot, &inspection);
        }
    }

    /// A VM is gone; its flows are about to end.
    pub(crate) fn forget_vm(&mut self, vm: u32) {
        let sessions = self.sessions.iter();
        let slots: Vec<u32> = sessions
            .filter_map(|(slot, inspection)| (inspection.vm == vm).then_some(*slot))
            .collect();
        for slot in slots {
            self.forget(slot);
        }
        self.vms.remove(&vm);
    }

    /// Whether a flow has a session, and whether that let a name in.
    pub(super) fn is_let_in(&self, slot: u32, generation: u32) -> bool {
        let inspection = self.sessions.get(&slot);
        inspection.is_some_and(|i| i.generation == generation && i.kind.is_let_in())
    }

    /// A router on the way of a flow's packets says what it carries, bytes.
    pub(super) fn path_carries(&mut self, slot: u32, generation: u32, mtu: u32) {
        if let Some(inspection) = self.sessions.get_mut(&slot)
            && inspection.generation == generation
            && let Kind::Tcp(session) = &mut inspection.kind
        {
            session.path_carries(mtu);
        }
    }

    /// A VM is about to be thawed: it could not help being silent.
    pub(super) fn begin_timers(&mut self, vm: u32, now_ns: u64) {
        let sessions = self.sessions.iter();
        let slots: Vec<u32> = sessions
            .filter_map(|(slot, inspection)| (inspection.vm == vm).then_some(*slot))
            .collect();
        for slot in slots {
            if let Some(mut inspection) = self.sessions.remove(&slot) {
                inspection.kind.begin_timers(now_ns);
                self.put(slot, inspection);
            }
        }
    }

    /// When the next session's timer is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }
}

impl<D: Datapath> Core<D> {
    /// Whether a flow under an inspect rule may be opened for a packet.
    pub(crate) fn may_inspect(&mut self, vm: &VmState, packet: &Packet<'_>) -> bool {
        let why = match packet.transport {
            Transport::Tcp(_) | Transport::Udp(_) if self.inspected.has_room(vm.net.id) => {
                return true;
            }
            Transport::Tcp(_) | Transport::Udp(_) => Refused::Limit,
            _ => Refused::Unknown,
        };
        self.inspected.count(vm.net.id, why);
        false
    }

    /// A flow under an inspect rule was opened by a packet.
    pub(crate) fn begin_inspection(
        &mut self,
        vm: &VmState,
        packet: &Packet<'_>,
        slot: u32,
        http: Http,
        now_ns: u64,
    ) {
        let generation = self.datapath.slot(slot).generation().load(Relaxed);
        let kind = match packet.transport {
            Transport::Tcp(tcp) => {
                let header = packet.ip.payload().get(..tcp.header_len);
                let header = header.unwrap_or_default();
                let mtus = (self.uplink_mtu(slot), self.path_mtu(&vm.net, slot));
                let session = Session::new(tcp.sequence, header, mtus, http, now_ns);
                Kind::Tcp(Box::new(session))
            }
            _ => Kind::Quic {
                flow: quic::Flow::default(),
                ends_ns: None,
                named: Vec::new(),
            },
        };
        self.inspected.add(slot, generation, &vm.net, kind);
    }

    /// A guest's packet of this flow. `None`: it goes on like any.
    pub(super) fn inspect_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Ok(inspection) => inspection,
            Err(finish) => return finish,
        };
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let Transport::Tcp(tcp) = job.packet.transport else {
            return self.quic_from_guest(vm, job, slot, inspection, now_ns);
        };
        let segment = Received::new(&tcp, job.packet.ip.payload());
        let more = match &inspection.kind {
            Kind::Tcp(session) => session.held_more_with(&segment),
            Kind::Quic { .. } => 0,
        };
        if more > 0 && self.inspected.held(vm.net.id) + more > MAX_HELD {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::EngineBusy));
        }
        let done = self.with_session(vm, slot, now_ns, &mut inspection, |session, wire, may| {
            if tcp.is_opening_syn() {
                return (session.guest_opens(&segment, wire), Outcome::Goes);
            }
            session.guest_sent(&segment, wire, may, now_ns)
        });
        let (fate, outcome) = done.unwrap_or((Fate::Dropped, Outcome::Goes));
        self.conclude(vm, slot, inspection, outcome, now_ns);
        match fate {
            Fate::Pass | Fate::PassAs { .. } => None,
            Fate::Held => Some(Finish::Drop(DropReason::Held)),
            Fate::Dropped => Some(Finish::Drop(DropReason::Refused)),
        }
    }

    /// A guest's UDP frame of this flow: QUIC or nothing.
    fn quic_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        mut inspection: Box<Inspection>,
        now_ns: u64,
    ) -> Option<Finish> {
        let Kind::Quic {
            flow,
            ends_ns,
            named,
        } = &mut inspection.kind
        else {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Refused));
        };
        let to = destination(&self.datapath.slot(slot).guest_tuple());
        let mut by = Naming::new(&self.judge, vm.net.id, to, now_ns);
        let others = self.inspected.held(vm.net.id) - inspection.held;
        let mut is_busy = false;
        let mut passage = Ok(Passage::Goes);
        for datagram in datagrams(&job) {
            // What is kept of an Initial must have room before it is looked at.
            if others + flow.held() >= MAX_HELD
                && quic::initials(datagram).is_ok_and(|initials| !initials.is_empty())
            {
                is_busy = true;
                break;
            }
            // One that waits or is left out does so with its frame.
            passage = match (
                passage,
                flow.datagram(datagram, &mut |said| by.may(said, named)),
            ) {
                (Err(why), _) | (_, Err(why)) => Err(why),
                (Ok(Passage::Dropped), _) | (_, Ok(Passage::Dropped)) => Ok(Passage::Dropped),
                // Behind what waits another packet may go at once, but not with it.
                (Ok(Passage::Held), _) if flow.is_undecided() => Ok(Passage::Held),
                (_, Ok(this)) => Ok(this),
            };
        }
        let opened_by = by.last;
        let (vnet, l3) = (job.frame.vnet, job.packet.ip.bytes);
        is_busy |= passage == Ok(Passage::Held) && others + flow.held() + l3.len() > MAX_HELD;
        let passage = match passage {
            Ok(_) if is_busy => Ok(Passage::Dropped),
            Ok(Passage::Held) => flow.hold(vnet, l3).map(|()| Passage::Held),
            passage => passage,
        };
        let released = match passage {
            Ok(Passage::Goes) => flow.release(),
            _ => Vec::new(),
        };
        *ends_ns = match flow.is_undecided() {
            false => None,
            true => Some(ends_ns.unwrap_or(now_ns + SLOW_NS)),
        };
        if let Some(name) = opened_by {
            self.opened_by.insert(slot, (inspection.generation, name));
        }
        let header = PortHeader {
            code: Command::Forward as u8,
            flags: 0,
            vm_row: vm.net.row,
            id: vm.net.id,
        };
        for (vnet, l3) in &released {
            if let Err(OutboxFull) = self.out.push(header, ETHERTYPE_IPV4, *vnet, l3) {
                vm.net
                    .stats
                    .dropped(DropReason::EngineBusy, held_segments(*vnet, l3));
            }
        }
        match passage {
            // Behind what was held, which is written at the end of the batch.
            Ok(Passage::Goes) if !released.is_empty() => {
                self.inspected.put(slot, inspection);
                match self.out.push(header, ETHERTYPE_IPV4, vnet, l3) {
                    Ok(()) => Some(Finish::Dispose(Disposition::Consumed)),
                    Err(OutboxFull) => Some(Finish::Drop(DropReason::EngineBusy)),
                }
            }
            Ok(Passage::Goes) => {
                self.inspected.put(slot, inspection);
                None
            }
            Ok(Passage::Held) => {
                self.inspected.put(slot, inspection);
                Some(Finish::Dispose(Disposition::Consumed))
            }
            Ok(Passage::Dropped) => {
                self.inspected.put(slot, inspection);
                Some(Finish::Drop(match is_busy {
                    true => DropReason::EngineBusy,
                    false => DropReason::Malformed,
                }))
            }
            Err(why) => {
                self.inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
                let error = IcmpError::Unreachable(Unreachable::Prohibited);
                let out = &mut self.out;
                vm.answers
                    .icmp_to_guest(&vm.net, &job.packet, error, out, now_ns);
                Some(Finish::Drop(DropReason::Refused))
            }
        }
    }

    /// The world's packet of this flow. `None`: it goes on like any.
    pub(super) fn inspect_from_world(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Ok(inspection) => inspection,
            Err(finish) => return finish,
        };
        let Transport::Tcp(tcp) = job.packet.transport else {
            if let Kind::Quic { flow, .. } = &mut inspection.kind {
                datagrams(&job).for_each(|datagram| flow.server_datagram(datagram));
            }
            self.inspected.put(slot, inspection);
            return None;
        };
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let segment = Received::new(&tcp, job.packet.ip.payload());
        let done = self.with_session(vm, slot, now_ns, &mut inspection, |session, wire, may| {
            session.server_sent(&segment, wire, may, now_ns)
        });
        let (fate, outcome) = done.unwrap_or((Fate::Pass, Outcome::Goes));
        self.conclude(vm, slot, inspection, outcome, now_ns);
        match fate {
            Fate::Pass => None,
            Fate::PassAs {
                acknowledgement,
                window,
            } => Some(Finish::Command {
                code: Command::Deliver,
                change: Change::receiver(&job, acknowledgement, window),
            }),
            Fate::Held | Fate::Dropped => Some(Finish::Drop(DropReason::Refused)),
        }
    }

    /// Does what is due.
    pub(crate) fn work_inspections(&mut self, now_ns: u64) {
        while let Some(&(at, slot)) = self.inspected.timers.first() {
            if at > now_ns {
                return;
            }
            let Some(mut inspection) = self.inspected.sessions.remove(&slot) else {
                self.inspected.timers.pop_first();
                continue;
            };
            let live = self.datapath.slot(slot);
            let row = live.vm_row() as u16;
            // What it sends goes to whatever flow has the tuple: only while that is its own, and one
            // that may go on.
            let entry = self.flows.entry(slot);
            let same = entry.is_some_and(|entry| {
                entry.generation == inspection.generation
                    && matches!(entry.state, State::Live | State::Ending)
            });
            let goes_on = same && !self.flows.is_cut(slot);
            if goes_on && flow::is_frozen(&self.datapath, row) {
                inspection.kind.begin_timers(now_ns);
                self.inspected.put(slot, inspection);
                continue;
            }
            let Some(mut vm) = goes_on.then(|| self.take_vm(row, inspection.vm)).flatten() else {
                self.inspected.end(slot, &inspection);
                continue;
            };
            let done = self.with_session(&vm, slot, now_ns, &mut inspection, |session, wire, _| {
                session.on_timer(wire, now_ns)
            });
            // The only timer of QUIC is that of a hello that is not whole.
            let outcome = done.unwrap_or(Outcome::Refused(Refused::Slow));
            self.conclude(&mut vm, slot, inspection, outcome, now_ns);
            self.put_vm(vm);
        }
    }

    /// At the start: ends the flows that a predecessor inspected, for nobody knows what of them went
    /// by. Returns how many of those that lived it ended.
    pub(super) fn end_uninspected(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        for slot in self.flows.all() {
            let verdict = self.datapath.slot(slot).verdict().load(Relaxed);
            // One that was captured only had been let go before.
            let held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
            // One that was about to end may have been held before.
            let may_be_held = held || verdict == Verdict::Closing as u32;
            if may_be_held && self.has_inspect_rule(slot) {
                let vm = self.datapath.slot(slot).vm();
                self.inspected.count(vm, Refused::Lost);
                self.flows
                    .unlink(&mut self.datapath, slot, EndReason::Inspection, now_ns);
                ended += usize::from(held);
            }
        }
        ended
    }

    /// Whether an inspect rule let a flow in, or a rule that is not known any more where there are
    /// such rules.
    fn has_inspect_rule(&self, slot: u32) -> bool {
        let live = self.datapath.slot(slot);
        let rule = live.rule().checked_sub(self.rule_base).map(rules::RuleId);
        let judge = self.judge.borrow();
        let policy = judge.policy(live.vm());
        let known = rule.filter(|rule| policy.has(*rule));
        policy.inspections().0 && known.is_none_or(|rule| policy.inspects(rule))
    }

    /// Takes out a flow's inspection, for the time of a packet. Else what becomes of the packet:
    /// `None` where the flow is none of ours; one that is held and nobody knows why is ended.
    fn take_inspection(
        &mut self,
        vm: &VmState,
        slot: u32,
        now_ns: u64,
    ) -> Result<Box<Inspection>, Option<Finish>> {
        let held = self.flows.entry(slot).copied().filter(|e| e.is_held());
        let entry = held.ok_or(None)?;
        match self.inspected.take(slot, entry.generation) {
            Some(inspection) => Ok(inspection),
            None if !self.has_inspect_rule(slot) => Err(None),
            None => {
                self.end_inspected(vm, slot, Refused::Lost, now_ns);
                Err(Some(Finish::Drop(DropReason::Refused)))
            }
        }
    }

    /// Has a TCP session do something; `None`: it is another's.
    fn with_session<T>(
        &mut self,
        vm: &VmState,
        slot: u32,
        now_ns: u64,
        inspection: &mut Inspection,
        work: impl FnOnce(&mut Session, &mut dyn Wire, &mut May<'_>) -> T,
    ) -> Option<T> {
        let Kind::Tcp(session) = &mut inspection.kind else {
            return None;
        };
        let tuple = self.datapath.slot(slot).guest_tuple();
        let mut by = Naming::new(&self.judge, vm.net.id, destination(&tuple), now_ns);
        let mut may = |said: &HostName, named: &mut Vec<Rc<LearntName>>| by.may(said, named);
        let mut wire = Ends {
            out: &mut self.out,
            packet: &mut self.scratch,
            vm: &vm.net,
            guest: (tuple.local, tuple.local_port),
            server: (tuple.remote, tuple.remote_port),
            sent_to_server: 0,
        };
        let done = work(session, &mut wire, &mut may);
        if let Some(name) = by.last {
            self.opened_by.insert(slot, (inspection.generation, name));
        }
        Some(done)
    }

    fn conclude(
        &mut self,
        vm: &mut VmState,
        slot: u32,
        inspection: Box<Inspection>,
        outcome: Outcome,
        now_ns: u64,
    ) {
        match outcome {
            Outcome::Goes => self.inspected.put(slot, inspection),
            Outcome::Released => {
                self.inspected.end(slot, &inspection);
                self.flows.release(&mut self.datapath, slot);
            }
            Outcome::Reset => {
                self.inspected.end(slot, &inspection);
                let reason = EndReason::ResetForGood;
                self.flows.cut(&mut self.datapath, slot, reason, now_ns);
            }
            Outcome::Refused(why) => {
                self.inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
            }
        }
    }

    fn end_inspected(&mut self, vm: &VmState, slot: u32, why: Refused, now_ns: u64) {
        let rule = self.datapath.slot(slot).rule();
        vm.net.stats.refused(Refusal::Inspection);
        vm.net.stats.refused_by(rule);
        self.inspected.count(vm.net.id, why);
        let tuple = self.datapath.slot(slot).guest_tuple();
        self.refusals
            .note(vm.net.id, why.name(), Some(rule), &tuple, now_ns);
        self.flows
            .cut(&mut self.datapath, slot, EndReason::Inspection, now_ns);
    }
}

/// Judges what a connection names.
struct Naming<'a> {
    judge: &'a SharedJudge,
    vm: u32,
    to: rules::Destination,
    now_ns: u64,
    /// The last name that was let in.
    last: Option<Rc<LearntName>>,
}

impl<'a> Naming<'a> {
    fn new(judge: &'a SharedJudge, vm: u32, to: rules::Destination, now_ns: u64) -> Self {
        Self {
            judge,
            vm,
            to,
            now_ns,
            last: None,
        }
    }

    /// Whether a server of this name may be spoken to. What DNS told may be over by now; what the
    /// connection named before it may name again.
    fn may(&mut self, said: &HostName, named: &mut Vec<Rc<LearntName>>) -> bool {
        let text = said.name().without_dot();
        let before = named.iter().find(|name| *name.name == *text);
        let judge = self.judge.borrow();
        let name = match before {
            Some(name) => {
                let let_in = judge.lets_in(self.vm, self.to, said.name());
                let_in.ok().map(|()| name.clone())
            }
            None => judge.said(self.vm, self.to, said.name(), self.now_ns).ok(),
        };
        let Some(name) = name else {
            return false;
        };
        if !named.contains(&name) && named.len() < MAX_NAMED {
            named.push(name.clone());
        }
        self.last = Some(name);
        true
    }
}

fn destination(tuple: &Tuple) -> rules::Destination {
    rules::Destination {
        addr: tuple.remote.into(),
        port: tuple.remote_port,
        protocol: Protocol::from_ip(tuple.protocol).unwrap_or(Protocol::Tcp),
    }
}

/// What a packet that was held counts as.
fn held_segments(vnet: VirtioNetHdr, l3: &[u8]) -> Segments {
    let packet = Ipv4::parse(l3).and_then(Packet::parse);
    packet.map_or(single(l3.len()), |packet| packet.segments(vnet))
}

/// The datagrams that a UDP frame becomes.
fn datagrams<'a>(job: &Job<'a>) -> impl Iterator<Item = &'a [u8]> {
    let payload = job.packet.ip.payload().get(UDP_HEADER_LEN..);
    let payload = payload.unwrap_or_default();
    let vnet = job.frame.vnet;
    let each = match vnet.gso_type {
        VirtioNetHdr::GSO_NONE => payload.len(),
        _ => usize::from(vnet.gso_size),
    };
    // An empty datagram is one too.
    let empty = payload.is_empty().then_some(payload);
    payload.chunks(each.max(1)).chain(empty)
}

type May<'a> = dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool + 'a;

impl Inspected {
    /// Sessions, timers and bytes held.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> (usize, usize, usize) {
        let held = self.vms.values().map(|of_vm| of_vm.held).sum();
        (self.sessions.len(), self.timers.len(), held)
    }

    fn held(&self, vm: u32) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.held)
    }
}

/// Both ends of a connection.
struct Ends<'a> {
    out: &'a mut Outbox,
    packet: &'a mut Vec<u8>,
    vm: &'a VmNet,
    guest: (Ip4, u16),
    server: (Ip4, u16),
    sent_to_server: usize,
}

impl Ends<'_> {
    fn push_to_server(&mut self) {
        let header = PortHeader {
            code: Command::Forward as u8,
            flags: 0,
            vm_row: self.vm.row,
            id: self.vm.id,
        };
        let vnet = VirtioNetHdr::default();
        let _ = self.out.push(header, ETHERTYPE_IPV4, vnet, self.packet);
        self.sent_to_server += 1;
    }
}

// A full outbox loses a segment like a link would; the timers and the guest send again.
impl Wire for Ends<'_> {
    fn to_server(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.guest, self.server);
        self.push_to_server();
    }

    fn syn_to_server(&mut self, header: &[u8]) {
        build_header(self.packet, self.guest.0, self.server.0, header);
        self.push_to_server();
    }

    fn to_guest(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.server, self.guest);
        let vnet = VirtioNetHdr::default();
        let _ = self
            .out
            .to_guest(self.vm, ETHERTYPE_IPV4, vnet, self.packet);
    }

    fn sent_to_server(&self) -> usize {
        self.sent_to_server
    }
}

/// Whether a packet's checksum is right, or what is there of a partial one is and it lies where
/// whoever completes it looks for it; and whether a UDP header speaks of the whole packet.
fn is_intact(packet: &Packet<'_>, vnet: VirtioNetHdr) -> bool {
    let l4 = packet.ip.payload();
    let is_gso = vnet.gso_type != VirtioNetHdr::GSO_NONE;
    let checksum_at = match packet.transport {
        Transport::Tcp(_) => 16,
        Transport::Udp(_) => {
            let len = l4.get(4..6).map(|f| u16::from_be_bytes([f[0], f[1]]));
            if !is_gso && len.map(usize::from) != Some(l4.len()) {
                return false;
            }
            if l4.get(6..8) == Some(&[0, 0]) && !vnet.needs_csum() {
                // RFC 768: none was made.
                return true;
            }
            6
        }
        Transport::Icmp(_) | Transport::Other => return true,
    };
    let (source, destination) = (packet.ip.source, packet.ip.destination);
    let pseudo = Sum::default().pseudo(source, destination, packet.ip.protocol, l4.len());
    if !vnet.needs_csum() {
        return pseudo.bytes(l4).finish() == 0;
    }
    let place = usize::from(vnet.csum_start) == ETHERNET_LEN + ipv4::HEADER_LEN
        && usize::from(vnet.csum_offset) == checksum_at;
    let Some(field) = l4.get(checksum_at..checksum_at + 2) else {
        return false;
    };
    // All ones and zero are the same number.
    let field = u16::from_be_bytes([field[0], field[1]]);
    place && field % 0xffff == pseudo.folded() % 0xffff
}
