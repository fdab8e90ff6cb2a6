//! The index over own flows: by slot, by either tuple, by VM.
use std::hash::{BuildHasher, Hasher};

use hashbrown::HashTable;
use slipgate_abi::{Ip4, Protocol, SlotRef, Tuple, Verdict, maps::SLOTS_PER_CHUNK};

use super::{EndReason, proof::FromWorld};
use crate::nat_ports::Destination;

/// Where a flow stands; see the module above.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Translated.
    Live,
    /// On its way out, both tuples in place.
    Ending,
    /// On its way out, its tuples gone.
    Unlinked,
    /// Recorded, about to be freed.
    Finished,
}

impl State {
    /// Whether both its tuples are in place.
    pub const fn is_linked(self) -> bool {
        matches!(self, Self::Live | Self::Ending)
    }
}

/// What is known of a flow besides its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The flow on the guest's link.
    pub guest: Tuple,
    /// Its translated address.
    pub nat: Ip4,
    /// Its translated port or ICMP id.
    pub nat_port: u16,
    /// The VM's row.
    pub vm_row: u16,
    /// The slot's generation.
    pub generation: u32,
    /// Where it stands.
    pub state: State,
    /// A forward let it in.
    pub(super) from_world: bool,
    /// Its packets come to the engine while it lives.
    pub(super) held: bool,
    /// TCP closed it on both sides, and it was found out.
    closed: bool,
    /// The engine carries it meanwhile, for a capture.
    captured: bool,
    /// Which of its ends is under way; older ones in the queue are void.
    pub(super) end_id: u32,
    /// Why it ends, while it does.
    pub(super) end_reason: EndReason,
    /// Its place in its VM's list.
    vm_position: u32,
}

impl Entry {
    /// A live flow.
    pub(super) fn live(
        guest: Tuple,
        nat: Ip4,
        nat_port: u16,
        vm_row: u16,
        generation: u32,
    ) -> Self {
        Self {
            guest,
            nat,
            nat_port,
            vm_row,
            generation,
            state: State::Live,
            from_world: false,
            held: false,
            closed: false,
            captured: false,
            end_id: 0,
            end_reason: EndReason::Idle,
            vm_position: 0,
        }
    }

    /// The same, opened by a forward if so.
    pub(super) fn opened_by_world(self, from_world: bool) -> Self {
        Self { from_world, ..self }
    }

    /// The same, carried by the engine if so.
    pub(super) fn held(self, held: bool) -> Self {
        Self { held, ..self }
    }

    /// Its verdict while it lives.
    pub(super) fn live_verdict(&self) -> Verdict {
        if self.held || self.captured {
            Verdict::Engine
        } else {
            Verdict::Fast
        }
    }

    /// Gives a slot the verdict of its flow, which lives.
    pub(super) fn set_verdict(&self, live: SlotRef) {
        live.set_live_verdict(self.live_verdict(), self.captured && !self.held);
    }

    /// Whether each packet comes to the engine, as [`super::Flows::hold`] asks.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Whether the world opened it, by a forward.
    pub fn is_from_world(&self) -> bool {
        self.from_world
    }

    /// The flow on the world's links.
    pub fn world(&self) -> Tuple {
        Tuple {
            scope: Tuple::WORLD,
            local: self.nat,
            local_port: self.nat_port,
            ..self.guest
        }
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        Protocol::from_ip(self.guest.protocol).unwrap_or(Protocol::Udp)
    }

