//! Adoption of the flows that an earlier process of this row left in the kernel.
//!
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
use std::{io, sync::atomic::Ordering::Relaxed};

use hashbrown::{HashMap, HashSet};
use slipgate_abi::{FlowRef, SlotIndex, SlotRef, Tuple, Verdict, VmId, VmRow, slot::SlotFlags};

use super::{EndReason, Ended, Entry, Flows, end, table::Marks};
use crate::datapath::Datapath;

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
    /// Live flows that were ended because the present rules or forwards do not admit them.
    pub refused: usize,
    /// Live flows that were ended because the engine that inspected them is gone.
    pub uninspected: usize,
    /// Addresses that DNS had opened and that are open again.
    pub reopened: usize,
}

/// Knowledge of the adopting engine that the kernel's tables do not hold.
pub trait Known {
    /// Whether this process serves this VM in this row.
    fn is_vm(&self, row: VmRow, vm: VmId) -> bool;
    /// Whether the flow log has a record of this slot and generation.
    fn is_recorded(&self, slot: SlotIndex, generation: u32) -> bool;
}

/// Batch number of no batch: the log counts its batches from 1.
const NO_BATCH: u64 = 0;

#[derive(Clone, Copy, Default)]
struct Seen {
    guest: bool,
    world: bool,
}

impl Flows {
    /// Adopts the flows in this process's chunks. Called once, before anything else. `record` calls
    /// [`Flows::recorded`] with the batch of the record. The caller then writes its records, counts
    /// the live flows ([`Adoption::live`] is left to it), and calls [`Flows::free_finished`].
    ///
    /// # Errors
    /// When `FLOWS` can't be read or a dangling tuple can't be deleted.
    pub fn adopt(
        &mut self,
        datapath: &mut impl Datapath,
        now_ns: u64,
        known: &impl Known,
        record: &mut dyn FnMut(&Ended),
    ) -> io::Result<Adoption> {
        self.ports
            .share_with(datapath.owner(), datapath.other_owners());
        let chunks = datapath.own_chunks();
        let mut adoption = Adoption::default();
        let seen = match_tuples(datapath, &chunks, &mut adoption)?;
        for slot in chunks.iter().cloned().flatten().map(SlotIndex::new) {
            let live = datapath.slot(slot);
            let verdict = live.verdict().load(Relaxed);
            if verdict == Verdict::Free as u32 {
                continue;
            }
            let seen = seen.get(&slot).copied().unwrap_or_default();
            let closing = verdict == Verdict::Closing as u32;
            if closing && !seen.guest && !seen.world {
                let generation = live.generation().load(Relaxed);
                // Its owner may have died between moving the counts and releasing the slot.
                datapath.stats(live.row()).take_back_ended(slot, generation);
                let ended = Ended {
                    slot,
                    content: end::read(live),
                    reason: EndReason::Adopted,
                    held: false,
                    ended_ns: now_ns,
                };
                if known.is_recorded(slot, generation) {
                    self.recorded(&ended, NO_BATCH);
                } else {
                    record(&ended);
                }
                adoption.ended += 1;
                continue;
            }
            // A flow that was only captured is released once the other checks are made, by the
            // caller.
            let captured = live.flags() & SlotFlags::CAPTURED != 0;
            let held = verdict == Verdict::Engine as u32 && !captured;
            let entry = self.index(slot, live, held);
            self.await_proof(datapath, slot);
            if !known.is_vm(live.row(), live.id()) {
                self.unlink(datapath, slot, EndReason::VmRemoved, now_ns);
                adoption.ending += 1;
            } else if !complete(datapath, slot, &entry, seen) {
                self.unlink(datapath, slot, EndReason::Adopted, now_ns);
                adoption.ending += 1;
            } else if closing {
                self.begin_end(datapath, slot, EndReason::Adopted, now_ns);
                adoption.ending += 1;
            }
        }
        for chunk in chunks {
            self.slots.add_chunk(datapath, chunk, false, now_ns);
        }
        Ok(adoption)
    }

    fn index(&mut self, slot: SlotIndex, live: SlotRef, held: bool) -> Entry {
        let entry = Entry::live(
            live.guest_tuple(),
            live.nat(),
            live.nat_port(),
            live.row(),
            live.generation().load(Relaxed),
            Marks::NONE
                .with(Marks::FROM_WORLD, live.flags() & SlotFlags::INBOUND != 0)
                .with(Marks::HELD, held),
        );
        self.table.insert(slot, entry);
        self.ports
            .mark(entry.destination(), entry.nat_port, entry.vm());
        entry
    }
}

/// Reads all of `FLOWS` once. Returns which tuples of each own slot exist, and deletes dangling
/// ones.
fn match_tuples(
    datapath: &mut impl Datapath,
    chunks: &[std::ops::Range<u32>],
    adoption: &mut Adoption,
) -> io::Result<HashMap<SlotIndex, Seen>> {
    let own: HashSet<u32> = chunks
        .iter()
        .map(|chunk| SlotIndex::new(chunk.start).chunk())
        .collect();
    let mut entries = Vec::new();
    datapath.for_each(&mut |tuple, flow| {
        if own.contains(&flow.index().chunk()) {
            entries.push((tuple, flow));
        }
    })?;
    let mut seen: HashMap<SlotIndex, Seen> = HashMap::new();
    for (tuple, flow) in entries {
        let (slot, generation) = (flow.index(), flow.generation);
        let live = datapath.slot(slot);
        let in_use = live.verdict().load(Relaxed) != Verdict::Free as u32
            && live.generation().load(Relaxed) == generation;
        if in_use && tuple == live.guest_tuple() {
            seen.entry(slot).or_default().guest = true;
        } else if in_use && tuple == live.world_tuple() {
            seen.entry(slot).or_default().world = true;
        } else {
            datapath.remove(&tuple)?;
            adoption.dangling += 1;
        }
    }
    Ok(seen)
}

/// Inserts the missing tuple of a pair. Returns `false` when that fails, or both are missing.
fn complete(datapath: &mut impl Datapath, slot: SlotIndex, entry: &Entry, seen: Seen) -> bool {
    let reference = FlowRef::new(slot, entry.generation);
    let mut insert = |tuple: &Tuple| datapath.insert_noexist(tuple, reference).is_ok();
    match (seen.guest, seen.world) {
        (true, true) => true,
        (true, false) => insert(&entry.world()),
        (false, true) => insert(&entry.guest),
        (false, false) => false,
    }
}
