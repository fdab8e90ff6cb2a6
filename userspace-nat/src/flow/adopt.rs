//! Adoption of the flows that an earlier process of this row left in the kernel.
//!
//! # Theory of operation
//! Nothing in the kernel stopped while no process served the row. These cases can be found there:
//!
//! | slot | tuples | what happened | what is done |
//! | --- | --- | --- | --- |
//! | not `Free` nor `Closing` | both | a flow, perhaps with traffic right now | adopted |
//! | same | one | (another process's sweep) | completed, or ended |
//! | same | none | as above | ended |
//! | `Closing` | any | died in the grace | the end begins again |
//! | `Closing` | none | died between the deletion and the slot's release | recorded, unless its id is in the log's tail; freed |
//! | `Free`, or of another generation | any | died while opening | deleted |
//!
//! There may be a million, and new flows must not wait for them. So at the start each slot is only
//! looked at ([`Flows::begin_adoption`]): a free one goes to the pool, one in use is listed under
//! its VM. Then some slots are adopted in each turn of the loop ([`Flows::next_left`]), and at last
//! tuples of no flow are deleted ([`Flows::sweep_some`]). Meanwhile
//!
//! - a flow that a packet or a command concerns is adopted before that is handled, by its tuple
//!   ([`Flows::left_by`]) or as one of its VM's ([`Flows::next_left_of`]);
//! - what is listed counts against its VM's cap and its share of the slots, as if it were live;
//! - no guest's port is given a translated port that another one's flows have that are left
//!   ([`super::mappings`]);
//! - no new flow gets a tuple that is left: the kernel's insertion refuses it, and the port that was
//!   found so is busy from then on;
//! - no chunk is released, so that a listed slot can't be another process's.
//!
//! A slot of these chunks that is in use and has no entry in the table is one that is left. A crash
//! changes nothing: what is left is what it was, and what was adopted is a flow like any other.
use std::{io, sync::atomic::Ordering::Relaxed};

use hashbrown::{HashMap, HashSet};
use slipgate_abi::{FlowRef, SlotIndex, Verdict, VmId, VmRow, slot::SlotFlags};
use slipgate_model::{FlowAddresses, FlowTuple};

use super::{EndReason, Ended, Entry, Flows, State, end, table::Marks};
use crate::datapath::{Datapath, FlowMap};

/// Result of an adoption: how many flows and entries were found, by what became of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Adoption {
    /// Flows that live on.
    pub live: usize,
    /// Flows that had begun to end, or whose VM is gone.
    pub ending: usize,
    /// Flows that had ended and only held their slot.
    pub ended: usize,
    /// Tuples that belonged to no flow.
    pub dangling: usize,
    /// Live flows that were ended because the present rules, forwards or routes do not admit them.
    pub refused: usize,
    /// Live flows that were ended because the engine that inspected them is gone.
    pub uninspected: usize,
    /// Addresses that DNS had opened and that are open again.
    pub reopened: usize,
}

/// Batch number of no batch: the log counts its batches from 1.
pub(crate) const NO_BATCH: u64 = 0;

/// Slots of a predecessor that are still to be adopted.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Chunks that were this process's at its start.
    chunks: HashSet<u32>,
    vms: HashMap<VmRow, OfVm, foldhash::fast::RandomState>,
    /// VMs whose lists are not empty, the next one last.
    order: Vec<VmRow>,
    /// Number of slots that are left, of all VMs.
    all: usize,
    /// Flows that had ended and are to be recorded, or only freed.
    ended: Vec<Ended>,
    /// Whether tuples of no flow are still to be looked for.
    sweeps: bool,
    /// Whether the next call of the sweep is the first.
    begins_sweep: bool,
}

/// Slots of a VM that were in use at the start.
#[derive(Debug, Default)]
struct OfVm {
    /// Those that the walk has not passed. Some may have been adopted for a packet since.
    slots: Vec<SlotIndex>,
    /// Number of slots that are left.
    left: usize,
    /// Number of these that hold a flow which the world opened.
    from_world: usize,
}