    /// What its port is busy toward.
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

#[derive(Clone, Debug)]
struct VmFlows {
    slots: Vec<u32>,
    unlinked: u32,
    /// How many it may have.
    cap: u32,
    /// Not unlinked, and let in by a forward.
    from_world: u32,
    awaiting_proof: FromWorld,
    /// Where the look at the flows of a VM at its cap goes on.
    looked_at: usize,
}

/// The index.
#[derive(Debug)]
pub(super) struct FlowTable {
    chunks: Vec<Option<Chunk>>,
    by_guest: HashTable<u32>,
    by_world: HashTable<u32>,
    vms: Vec<VmFlows>,
    hasher: foldhash::fast::RandomState,
    len: usize,
}

const PER_CHUNK: usize = SLOTS_PER_CHUNK as usize;

fn get(chunks: &[Option<Chunk>], slot: u32) -> Option<&Entry> {
    let slot = slot as usize;
    chunks.get(slot / PER_CHUNK)?.as_ref()?[slot % PER_CHUNK].as_ref()
}

fn hash(hasher: &foldhash::fast::RandomState, tuple: &Tuple) -> u64 {
    let mut h = hasher.build_hasher();
    h.write_u64(u64::from(tuple.scope) << 32 | u64::from(tuple.local.to_wire()));
    h.write_u64(
        u64::from(tuple.remote.to_wire()) << 32
            | u64::from(tuple.local_port) << 16
            | u64::from(tuple.remote_port),
    );
    h.write_u8(tuple.protocol);
    h.finish()
}

impl FlowTable {
    pub(super) fn new(slots: u32, rows: usize) -> Self {
        let vm = VmFlows {
            slots: Vec::new(),
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

    pub(super) fn get(&self, slot: u32) -> Option<&Entry> {
        get(&self.chunks, slot)
    }

    pub(super) fn by_guest(&self, tuple: &Tuple) -> Option<u32> {
        let hash = hash(&self.hasher, tuple);
        self.by_guest
            .find(hash, |s| {
                get(&self.chunks, *s).is_some_and(|e| e.guest == *tuple)
            })
            .copied()
    }

    pub(super) fn by_world(&self, tuple: &Tuple) -> Option<u32> {
        let hash = hash(&self.hasher, tuple);
        self.by_world
            .find(hash, |s| {
                get(&self.chunks, *s).is_some_and(|e| e.world() == *tuple)
            })
            .copied()
    }

    /// Adds a flow whose tuples are in the kernel. The slot is not in the table.
    pub(super) fn insert(&mut self, slot: u32, mut entry: Entry) {
        let Some(chunk) = self.chunks.get_mut(slot as usize / PER_CHUNK) else {
            return;
        };
        let Some(vm) = self.vms.get_mut(usize::from(entry.vm_row)) else {
            return;
        };
        entry.vm_position = vm.slots.len() as u32;
        vm.slots.push(slot);
        vm.from_world += u32::from(entry.from_world);
        let chunk = chunk.get_or_insert_with(|| vec![None; PER_CHUNK].into_boxed_slice());
        chunk[slot as usize % PER_CHUNK] = Some(entry);
        self.len += 1;
        let (chunks, hasher) = (&self.chunks, &self.hasher);
        let tuple_of = |slot: u32, world: bool| {
            get(chunks, slot).map_or(entry.guest, |e| if world { e.world() } else { e.guest })
        };
        self.by_guest
            .insert_unique(hash(hasher, &entry.guest), slot, |s| {
                hash(hasher, &tuple_of(*s, false))
            });
        self.by_world
            .insert_unique(hash(hasher, &entry.world()), slot, |s| {
                hash(hasher, &tuple_of(*s, true))
            });
    }

    /// Changes where a flow stands.
    pub(super) fn set_state(&mut self, slot: u32, state: State, end_id: u32, reason: EndReason) {
        if let Some(entry) = self.get_mut(slot) {
            entry.state = state;
            entry.end_id = end_id;
            entry.end_reason = reason;
        }
    }

    /// Notes whether the engine carries a flow. `None`: there is none, else where it stands.
    pub(super) fn set_held(&mut self, slot: u32, held: bool) -> Option<State> {
        let entry = self.get_mut(slot)?;
        entry.held = held;
        Some(entry.state)
    }

    /// Notes whether a flow is captured; its entry then.
    pub(super) fn set_captured(&mut self, slot: u32, captured: bool) -> Option<&Entry> {
        let entry = self.get_mut(slot)?;
        entry.captured = captured;
        Some(entry)
    }

    /// Forgets a flow's tuples: others may have them now.
    pub(super) fn unlink(&mut self, slot: u32) {
        let Some(entry) = self.get(slot).copied() else {
            return;
        };
        if !entry.state.is_linked() {
            return;
        }
        let found = self
            .by_guest
            .find_entry(hash(&self.hasher, &entry.guest), |s| *s == slot);
        if let Ok(found) = found {
            found.remove();
        }
        let found = self
            .by_world
            .find_entry(hash(&self.hasher, &entry.world()), |s| *s == slot);
        if let Ok(found) = found {
            found.remove();
        }
        let vm = &mut self.vms[usize::from(entry.vm_row)];
        vm.unlinked += 1;
        vm.from_world -= u32::from(entry.from_world);
    }

    /// Removes a flow that was unlinked.
    pub(super) fn remove(&mut self, slot: u32) {
        let at = slot as usize;
        let Some(Some(chunk)) = self.chunks.get_mut(at / PER_CHUNK) else {
            return;
        };
        let Some(entry) = chunk[at % PER_CHUNK].take() else {
            return;
        };
        self.len -= 1;
        let vm = &mut self.vms[usize::from(entry.vm_row)];
        vm.unlinked -= 1;
        let position = entry.vm_position as usize;
        vm.slots.swap_remove(position);
        let moved = vm.slots.get(position).copied();
        if let Some(moved) = moved.and_then(|s| self.get_mut(s)) {
            moved.vm_position = position as u32;
        }
    }

    /// Notes that TCP closed it; `false` when that was known.
    pub(super) fn note_closed(&mut self, slot: u32) -> bool {
        self.get_mut(slot)
            .is_some_and(|entry| !std::mem::replace(&mut entry.closed, true))
    }

    pub(super) fn set_cap(&mut self, row: u16, most: u32) {
        if let Some(vm) = self.vms.get_mut(usize::from(row)) {
            vm.cap = most;
        }
    }

    /// Whether a VM has seven eighths of what it may have, or more.
    pub(super) fn is_near_cap(&self, row: u16) -> bool {
        let cap = self.vms.get(usize::from(row)).map_or(0, |vm| vm.cap) as usize;
        self.counted(row) >= cap - cap / 8
    }

    pub(super) fn slots_of(&self, row: u16) -> &[u32] {
        self.vms.get(usize::from(row)).map_or(&[], |vm| &vm.slots)
    }

    pub(super) fn counted(&self, row: u16) -> usize {
        self.vms
            .get(usize::from(row))
            .map_or(0, |vm| vm.slots.len() - vm.unlinked as usize)
    }

    pub(super) fn counted_from_world(&self, row: u16) -> usize {
        let vm = self.vms.get(usize::from(row));
        vm.map_or(0, |vm| vm.from_world as usize)
    }

    /// A VM's queue of flows from the world.
    pub(super) fn from_world(&self, row: u16) -> Option<&FromWorld> {
        let vm = self.vms.get(usize::from(row));
        vm.map(|vm| &vm.awaiting_proof)
    }

    /// Takes a VM's queue of flows from the world, to be put back.
    pub(super) fn take_from_world(&mut self, row: u16) -> FromWorld {
        let vm = self.vms.get_mut(usize::from(row));
        vm.map(|vm| std::mem::take(&mut vm.awaiting_proof))
            .unwrap_or_default()
    }

    pub(super) fn put_from_world(&mut self, row: u16, queue: FromWorld) {
        if let Some(vm) = self.vms.get_mut(usize::from(row)) {
            vm.awaiting_proof = queue;
        }
    }

    /// The next of a VM's slots to be looked at, so many at most; they are taken in turn.
    pub(super) fn next_of(&self, row: u16, most: usize) -> impl Iterator<Item = u32> {
        let vm = self.vms.get(usize::from(row));
        let (slots, at): (&[u32], usize) = vm.map_or((&[], 0), |vm| (&vm.slots, vm.looked_at));
        let (behind, ahead) = slots.split_at(at.min(slots.len()));
        ahead.iter().chain(behind).take(most).copied()
    }

    /// Notes that so many of a VM's slots were looked at.
    pub(super) fn looked_at(&mut self, row: u16, slots: usize) {
        if let Some(vm) = self.vms.get_mut(usize::from(row)) {
            vm.looked_at = match vm.slots.len() {
                0 => 0,
                len => (vm.looked_at.min(len) + slots) % len,
            };
        }
    }

    /// Chunks there can be.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// A chunk without flows is not ours any more.
    pub(super) fn forget_chunk(&mut self, index: usize) {
        if let Some(chunk) = self.chunks.get_mut(index) {
            debug_assert!(chunk.iter().flatten().all(Option::is_none));
            *chunk = None;
        }
    }

    /// The entries of a chunk, with the number of its first slot.
    pub(super) fn chunk(&self, index: usize) -> Option<&[Option<Entry>]> {
        self.chunks.get(index)?.as_deref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.chunks.iter().enumerate().flat_map(|(c, chunk)| {
            chunk
                .iter()
                .flat_map(|chunk| chunk.iter())
                .enumerate()
                .filter_map(move |(i, e)| e.as_ref().map(|e| ((c * PER_CHUNK + i) as u32, e)))
        })
    }

    fn get_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        let slot = slot as usize;
        self.chunks.get_mut(slot / PER_CHUNK)?.as_mut()?[slot % PER_CHUNK].as_mut()
    }
}
