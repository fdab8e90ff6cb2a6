//! Index over the flows of this process: by slot, by either tuple, by VM.
use std::{
    hash::{BuildHasher, Hasher},
    net::IpAddr,
};

use hashbrown::HashTable;
use slipgate_abi::{Protocol, SlotIndex, SlotRef, Verdict, VmId, VmRow, maps::SLOTS_PER_CHUNK};
use slipgate_model::{FlowAddresses, FlowTuple};

use super::{EndReason, proof::FromWorld};
use crate::nat_ports::Destination;

/// State of a flow; the documentation of `flow` has a table of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Both tuples are in the kernel, and packets pass.
    Live,
    /// The flow ends; both tuples are still in the kernel.
    Ending,
    /// The flow ends; its tuples are deleted.
    Unlinked,
    /// The flow is recorded and about to be freed.
    Finished,
}

impl State {
    /// Whether both tuples are in the kernel.
    pub const fn is_linked(self) -> bool {
        matches!(self, Self::Live | Self::Ending)
    }
}

/// A set of properties of a flow, each of which is independent of the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Marks(u8);

impl Marks {
    /// No mark is set.
    pub(super) const NONE: Self = Self(0);
    /// A forward admitted the flow.
    pub(super) const FROM_WORLD: Self = Self(1);
    /// Its packets come to the engine while it lives.
    pub(super) const HELD: Self = Self(1 << 1);
    /// The engine carries it for a capture.
    pub(super) const CAPTURED: Self = Self(1 << 2);
    /// The scan has seen that TCP closed it on both sides.
    pub(super) const CLOSED: Self = Self(1 << 3);
    /// Its peer is a guest of this engine: the engine carries it.
    pub(super) const HAIRPIN: Self = Self(1 << 4);

    /// Returns the set with `mark`, if `on`.
    pub(super) const fn with(self, mark: Self, on: bool) -> Self {
        match on {
            true => Self(self.0 | mark.0),
            false => Self(self.0 & !mark.0),
        }
    }

    /// Whether any of `marks` is in the set.
    const fn has(self, marks: Self) -> bool {
        self.0 & marks.0 != 0
    }
}

/// State of a flow that its slot does not hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Tuple of the flow on the guest's link.
    pub guest: FlowTuple,
    /// Translated address of the flow.
    pub nat: IpAddr,
    /// Translated port or ICMP id of the flow.
    pub nat_port: u16,
    /// Row of the VM.
    pub vm_row: VmRow,
    /// Generation of the slot.
    pub generation: u32,
    /// State of the flow.
    pub state: State,
    marks: Marks,
    /// Number of its present end; older ones in the queue are void.
    pub(super) end_id: u32,
    /// Reason for its end, while it ends.
    pub(super) end_reason: EndReason,
    /// Position in its VM's list.
    vm_position: u32,
}

impl Entry {
    /// Creates the entry of a live flow.
    pub(super) fn live(
        guest: FlowTuple,
        nat: IpAddr,
        nat_port: u16,
        vm_row: VmRow,
        generation: u32,
        marks: Marks,
    ) -> Self {
        Self {
            guest,
            nat,
            nat_port,
            vm_row,
            generation,
            state: State::Live,
            marks,
            end_id: 0,
            end_reason: EndReason::Idle,
            vm_position: 0,
        }
    }

    /// Whether the flow keeps its guest's address and port toward the world, because the network
    /// routes the guest's prefix to the host. Its port is none of the pool's.
    pub fn is_untranslated(&self) -> bool {
        let outside = (self.nat, self.nat_port);
        self.nat.is_ipv6() && outside == (self.guest.local, self.guest.local_port)
    }

    /// Returns the flow's verdict while it lives.
    pub(super) fn live_verdict(&self) -> Verdict {
        let by_engine = Marks(Marks::HELD.0 | Marks::CAPTURED.0 | Marks::HAIRPIN.0);
        match self.marks.has(by_engine) {
            true => Verdict::Engine,
            false => Verdict::Fast,
        }
    }

    /// Sets the verdict in the slot of a live flow.
    pub(super) fn set_verdict(&self, live: SlotRef) {
        let only_captured =
            self.marks.has(Marks::CAPTURED) && !self.is_held() && !self.is_hairpin();
        live.set_live_verdict(self.live_verdict(), only_captured);
    }

    /// Whether each packet comes to the engine because of [`super::Flows::hold`].
    pub fn is_held(&self) -> bool {
        self.marks.has(Marks::HELD)
    }

    /// Whether the flow's peer is a guest of this engine, by its translated address
    /// ([`crate::packet_path::hairpin`]).
    pub fn is_hairpin(&self) -> bool {
        self.marks.has(Marks::HAIRPIN)
    }