impl Flows {
    /// Lists the flows in this process's chunks. Called once, before anything else. Returns how
    /// many there are that have not begun to end.
    pub(crate) fn begin_adoption(&mut self, datapath: &mut impl Datapath, now_ns: u64) -> usize {
        self.ports
            .share_with(datapath.owner(), datapath.other_owners());
        self.mappings
            .share_with(datapath.owner(), datapath.other_owners());
        let (mut all, mut live) = (0, 0);
        for chunk in datapath.own_chunks() {
            self.left.chunks.insert(SlotIndex::new(chunk.start).chunk());
            self.slots.add_chunk(datapath, chunk.clone(), false, now_ns);
            for slot in chunk.map(SlotIndex::new) {
                let held = datapath.slot(slot);
                let verdict = held.verdict().load(Relaxed);
                if verdict == Verdict::Free as u32 {
                    continue;
                }
                all += 1;
                if self.mappings.range().is_some() {
                    let (guest, nat) = (datapath.guest_tuple(slot), datapath.addresses(slot).nat);
                    self.mappings.keep(slot, &guest, nat, held.nat_port());
                }
                if verdict == Verdict::Closing as u32 {
                    // Its owner may have died between moving the counts and releasing the slot.
                    // Not later: the next flow of the VM that ends would overwrite what it noted.
                    let generation = held.generation().load(Relaxed);
                    datapath.stats(held.row()).take_back_ended(slot, generation);
                } else {
                    live += 1;
                }
                let of_vm = self.left.vms.entry(held.row()).or_default();
                of_vm.slots.push(slot);
                of_vm.left += 1;
                of_vm.from_world += usize::from(held.flags() & SlotFlags::INBOUND != 0);
            }
        }
        for (row, of_vm) in &self.left.vms {
            self.left.order.push(*row);
            self.table.expect_of(*row, of_vm.left);
        }
        self.left.all = all;
        (self.left.sweeps, self.left.begins_sweep) = (true, true);
        // Or they would double in the middle of a packet's admission.
        self.table.expect(all);
        self.ports.expect(all);
        live
    }

    /// Whether flows of a predecessor are left to be adopted.
    pub(crate) fn are_left(&self) -> bool {
        self.left.all > 0
    }

    /// Returns the number of slots that are left.
    pub(crate) fn left_in_all(&self) -> usize {
        self.left.all
    }

    /// Whether flows are left, or tuples of no flow still to be looked for.
    pub(crate) fn is_adopting(&self) -> bool {
        self.left.sweeps || !self.left.ended.is_empty()
    }

    /// Takes the next slot of the walk from the list; `None` at its end. It may have been adopted
    /// before.
    pub(crate) fn next_left(&mut self) -> Option<SlotIndex> {
        while let Some(row) = self.left.order.last() {
            let of_vm = self.left.vms.get_mut(row);
            let slot = of_vm.and_then(|of_vm| of_vm.slots.pop());
            if slot.is_some() {
                return slot;
            }
            self.left.order.pop();
        }
        None
    }

    /// Returns the lists of all VMs.
    pub(crate) fn left_by_vm(&self) -> impl Iterator<Item = (VmRow, &[SlotIndex])> {
        let vms = self.left.vms.iter();
        vms.map(|(row, of_vm)| (*row, of_vm.slots.as_slice()))
    }

    /// Whether the list of a VM has slots.
    pub(crate) fn has_left_of(&self, row: VmRow) -> bool {
        let of_vm = self.left.vms.get(&row);
        of_vm.is_some_and(|of_vm| !of_vm.slots.is_empty())
    }

    /// Takes the next slot of a VM from the list, as [`Flows::next_left`] does.
    pub(crate) fn next_left_of(&mut self, row: VmRow) -> Option<SlotIndex> {
        self.left.vms.get_mut(&row)?.slots.pop()
    }

    /// Returns the slot that is left of the flow with this tuple.
    ///
    /// # Errors
    /// When the kernel refuses the look-up.
    pub(crate) fn left_by(
        &self,
        datapath: &mut impl Datapath,
        tuple: &FlowTuple,
    ) -> io::Result<Option<SlotIndex>> {
        if !self.are_left() {
            return Ok(None);
        }
        let known = match tuple.scope {
            FlowTuple::WORLD => self.table.by_world(tuple),
            _ => self.table.by_guest(tuple),
        };
        if known.is_some() {
            return Ok(None);
        }
        let found = datapath.get(tuple)?;
        let is_left = |flow: &FlowRef| {
            let live = datapath.slot(flow.index());
            self.is_left(live.verdict().load(Relaxed), flow.index())
                && live.generation().load(Relaxed) == flow.generation
                && [
                    datapath.guest_tuple(flow.index()),
                    datapath.world_tuple(flow.index()),
                ]
                .contains(tuple)
        };
        Ok(found.filter(is_left).map(|flow| flow.index()))
    }

