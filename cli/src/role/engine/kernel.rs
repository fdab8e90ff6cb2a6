//! The engine's tables, backed by the shared maps. Everything works without a capability.
use std::{
    collections::{HashMap, HashSet},
    io,
    net::IpAddr,
    ops::Range,
    rc::Rc,
    sync::atomic::Ordering::Acquire,
};

use slipgate_abi::{
    Addresses6Ref, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey, ForwardKey6,
    ForwardTarget, NameKey, NameValue, NextHopRef, OwnerRef, RuleIndex, SequencesRef, SlotIndex,
    SlotRef, Vm6Ref, VmId, VmRef, VmRow, first_packet::place, rate::RateRef,
};
use slipgate_control::maps::{Insert, InsertError as TableError, Listing, SharedMaps, text_of};
use slipgate_ipc::{channel::Channel, engine::FromEngine};
use slipgate_model::{FlowTuple, TupleKey};
use slipgate_policy::Described;
use userspace_nat::{
    datapath::{FlowMap, ForwardMap, Hop, InsertError, NameMap, PortKey, RememberedName, Tables},
    stats::VmStats,
};

/// The flow map and the mapped arrays.
#[derive(Debug)]
pub(super) struct KernelDatapath {
    maps: Rc<SharedMaps>,
    owner_row: u32,
    epoch: u32,
    /// Next hops claimed so far. Searching the elements for one would walk over all of them.
    next_hops: HashMap<Hop, u32>,
    /// Where the broker is asked to fill new ones; `None`: no flow needs one.
    broker: Option<Rc<Channel>>,
    /// The channel had no room for the question.
    unasked: bool,
    /// Positions of a listing of the flow maps, of IPv4 and of IPv6.
    listings: (Listing, Listing),
}

impl KernelDatapath {
    /// `broker` is notified of each claimed next hop, which it then fills and keeps up to date.
    pub(super) fn new(
        maps: Rc<SharedMaps>,
        owner_row: u32,
        epoch: u32,
        broker: Option<Rc<Channel>>,
    ) -> Self {
        Self {
            maps,
            owner_row,
            epoch,
            next_hops: HashMap::new(),
            broker,
            unasked: false,
            listings: Default::default(),
        }
    }

    /// Asks the broker to fill next hops. An unfilled one only costs a neighbour look-up per
    /// packet, so an error here is ignored; the reader of the channel handles it.
    fn ask_for_next_hops(&mut self) {
        let Some(broker) = &self.broker else { return };
        self.unasked = !matches!(broker.try_send(FromEngine::NextHopsWanted), Ok(true));
    }
}

impl FlowMap for KernelDatapath {
    fn insert_noexist(&mut self, tuple: &FlowTuple, flow: FlowRef) -> Result<(), InsertError> {
        let inserted = match tuple.key() {
            Some(TupleKey::V4(tuple)) => self.maps.flows.insert(&tuple, &flow, Insert::New),
            Some(TupleKey::V6(tuple)) => self.maps.flows6.insert(&tuple, &flow, Insert::New),
            None => return Err(InsertError::Os(io::ErrorKind::InvalidInput.into())),
        };
        insert_error(inserted)
    }

    fn remove(&mut self, tuple: &FlowTuple) -> io::Result<bool> {
        let removed = match tuple.key() {
            Some(TupleKey::V4(tuple)) => self.maps.flows.remove(&tuple),
            Some(TupleKey::V6(tuple)) => self.maps.flows6.remove(&tuple),
            None => return Ok(false),
        };
        removed.map_err(io::Error::other)
    }

    fn remove_all(&mut self, tuples: &[FlowTuple]) -> io::Result<()> {
        let (mut four, mut six) = (Vec::new(), Vec::new());
        for tuple in tuples {
            match tuple.key() {
                Some(TupleKey::V4(tuple)) => four.push(tuple),
                Some(TupleKey::V6(tuple)) => six.push(tuple),
                None => {}
            }
        }
        // A refusal in one map must not keep the entries of the other.
        let four = self.maps.flows.remove_all(&four).map(drop);
        let six = self.maps.flows6.remove_all(&six).map(drop);
        four.and(six).map_err(io::Error::other)
    }