    /// Whether the world opened the flow, through a forward.
    pub fn is_from_world(&self) -> bool {
        self.marks.has(Marks::FROM_WORLD)
    }

    /// Returns the tuple of the flow on the world's links.
    pub fn world(&self) -> FlowTuple {
        FlowTuple {
            scope: FlowTuple::WORLD,
            local: self.nat,
            local_port: self.nat_port,
            ..self.guest
        }
    }

    /// Returns the addresses of the flow.
    pub fn addresses(&self) -> FlowAddresses {
        FlowAddresses {
            guest: self.guest.local,
            remote: self.guest.remote,
            nat: self.nat,
        }
    }

    /// Returns the id of the VM.
    pub fn vm(&self) -> VmId {
        VmId::new(self.guest.scope)
    }

    /// Returns the protocol of the flow.
    pub fn protocol(&self) -> Protocol {
        self.guest.protocol().unwrap_or(Protocol::Udp)
    }

    /// Returns the destination toward which the flow's port is busy.
    pub fn destination(&self) -> Destination {
        Destination {
            nat: self.nat,
            remote: self.guest.remote,
            remote_port: self.guest.remote_port,
            protocol: self.protocol(),
        }
    }
}

type Chunk = Box<[Option<Entry>]>;

/// Slot of a flow, with half of the hash of one of its tuples: a table that grows, or that is
/// searched, needs no look at the flows.
#[derive(Clone, Copy, Debug)]
struct Tagged {
    slot: SlotIndex,
    tag: u32,
}

impl Tagged {
    /// Hash by which it is in the table. The table selects by the upper and the lower bits.
    const fn hash(self) -> u64 {
        (self.tag as u64) << 32 | self.tag as u64
    }
}

#[derive(Clone, Debug)]
struct VmFlows {
    slots: Vec<SlotIndex>,
    /// Number of flows that were ever inserted.
    opened: u64,
    unlinked: u32,
    /// Most flows that the VM may have.
    cap: u32,
    /// Number of flows that are not unlinked and that a forward admitted.
    from_world: u32,
    awaiting_proof: FromWorld,
    /// Position at which the next search for flows that give way continues.
    looked_at: usize,
}

/// The index of flows.
#[derive(Debug)]
pub(super) struct FlowTable {
    chunks: Vec<Option<Chunk>>,
    by_guest: HashTable<Tagged>,
    by_world: HashTable<Tagged>,
    vms: Vec<VmFlows>,
    hasher: foldhash::fast::RandomState,
    len: usize,
}

const PER_CHUNK: usize = SLOTS_PER_CHUNK as usize;

fn get(chunks: &[Option<Chunk>], slot: SlotIndex) -> Option<&Entry> {
    chunks.get(slot.chunk() as usize)?.as_ref()?[slot.position()].as_ref()
}

/// Returns a slot as it is in the table of these tuples.
fn tagged(hasher: &foldhash::fast::RandomState, tuple: &FlowTuple, slot: SlotIndex) -> Tagged {
    let tag = tag(hasher, tuple);
    Tagged { slot, tag }
}

fn tag(hasher: &foldhash::fast::RandomState, tuple: &FlowTuple) -> u32 {
    let mut h = hasher.build_hasher();
    let ports = u64::from(tuple.local_port) << 16 | u64::from(tuple.remote_port);
    match (tuple.local, tuple.remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            h.write_u64(u64::from(tuple.scope) << 32 | u64::from(local.to_bits()));
            h.write_u64(u64::from(remote.to_bits()) << 32 | ports);
        }
        (local, remote) => {
            for addr in [local, remote] {
                h.write_u128(match addr {
                    IpAddr::V4(addr) => addr.to_bits().into(),
                    IpAddr::V6(addr) => addr.to_bits(),
                });
            }
            h.write_u64(u64::from(tuple.scope) << 32 | ports);
        }
    }
    h.write_u8(tuple.protocol);
    (h.finish() >> 32) as u32
}