    /// Returns the number of a VM's slots that are left.
    pub(super) fn left_of(&self, row: VmRow) -> usize {
        match self.left.all {
            0 => 0,
            _ => self.left.vms.get(&row).map_or(0, |of_vm| of_vm.left),
        }
    }

    /// Returns the number of these that hold a flow which the world opened.
    pub(super) fn left_from_world(&self, row: VmRow) -> usize {
        match self.left.all {
            0 => 0,
            _ => self.left.vms.get(&row).map_or(0, |of_vm| of_vm.from_world),
        }
    }

    /// `verdict`: its number in the slot.
    fn is_left(&self, verdict: u32, slot: SlotIndex) -> bool {
        self.left.all > 0
            && self.left.chunks.contains(&slot.chunk())
            && self.table.get(slot).is_none()
            && verdict != Verdict::Free as u32
    }

    /// Adopts a slot, if it is left. `is_vm`: whether this process serves this VM in this row.
    /// Returns whether it was left and is in the table now; the flow may be about to end.
    ///
    /// # Errors
    /// When the kernel refuses a look-up: the slot is listed again.
    pub(crate) fn adopt(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        is_vm: impl FnOnce(VmRow, VmId) -> bool,
        now_ns: u64,
    ) -> io::Result<bool> {
        let live = datapath.slot(slot);
        let verdict = live.verdict().load(Relaxed);
        if !self.is_left(verdict, slot) {
            return Ok(false);
        }
        let is_closing = verdict == Verdict::Closing as u32;
        let mut entry = left_entry(datapath, slot);
        let reference = FlowRef::new(slot, entry.generation);
        let mut has = |tuple| Ok(datapath.get(&tuple)? == Some(reference));
        let (has_guest, has_world) = match (has(entry.guest), has(entry.world())) {
            (Ok(guest), Ok(world)) => (guest, world),
            (Err(error), _) | (_, Err(error)) => {
                self.list_again(slot, entry.vm_row);
                return Err(error);
            }
        };
        self.pass(entry.vm_row, entry.is_from_world());
        if is_closing && !has_guest && !has_world {
            self.left.ended.push(Ended {
                slot,
                content: end::read(live),
                addresses: entry.addresses(),
                reason: EndReason::Adopted,
                held: false,
                ended_ns: now_ns,
            });
            self.adoption.ended += 1;
            return Ok(false);
        }
        let is_served = is_vm(entry.vm_row, entry.vm());
        if is_served && complete(datapath, reference, &entry, (has_guest, has_world)) {
            self.table.insert(slot, entry);
            self.mappings.joined(slot, &entry);
            if !entry.is_untranslated() {
                self.ports
                    .mark(entry.destination(), entry.nat_port, entry.vm());
            }
            self.await_proof(datapath, slot);
            if is_closing {
                self.begin_end(datapath, slot, EndReason::Adopted, now_ns);
                self.adoption.ending += 1;
            }
            return Ok(true);
        }
        // What it lacks another flow may have by now.
        live.set_verdict(Verdict::Closing);
        let tuples = [(has_guest, entry.guest), (has_world, entry.world())];
        let own: Vec<FlowTuple> = tuples.iter().filter(|(has, _)| *has).map(|t| t.1).collect();
        end::delete(datapath, &own);
        if has_world && !entry.is_untranslated() {
            let (to, port, vm) = (entry.destination(), entry.nat_port, entry.vm());
            self.ports.mark(to, port, vm);
            let how = end::freed(live, &entry, now_ns);
            self.ports.free(to, port, vm, how, now_ns);
        }
        entry.state = State::Unlinked;
        self.table.insert(slot, entry);
        let reason = match is_served {
            true => EndReason::Adopted,
            false => EndReason::VmRemoved,
        };
        self.enqueue_end(datapath, slot, State::Unlinked, reason, now_ns);
        self.adoption.ending += 1;
        Ok(true)
    }

