//! The tables as the engine accesses them, in memory, with the guarantees that the kernel gives for
//! each call.
use std::{collections::HashSet, io, net::IpAddr, ops::Range, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{
    Addresses6Ref, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey, ForwardKey6,
    ForwardTarget, Ip4, Ip6, NameKey, NameValue, NextHopRef, OwnerRef, RuleIndex, SequencesRef,
    SlotIndex, SlotRef, Verdict, Vm6Ref, VmId, VmRef, VmRow, early_fragment,
    first_packet::place,
    link::NextHopFlags,
    maps::{Chunk, MAX_NAMES, MAX_NEXT_HOPS, SLOTS_PER_CHUNK, may_claim_chunk},
    rate::RateRef,
};

use super::{Kernel, KernelHandle, VMS};
use crate::{
    datapath::{FlowMap, ForwardMap, Hop, InsertError, NameMap, PortKey, RememberedName, Tables},
    stats::VmStats,
};
use slipgate_model::{FlowTuple, TupleKey};
use slipgate_policy::Described;

/// Entries of `FLOWS` that are listed in one call.
const LISTED_AT_ONCE: usize = 1_024;

/// Tables of one owner's engine.
#[derive(Clone, Debug)]
pub struct FakeDatapath {
    kernel: KernelHandle,
    owner: u32,
    epoch: u32,
    /// Tuples that a listing has yet to visit.
    listed: Vec<FlowTuple>,
}

impl FakeDatapath {
    /// Creates the tables for the owner in this row.
    pub fn new(kernel: &KernelHandle, owner: u32, epoch: u32) -> Self {
        Self {
            kernel: kernel.clone(),
            owner,
            epoch,
            listed: Vec::new(),
        }
    }
}

impl FlowMap for FakeDatapath {
    fn insert_noexist(&mut self, tuple: &FlowTuple, flow: FlowRef) -> Result<(), InsertError> {
        let kernel = &mut *self.kernel.borrow_mut();
        if Kernel::take_fault(&mut kernel.faults.insert_fails) {
            return Err(InsertError::Os(io::Error::other("injected")));
        }
        if Kernel::take_fault(&mut kernel.faults.insert_exists) || kernel.flow_by(tuple).is_some() {
            return Err(InsertError::Exists);
        }
        let len = match tuple.local {
            IpAddr::V4(_) => kernel.flows.len(),
            IpAddr::V6(_) => kernel.flows6.len(),
        };
        if kernel.faults.map_capacity != 0 && len >= kernel.faults.map_capacity {
            return Err(InsertError::Full);
        }
        assert!(
            tuple.scope == FlowTuple::WORLD || kernel.has_reverse(tuple, flow),
            "the guest's packets would go out before the answers are known: the host would reset them"
        );
        match key(tuple) {
            TupleKey::V4(tuple) => kernel.flows.insert(tuple, flow),
            TupleKey::V6(tuple) => kernel.flows6.insert(tuple, flow),
        };
        Ok(())
    }

    fn remove(&mut self, tuple: &FlowTuple) -> io::Result<bool> {
        let kernel = &mut *self.kernel.borrow_mut();
        if Kernel::take_fault(&mut kernel.faults.remove_fails) {
            kernel.remove_failed = true;
            return Err(io::Error::other("injected"));
        }
        let removed = match key(tuple) {
            TupleKey::V4(tuple) => kernel.flows.remove(&tuple),
            TupleKey::V6(tuple) => kernel.flows6.remove(&tuple),
        };
        let last = removed.is_none_or(|flow| !kernel.leaves_forward(tuple, flow));
        assert!(
            last || kernel.remove_failed,
            "the guest's packets would still go out when the answers are unknown"
        );
        Ok(removed.is_some())
    }

    fn remove_all(&mut self, tuples: &[FlowTuple]) -> io::Result<()> {
        let refused = tuples.iter().filter_map(|tuple| self.remove(tuple).err());
        // All of them: a refusal does not end the call.
        refused.reduce(|first, _| first).map_or(Ok(()), Err)
    }

    fn get(&mut self, tuple: &FlowTuple) -> io::Result<Option<FlowRef>> {
        if Kernel::take_fault(&mut self.kernel.borrow_mut().faults.get_fails) {
            return Err(io::Error::other("injected"));
        }
        Ok(self.kernel.borrow().flow_by(tuple))
    }

    fn visit_some(
        &mut self,
        begins: bool,
        visit: &mut dyn FnMut(FlowTuple, FlowRef),
    ) -> io::Result<bool> {
        let kernel = self.kernel.borrow();
        if begins {
            let four = kernel.flows.keys().copied().map(FlowTuple::from);
            let six = kernel.flows6.keys().copied().map(FlowTuple::from);
            self.listed = four.chain(six).collect();
        }
        for tuple in self
            .listed
            .drain(self.listed.len().saturating_sub(LISTED_AT_ONCE)..)
        {
            if let Some(flow) = kernel.flow_by(&tuple) {
                visit(tuple, flow);
            }
        }
        Ok(!self.listed.is_empty())
    }
}

/// Key of a tuple that the engine gives.
fn key(tuple: &FlowTuple) -> TupleKey {
    tuple.key().expect("both addresses are of one family")
}

impl ForwardMap for FakeDatapath {
    fn open_port(&mut self, port: &PortKey, target: ForwardTarget) -> Result<(), InsertError> {
        let kernel = &mut *self.kernel.borrow_mut();
        if Kernel::take_fault(&mut kernel.faults.open_port_full) {
            return Err(InsertError::Full);
        }
        let to = (target.row().map_or(0, VmRow::get), target.vm);
        let there = match port {
            PortKey::V4(key) => {
                let there = kernel.forwards.entry((key.host, key.port, key.protocol));
                *there.or_insert(to)
            }
            PortKey::V6(key) => {
                let there = kernel.forwards6.entry((key.host, key.port, key.protocol));
                *there.or_insert(to)
            }
        };
        match there == to {
            true => Ok(()),
            false => Err(InsertError::Exists),
        }
    }

    fn close_port(&mut self, port: &PortKey, vm: VmId) -> io::Result<()> {
        let kernel = &mut *self.kernel.borrow_mut();
        match port {
            PortKey::V4(key) => {
                let key = (key.host, key.port, key.protocol);
                kernel
                    .forwards
                    .retain(|of, (_, id)| *of != key || *id != vm.get());
            }
            PortKey::V6(key) => {
                let key = (key.host, key.port, key.protocol);
                kernel
                    .forwards6
                    .retain(|of, (_, id)| *of != key || *id != vm.get());
            }
        }
        Ok(())
    }

    fn close_ports(
        &mut self,
        unwanted: &dyn Fn(&PortKey, &ForwardTarget) -> bool,
    ) -> io::Result<()> {
        let kernel = &mut *self.kernel.borrow_mut();
        // Which port of the guest is not kept here.
        let target = |(row, id): (u16, u32)| ForwardTarget::new(VmId::new(id), VmRow::new(row), 0);
        kernel.forwards.retain(|(host, port, protocol), to| {
            let key = ForwardKey::new(*host, *port, *protocol);
            !unwanted(&PortKey::V4(key), &target(*to))
        });
        kernel.forwards6.retain(|(host, port, protocol), to| {
            let key = ForwardKey6::new(*host, *port, *protocol);
            !unwanted(&PortKey::V6(key), &target(*to))
        });
        Ok(())
    }
}

impl NameMap for FakeDatapath {
    fn remember_name(&mut self, name: &RememberedName) -> bool {
        let kernel = &mut *self.kernel.borrow_mut();
        let Some(value) = NameValue::new(&name.name, name.expires_ns) else {
            return false;
        };
        let key = NameKey::new(name.vm, name.addr, &name.name);
        let most = match kernel.faults.names_capacity {
            0 => MAX_NAMES as usize,
            capacity => capacity,
        };
        if kernel.names.len() >= most && !kernel.names.contains_key(&key) {
            return false;
        }
        kernel.names.insert(key, value);
        true
    }

    fn forget_name(&mut self, vm: VmId, addr: IpAddr, name: &[u8]) -> bool {
        let names = &mut self.kernel.borrow_mut().names;
        names.remove(&NameKey::new(vm, addr, name)).is_some()
    }

    fn remembered_names(&self) -> Vec<RememberedName> {
        let kernel = self.kernel.borrow();
        // SAFETY: in bounds; one thread.
        let ours: HashSet<u32> = (1..=VMS as u16)
            .filter(|row| unsafe { (*kernel.vm(*row).as_ptr()).owner } == self.owner)
            .map(|row| kernel.vm(row).id().load(Relaxed))
            .collect();
        let names = kernel
            .names
            .iter()
            .filter(|(key, _)| ours.contains(&key.vm));
        names
            .map(|(key, value)| RememberedName::of(key, value))
            .collect()
    }
}

impl Tables for FakeDatapath {
    fn owner(&self) -> u32 {
        self.owner
    }

    fn instance(&self) -> u32 {
        self.kernel.borrow().instance
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn other_owners(&self) -> u64 {
        self.kernel.borrow().owners & !(1 << self.owner)
    }

    fn slots(&self) -> u32 {
        self.kernel.borrow().slots.len() as u32
    }

    fn vms(&self) -> u32 {
        VMS
    }

    fn slot(&self, index: SlotIndex) -> SlotRef {
        let kernel = self.kernel.borrow();
        kernel.slots_looked_at.set(kernel.slots_looked_at.get() + 1);
        let slot = kernel.slot(index);
        if let Some(changed) = kernel.at_look {
            changed(slot);
        }
        slot
    }

    fn addresses6(&self, index: SlotIndex) -> Addresses6Ref {
        self.kernel.borrow().addresses6(index)
    }

    fn sequences(&self, index: SlotIndex) -> SequencesRef {
        self.kernel.borrow().sequences(index)
    }

    fn claim_chunk(&mut self, now_ns: u64) -> Option<(Range<u32>, bool)> {
        let chunks = &mut self.kernel.borrow_mut().chunks;
        let owned = |chunk: &Chunk| chunk.owner();
        let owners: HashSet<u32> = chunks.iter().filter_map(owned).collect();
        let free = chunks.iter().filter(|c| c.owner().is_none()).count();
        let ours = chunks.iter().filter(|c| c.owner() == Some(self.owner));
        let others = owners.iter().filter(|owner| **owner != self.owner);
        let (all, owners) = (chunks.len() as u32, others.count() as u32 + 1);
        if !may_claim_chunk(all, free as u32, ours.count() as u32, owners) {
            return None;
        }
        let rested = chunks.iter().position(|c| c.has_rested(now_ns));
        let chunk = rested.or_else(|| chunks.iter().position(|c| c.owner().is_none()))?;
        chunks[chunk] = Chunk::of(self.owner);
        Some((range(chunk), rested.is_some()))
    }

    fn release_chunk(&mut self, first_slot: SlotIndex, now_ns: u64) {
        let kernel = &mut *self.kernel.borrow_mut();
        let chunk = first_slot.chunk() as usize;
        assert_eq!(kernel.chunks[chunk], Chunk::of(self.owner), "it is ours");
        let mut slots = range(chunk);
        assert!(
            slots.all(
                |slot| kernel.slot(SlotIndex::new(slot)).verdict().load(Relaxed)
                    == Verdict::Free as u32
            ),
            "a flow is in it"
        );
        kernel.chunks[chunk] = Chunk::free_since(now_ns);
    }

    fn own_chunks(&self) -> Vec<Range<u32>> {
        let kernel = self.kernel.borrow();
        let ours = kernel
            .chunks
            .iter()
            .enumerate()
            .filter(|(_, chunk)| chunk.owner() == Some(self.owner));
        ours.map(|(chunk, _)| range(chunk)).collect()
    }

    fn vm(&self, row: VmRow) -> Option<VmRef> {
        (row.word() <= VMS).then(|| self.kernel.borrow().vm(row.get()))
    }

    fn vm6(&self, row: VmRow) -> Option<Vm6Ref> {
        (row.word() <= VMS).then(|| self.kernel.borrow().vm6(row.get()))
    }

    fn own_row(&self) -> OwnerRef {
        self.kernel.borrow().owner_row(self.owner)
    }

    fn first_packet(&self, number: u64) -> Option<FirstPacketRef> {
        let kernel = self.kernel.borrow();
        let looks = &kernel.faults.unpublished_looks;
        let left = looks.get();
        looks.set(left.saturating_sub(1));
        // A place of this ring that has another number.
        let number = number.wrapping_add(u64::from(left > 0));
        Some(kernel.first_packet(place(self.owner, number)))
    }

    fn early_tag(&self, place: u32) -> Option<EarlyTagRef> {
        Some(self.kernel.borrow().early_tag(place))
    }

    fn early_fragment(&self, place: u32) -> Option<EarlyFragmentRef> {
        let kernel = self.kernel.borrow();
        // It is asked for when the copy was taken by its tag.
        if kernel.faults.claims_early.take() {
            let tag = kernel.early_tag(place);
            let number = tag.word().load(Relaxed) + u64::from(early_fragment::PLACES);
            tag.word().store(early_fragment::claim(number), Relaxed);
        }
        Some(kernel.early_fragment(place))
    }

    fn stats(&self, row: VmRow) -> VmStats {
        // A row beyond the last is nobody's, as in the mapped tables.
        let row = if row.word() <= VMS { row.get() } else { 0 };
        self.kernel.borrow().stats(row)
    }

    fn rates(&self, row: VmRow) -> Option<RateRef> {
        (row.word() <= VMS).then(|| self.kernel.borrow().rates(row.get()))
    }

    fn next_hop(&self, index: u32) -> Option<NextHopRef> {
        let kernel = self.kernel.borrow();
        // SAFETY: in bounds; the allocation lives as long as the kernel.
        (index > 0 && index < MAX_NEXT_HOPS)
            .then(|| unsafe { NextHopRef::new(kernel.next_hops.at(index as usize)) })
    }

    fn next_hop_for(&mut self, wanted: Hop) -> u32 {
        let kernel = self.kernel.borrow();
        let ours = self.owner + 1;
        let neighbours = match wanted.neighbour {
            IpAddr::V4(four) => (0, four.into(), Ip6::UNSPECIFIED),
            IpAddr::V6(six) => (NextHopFlags::IPV6, Ip4::UNSPECIFIED, six.into()),
        };
        // SAFETY: in bounds; one thread.
        let hop = |index: u32| unsafe { &mut *kernel.next_hops.at(index as usize) };
        let same = (1..MAX_NEXT_HOPS).find(|index| {
            let hop = hop(*index);
            hop.owner == ours
                && hop.ifindex == wanted.ifindex.get()
                && (
                    hop.flags & NextHopFlags::IPV6,
                    hop.neighbour,
                    hop.neighbour6,
                ) == neighbours
                && hop.route_mtu == wanted.route_mtu
        });
        let index = same.or_else(|| (1..MAX_NEXT_HOPS).find(|index| hop(*index).owner == 0));
        let Some(index) = index else { return 0 };
        let hop = hop(index);
        (hop.owner, hop.ifindex) = (ours, wanted.ifindex.get());
        (hop.flags, hop.neighbour, hop.neighbour6) = neighbours;
        hop.route_mtu = wanted.route_mtu;
        index
    }

    fn rule(&self, rule: RuleIndex) -> Option<Described> {
        self.kernel.borrow().rules.get(&rule).cloned()
    }

    fn own_next_hops(&self) -> Vec<u32> {
        let kernel = self.kernel.borrow();
        let owner = |index: &u32| {
            // SAFETY: in bounds; one thread.
            unsafe { (*kernel.next_hops.at(*index as usize)).owner }
        };
        (1..MAX_NEXT_HOPS)
            .filter(|index| owner(index) == self.owner + 1)
            .collect()
    }

    fn release_next_hop(&mut self, index: u32) {
        let kernel = self.kernel.borrow();
        // SAFETY: in bounds; one thread.
        let hop = unsafe { &mut *kernel.next_hops.at(index as usize) };
        assert_eq!(hop.owner, self.owner + 1, "it is another's");
        (hop.owner, hop.ifindex, hop.sequence) = (0, 0, 0);
    }
}

fn range(chunk: usize) -> Range<u32> {
    let first = chunk as u32 * SLOTS_PER_CHUNK;
    first..first + SLOTS_PER_CHUNK
}