    fn get(&mut self, tuple: &FlowTuple) -> io::Result<Option<FlowRef>> {
        let found = match tuple.key() {
            Some(TupleKey::V4(tuple)) => self.maps.flows.get(&tuple),
            Some(TupleKey::V6(tuple)) => self.maps.flows6.get(&tuple),
            None => return Ok(None),
        };
        found.map_err(io::Error::other)
    }

    fn visit_some(
        &mut self,
        begins: bool,
        visit: &mut dyn FnMut(FlowTuple, FlowRef),
    ) -> io::Result<bool> {
        if begins {
            self.listings = Default::default();
        }
        let (four, six) = &mut self.listings;
        if !four.is_over() {
            let some = self.maps.flows.next_entries(four);
            for (tuple, flow) in some.map_err(io::Error::other)? {
                visit(tuple.into(), flow);
            }
            return Ok(true);
        }
        let some = self.maps.flows6.next_entries(six);
        for (tuple, flow) in some.map_err(io::Error::other)? {
            visit(tuple.into(), flow);
        }
        Ok(!six.is_over())
    }
}

impl ForwardMap for KernelDatapath {
    fn open_port(&mut self, port: &PortKey, target: ForwardTarget) -> Result<(), InsertError> {
        let maps = &self.maps;
        insert_error(match port {
            PortKey::V4(key) => maps.forwards.lead_to(key, target),
            PortKey::V6(key) => maps.forwards6.lead_to(key, target),
        })
    }

    fn close_port(&mut self, port: &PortKey, vm: VmId) -> io::Result<()> {
        let maps = &self.maps;
        let closed = match port {
            PortKey::V4(key) => maps.forwards.lead_no_more(key, vm),
            PortKey::V6(key) => maps.forwards6.lead_no_more(key, vm),
        };
        closed.map_err(io::Error::other)
    }

    fn close_ports(
        &mut self,
        unwanted: &dyn Fn(&PortKey, &ForwardTarget) -> bool,
    ) -> io::Result<()> {
        let four = |key: &ForwardKey, to: &ForwardTarget| unwanted(&PortKey::V4(*key), to);
        let six = |key: &ForwardKey6, to: &ForwardTarget| unwanted(&PortKey::V6(*key), to);
        let closed = self.maps.forwards.remove_if(four);
        closed.map_err(io::Error::other)?;
        let closed = self.maps.forwards6.remove_if(six);
        closed.map(drop).map_err(io::Error::other)
    }
}

/// Returns the result of an insertion as the engine knows it.
fn insert_error(inserted: Result<(), TableError>) -> Result<(), InsertError> {
    inserted.map_err(|e| match e {
        TableError::Exists => InsertError::Exists,
        TableError::Full => InsertError::Full,
        TableError::Missing => InsertError::Os(io::ErrorKind::NotFound.into()),
        TableError::Os(e) => InsertError::Os(e),
    })
}

impl NameMap for KernelDatapath {
    fn remember_name(&mut self, name: &RememberedName) -> bool {
        let key = NameKey::new(name.vm, name.addr, &name.name);
        let value = NameValue::new(&name.name, name.expires_ns);
        value.is_some_and(|value| self.maps.names.insert(&key, &value, Insert::Any).is_ok())
    }

    fn forget_name(&mut self, vm: VmId, addr: IpAddr, name: &[u8]) -> bool {
        let removed = self.maps.names.remove(&NameKey::new(vm, addr, name));
        removed.unwrap_or(false)
    }

    fn remembered_names(&self) -> Vec<RememberedName> {
        let ours: HashSet<VmId> = slipgate_control::vm::rows_of(&self.maps, self.owner_row)
            .filter_map(|row| Some(VmId::new(self.maps.vm(row)?.id().load(Acquire))))
            .collect();
        // What can't be read is not known: its names are asked for anew.
        let names = self.maps.names.entries().unwrap_or_default().into_iter();
        names
            .filter(|(key, _)| ours.contains(&key.id()))
            .map(|(key, value)| RememberedName::of(&key, &value))
            .collect()
    }
}

impl Tables for KernelDatapath {
    fn owner(&self) -> u32 {
        self.owner_row
    }