    /// Ends the flow of a slot, if it is left: a user-mode engine has died that had its socket and, in its
    /// own memory, its tuples. It is among [`Flows::take_ended`] then.
    ///
    /// Whoever took that engine over may have passed this memory to a process that still writes to it. So
    /// each field is read once, and all that is judged or recorded is the copy.
    pub(crate) fn orphan(&mut self, datapath: &impl Datapath, slot: SlotIndex, now_ns: u64) {
        let live = datapath.slot(slot);
        let verdict = live.verdict().load(Relaxed);
        if !self.is_left(verdict, slot) {
            return;
        }
        let content = end::read_as(live, verdict);
        let addresses = FlowAddresses::of(&content, &datapath.addresses6(slot).copy());
        live.set_verdict(Verdict::Closing);
        let is_from_world = content.flags & SlotFlags::INBOUND != 0;
        self.pass(VmRow::new(content.vm_row), is_from_world);
        self.left.ended.push(Ended {
            slot,
            content,
            addresses,
            reason: match verdict == Verdict::Closing as u32 {
                true => EndReason::Adopted,
                false => EndReason::EngineDied,
            },
            held: verdict == Verdict::Engine as u32,
            ended_ns: now_ns,
        });
    }

    fn list_again(&mut self, slot: SlotIndex, row: VmRow) {
        self.left.vms.entry(row).or_default().slots.push(slot);
        self.left.order.push(row);
    }

    /// Takes the flows that had ended, to be recorded.
    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.left.ended)
    }

    /// Notes that a slot is no longer left. It may have changed since it was listed, if another process
    /// still writes to it: the sums are estimates then, and none goes below 0.
    fn pass(&mut self, vm_row: VmRow, is_from_world: bool) {
        let less = |sum: &mut usize, by: usize| *sum = sum.saturating_sub(by);
        less(&mut self.left.all, 1);
        if let Some(of_vm) = self.left.vms.get_mut(&vm_row) {
            less(&mut of_vm.left, 1);
            less(&mut of_vm.from_world, usize::from(is_from_world));
        }
    }

    /// Reads some of `FLOWS` and deletes the tuples in it that no flow of this process's chunks
    /// has. Called when no flow is left, until nothing is to be looked for.
    ///
    /// # Errors
    /// When `FLOWS` can't be read or a tuple can't be deleted.
    pub(crate) fn sweep_some(&mut self, datapath: &mut impl Datapath) -> io::Result<()> {
        let mut own = Vec::new();
        let begins = std::mem::take(&mut self.left.begins_sweep);
        self.left.sweeps = datapath.visit_some(begins, &mut |tuple, flow| {
            if self.left.chunks.contains(&flow.index().chunk()) {
                own.push((tuple, flow));
            }
        })?;
        for (tuple, flow) in own {
            let entry = self.table.get(flow.index());
            let is_its = entry.is_some_and(|entry| {
                entry.generation == flow.generation
                    && entry.state.is_linked()
                    && (entry.guest == tuple || entry.world() == tuple)
            });
            if !is_its && datapath.remove(&tuple)? {
                self.adoption.dangling += 1;
            }
        }
        if !self.left.sweeps {
            self.mappings.keep_none();
            self.left.chunks = HashSet::new();
            self.left.vms = HashMap::default();
        }
        Ok(())
    }
}

/// Returns the entry of a flow that is left in a slot, by what the slot has.
fn left_entry(datapath: &impl Datapath, slot: SlotIndex) -> Entry {
    let live = datapath.slot(slot);
    let has = |flag| live.flags() & flag != 0;
    let is_hairpin = has(SlotFlags::HAIRPIN);
    // A flow that was only captured is released by whoever adopts it.
    let is_engines = live.verdict().load(Relaxed) == Verdict::Engine as u32;
    let is_held = is_engines && !has(SlotFlags::CAPTURED) && !is_hairpin;
    Entry::live(
        datapath.guest_tuple(slot),
        datapath.addresses(slot).nat,
        live.nat_port(),
        live.row(),
        live.generation().load(Relaxed),
        Marks::NONE
            .with(Marks::FROM_WORLD, has(SlotFlags::INBOUND))
            .with(Marks::HELD, is_held)
            .with(Marks::HAIRPIN, is_hairpin),
    )
}

/// Inserts the missing tuple of a pair. Returns `false` when that fails, or both are missing.
fn complete(
    datapath: &mut impl FlowMap,
    reference: FlowRef,
    entry: &Entry,
    (has_guest, has_world): (bool, bool),
) -> bool {
    let mut insert = |tuple: &FlowTuple| datapath.insert_noexist(tuple, reference).is_ok();
    match (has_guest, has_world) {
        (true, true) => true,
        (true, false) => insert(&entry.world()),
        (false, true) => insert(&entry.guest),
        (false, false) => false,
    }
}