impl FlowTable {
    pub(super) fn new(slots: u32, rows: usize) -> Self {
        let vm = VmFlows {
            slots: Vec::new(),
            opened: 0,
            unlinked: 0,
            cap: u32::MAX,
            from_world: 0,
            awaiting_proof: FromWorld::default(),
            looked_at: 0,
        };
        Self {
            chunks: vec![None; (slots as usize).div_ceil(PER_CHUNK)],
            by_guest: HashTable::new(),
            by_world: HashTable::new(),
            vms: vec![vm; rows],
            hasher: foldhash::fast::RandomState::default(),
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, slot: SlotIndex) -> Option<&Entry> {
        get(&self.chunks, slot)
    }

    pub(super) fn by_guest(&self, tuple: &FlowTuple) -> Option<SlotIndex> {
        let sought = tagged(&self.hasher, tuple, SlotIndex::new(0));
        let is_it = |found: &Tagged| {
            let entry = || get(&self.chunks, found.slot);
            found.tag == sought.tag && entry().is_some_and(|e| e.guest == *tuple)
        };
        let found = self.by_guest.find(sought.hash(), is_it);
        found.map(|found| found.slot)
    }

    pub(super) fn by_world(&self, tuple: &FlowTuple) -> Option<SlotIndex> {
        let sought = tagged(&self.hasher, tuple, SlotIndex::new(0));
        let is_it = |found: &Tagged| {
            let entry = || get(&self.chunks, found.slot);
            found.tag == sought.tag && entry().is_some_and(|e| e.world() == *tuple)
        };
        let found = self.by_world.find(sought.hash(), is_it);
        found.map(|found| found.slot)
    }

    /// Has room for so many more flows.
    pub(super) fn expect(&mut self, flows: usize) {
        self.by_guest.reserve(flows, |s| s.hash());
        self.by_world.reserve(flows, |s| s.hash());
    }

    /// Has room for so many more flows of a VM.
    pub(super) fn expect_of(&mut self, row: VmRow, flows: usize) {
        if let Some(vm) = self.vms.get_mut(usize::from(row.get())) {
            vm.slots.reserve(flows);
        }
    }

    /// Adds a flow. The slot is not in the table yet.
    pub(super) fn insert(&mut self, slot: SlotIndex, mut entry: Entry) {
        let Some(chunk) = self.chunks.get_mut(slot.chunk() as usize) else {
            return;
        };
        let Some(vm) = self.vms.get_mut(usize::from(entry.vm_row.get())) else {
            return;
        };
        entry.vm_position = vm.slots.len() as u32;
        vm.slots.push(slot);
        vm.opened += 1;
        let is_linked = entry.state.is_linked();
        vm.unlinked += u32::from(!is_linked);
        vm.from_world += u32::from(is_linked && entry.is_from_world());
        let chunk = chunk.get_or_insert_with(|| vec![None; PER_CHUNK].into_boxed_slice());
        chunk[slot.position()] = Some(entry);
        self.len += 1;
        if !is_linked {
            return;
        }
        let hasher = &self.hasher;
        for (table, tuple) in [
            (&mut self.by_guest, entry.guest),
            (&mut self.by_world, entry.world()),
        ] {
            let new = tagged(hasher, &tuple, slot);
            table.insert_unique(new.hash(), new, |s| s.hash());
        }
    }

    /// Sets the state of a flow.
    pub(super) fn set_state(
        &mut self,
        slot: SlotIndex,
        state: State,
        end_id: u32,
        reason: EndReason,
    ) {
        if let Some(entry) = self.get_mut(slot) {
            entry.state = state;
            entry.end_id = end_id;
            entry.end_reason = reason;
        }
    }

    /// Adds a mark to a flow, or removes it. Returns the flow as it was, if there is one.
    pub(super) fn mark(&mut self, slot: SlotIndex, mark: Marks, on: bool) -> Option<Entry> {
        let entry = self.get_mut(slot)?;
        let before = *entry;
        entry.marks = before.marks.with(mark, on);
        Some(before)
    }

    /// Removes a flow's tuples from the index: other flows may have them now.
    pub(super) fn unlink(&mut self, slot: SlotIndex) {
        let Some(entry) = self.get(slot).copied() else {
            return;
        };
        if !entry.state.is_linked() {
            return;
        }
        let hasher = &self.hasher;
        for (table, tuple) in [
            (&mut self.by_guest, entry.guest),
            (&mut self.by_world, entry.world()),
        ] {
            let sought = tagged(hasher, &tuple, slot);
            if let Ok(found) = table.find_entry(sought.hash(), |s| s.slot == slot) {
                found.remove();
            }
        }
        let vm = &mut self.vms[usize::from(entry.vm_row.get())];
        vm.unlinked += 1;
        vm.from_world -= u32::from(entry.is_from_world());
    }

    /// Removes a flow that was unlinked.
    pub(super) fn remove(&mut self, slot: SlotIndex) {
        let Some(Some(chunk)) = self.chunks.get_mut(slot.chunk() as usize) else {
            return;
        };
        let Some(entry) = chunk[slot.position()].take() else {
            return;
        };
        self.len -= 1;
        let vm = &mut self.vms[usize::from(entry.vm_row.get())];
        vm.unlinked -= 1;
        let position = entry.vm_position as usize;
        vm.slots.swap_remove(position);
        let moved = vm.slots.get(position).copied();
        if let Some(moved) = moved.and_then(|s| self.get_mut(s)) {
            moved.vm_position = position as u32;
        }
    }

    /// Notes that TCP closed the flow. Returns `false` when that was known.
    pub(super) fn note_closed(&mut self, slot: SlotIndex) -> bool {
        let before = self.mark(slot, Marks::CLOSED, true);
        before.is_some_and(|before| !before.marks.has(Marks::CLOSED))
    }

    pub(super) fn set_cap(&mut self, row: VmRow, most: u32) {
        if let Some(vm) = self.vms.get_mut(usize::from(row.get())) {
            vm.cap = most;
        }
    }

    /// Whether a VM has seven eighths of the flows that it may have, or more.
    pub(super) fn is_near_cap(&self, row: VmRow) -> bool {
        let cap = self.vms.get(usize::from(row.get())).map_or(0, |vm| vm.cap) as usize;
        self.counted(row) >= cap - cap / 8
    }

    pub(super) fn slots_of(&self, row: VmRow) -> &[SlotIndex] {
        self.vms
            .get(usize::from(row.get()))
            .map_or(&[], |vm| &vm.slots)
    }

    /// Number of flows that a VM's row ever had.
    pub(super) fn opened_by(&self, row: VmRow) -> u64 {
        self.vms
            .get(usize::from(row.get()))
            .map_or(0, |vm| vm.opened)
    }

    pub(super) fn counted(&self, row: VmRow) -> usize {
        self.vms
            .get(usize::from(row.get()))
            .map_or(0, |vm| vm.slots.len() - vm.unlinked as usize)
    }

    pub(super) fn counted_from_world(&self, row: VmRow) -> usize {
        let vm = self.vms.get(usize::from(row.get()));
        vm.map_or(0, |vm| vm.from_world as usize)
    }

    /// Returns a VM's queue of flows from the world.
    pub(super) fn awaiting_proof(&self, row: VmRow) -> Option<&FromWorld> {
        let vm = self.vms.get(usize::from(row.get()));
        vm.map(|vm| &vm.awaiting_proof)
    }

    /// Takes a VM's queue of flows from the world, to be put back.
    pub(super) fn take_from_world(&mut self, row: VmRow) -> FromWorld {
        let vm = self.vms.get_mut(usize::from(row.get()));
        vm.map(|vm| std::mem::take(&mut vm.awaiting_proof))
            .unwrap_or_default()
    }

    pub(super) fn put_from_world(&mut self, row: VmRow, queue: FromWorld) {
        if let Some(vm) = self.vms.get_mut(usize::from(row.get())) {
            vm.awaiting_proof = queue;
        }
    }

    /// Returns the next slots of a VM to be examined, at most `most`; successive calls cover all in
    /// turn.
    pub(super) fn next_of(&self, row: VmRow, most: usize) -> impl Iterator<Item = SlotIndex> {
        let vm = self.vms.get(usize::from(row.get()));
        let (slots, at): (&[SlotIndex], usize) =
            vm.map_or((&[], 0), |vm| (&vm.slots, vm.looked_at));
        let (behind, ahead) = slots.split_at(at.min(slots.len()));
        ahead.iter().chain(behind).take(most).copied()
    }

    /// Notes that the next `slots` slots of a VM were examined.
    pub(super) fn looked_at(&mut self, row: VmRow, slots: usize) {
        if let Some(vm) = self.vms.get_mut(usize::from(row.get())) {
            vm.looked_at = match vm.slots.len() {
                0 => 0,
                len => (vm.looked_at.min(len) + slots) % len,
            };
        }
    }

    /// Returns the largest number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Removes a chunk without flows, which the process has released.
    pub(super) fn forget_chunk(&mut self, index: usize) {
        if let Some(chunk) = self.chunks.get_mut(index) {
            debug_assert!(chunk.iter().flatten().all(Option::is_none));
            *chunk = None;
        }
    }

    /// Returns the entries of a chunk in order of slots; `None` when it never had any.
    pub(super) fn chunk(&self, index: usize) -> Option<&[Option<Entry>]> {
        self.chunks.get(index)?.as_deref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SlotIndex, &Entry)> {
        self.chunks.iter().enumerate().flat_map(|(c, chunk)| {
            chunk
                .iter()
                .flat_map(|chunk| chunk.iter())
                .enumerate()
                .filter_map(move |(i, e)| {
                    let slot = SlotIndex::new((c * PER_CHUNK + i) as u32);
                    e.as_ref().map(|e| (slot, e))
                })
        })
    }

    fn get_mut(&mut self, slot: SlotIndex) -> Option<&mut Entry> {
        let chunk = self.chunks.get_mut(slot.chunk() as usize)?;
        chunk.as_mut()?[slot.position()].as_mut()
    }
}