    fn instance(&self) -> u32 {
        self.maps.instance()
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn other_owners(&self) -> u64 {
        self.maps.owners() & !(1 << self.owner_row)
    }

    fn slots(&self) -> u32 {
        self.maps.slots()
    }

    fn vms(&self) -> u32 {
        self.maps.sizes().vms
    }

    fn slot(&self, index: SlotIndex) -> SlotRef {
        let last = SlotIndex::new(self.maps.slots() - 1);
        self.maps
            .slot(index.min(last))
            .expect("the array has at least one chunk of slots")
    }

    fn addresses6(&self, index: SlotIndex) -> Addresses6Ref {
        let last = SlotIndex::new(self.maps.slots() - 1);
        self.maps
            .addresses6(index.min(last))
            .expect("the array has as many elements as that of the slots")
    }

    fn sequences(&self, index: SlotIndex) -> SequencesRef {
        let last = SlotIndex::new(self.maps.slots() - 1);
        self.maps
            .sequences(index.min(last))
            .expect("the array has as many elements as that of the slots")
    }

    fn claim_chunk(&mut self, now_ns: u64) -> Option<(Range<u32>, bool)> {
        self.maps.claim_chunk(self.owner_row, now_ns)
    }

    fn release_chunk(&mut self, first_slot: SlotIndex, now_ns: u64) {
        self.maps.release_chunk(self.owner_row, first_slot, now_ns);
    }

    fn own_chunks(&self) -> Vec<Range<u32>> {
        self.maps.chunks_of(self.owner_row)
    }

    fn vm(&self, row: VmRow) -> Option<VmRef> {
        self.maps.vm(row)
    }

    fn vm6(&self, row: VmRow) -> Option<Vm6Ref> {
        self.maps.vm6(row)
    }

    fn own_row(&self) -> OwnerRef {
        let row = self.maps.owner_ref(self.owner_row);
        row.expect("a row below MAX_OWNERS")
    }

    fn first_packet(&self, number: u64) -> Option<FirstPacketRef> {
        self.maps.first_packet(place(self.owner_row, number))
    }

    fn early_tag(&self, place: u32) -> Option<EarlyTagRef> {
        self.maps.early_tag(place)
    }

    fn early_fragment(&self, place: u32) -> Option<EarlyFragmentRef> {
        self.maps.early_fragment(place)
    }

    fn stats(&self, row: VmRow) -> VmStats {
        stats_of(&self.maps, row)
    }

    fn rates(&self, row: VmRow) -> Option<RateRef> {
        self.maps.rate_limits(row)
    }

    fn next_hop(&self, index: u32) -> Option<NextHopRef> {
        self.maps.next_hop(index)
    }

    fn next_hop_for(&mut self, hop: Hop) -> u32 {
        if self.broker.is_none() {
            return 0;
        }
        let ours = self.owner_row + 1;
        if let Some(&index) = self.next_hops.get(&hop) {
            let element = self.maps.next_hop(index);
            if element.is_some_and(|element| element.owner().load(Acquire) == ours) {
                if self.unasked {
                    self.ask_for_next_hops();
                }
                return index;
            }
            self.next_hops.remove(&hop);
        }
        let claimed =
            self.maps
                .claim_next_hop(self.owner_row, hop.ifindex, hop.neighbour, hop.route_mtu);
        let Some(index) = claimed else {
            return 0;
        };
        self.next_hops.insert(hop, index);
        self.ask_for_next_hops();
        index
    }

    fn rule(&self, rule: RuleIndex) -> Option<Described> {
        let element = self.maps.rule_element(rule)?;
        Described::of_element(&element, text_of(&element.text))
    }

    fn own_next_hops(&self) -> Vec<u32> {
        self.maps.next_hops_of(self.owner_row).collect()
    }

    fn release_next_hop(&mut self, index: u32) {
        self.maps.free_next_hop(index);
        self.next_hops.retain(|_, ours| *ours != index);
        // The broker lets the kernel forget the neighbour.
        self.ask_for_next_hops();
    }
}

/// Returns a VM's counters.
pub(super) fn stats_of(maps: &SharedMaps, row: VmRow) -> VmStats {
    let rows = maps.counters(row).zip(maps.drops(row));
    let nobodys = || maps.counters(VmRow::NOBODY).zip(maps.drops(VmRow::NOBODY));
    let (counters, drops) = rows.or_else(nobodys).expect("the maps have row 0");
    // SAFETY: rows of mapped arrays, which stay mapped as long as the process lives, and which
    // all sides change by atomics.
    unsafe { VmStats::new(counters, drops) }
}
