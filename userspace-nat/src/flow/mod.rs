//! The engine's own flows: opening, finding, ending, adopting.
//!
//! # Theory of operation
//! The slot in `SLOTS` is the flow; both sides change it. What is here is an index over our own
//! slots (`table`), so that a packet finds its flow without a system call, and the bookkeeping
//! of what a flow holds: its slot (`slots`), its port ([`crate::nat_ports`]), its place in its
//! VM's quota.
//!
//! | state | kernel | leaves it |
//! | --- | --- | --- |
//! | `Live` | both tuples in `FLOWS`, verdict `Fast`, `Engine` or `Drop` | [`Flows::begin_end`] to `Ending`; [`Flows::unlink`] to `Unlinked` |
//! | `Ending` | both tuples, verdict `Closing`: packets come to the engine, which sends them on unless the flow is cut | after the grace to `Finished`, or back to `Live` when it was only idle and a packet came |
//! | `Unlinked` | no tuple, verdict `Closing`: its name may be used anew at once | after the grace to `Finished` |
//! | `Finished` | no tuple, verdict `Closing`, counts final, record on its way to the log | once the record is with the kernel, or lost: counts moved to `COUNTERS`, verdict `Free`; the slot rests |
//!
//! The grace ([`CLOSING_GRACE_NS`](slipgate_abi::timeout::CLOSING_GRACE_NS)) outlasts any program
//! that read the verdict before it changed, so the counts read after it are final.
//!
//! Opening is in this order: slot filled, world tuple, guest tuple, verdict. A crash
//! anywhere leaves what [`adopt`] can tell apart: a free slot's tuples are dangling, a closing
//! slot without tuples is to be recorded if its id is not in the log's tail.
use std::collections::VecDeque;

use slipgate_abi::{
    Ip4, Tuple,
    maps::{MAX_VMS, SLOTS_PER_CHUNK},
};

use crate::{datapath::Datapath, nat_ports::PortPool};

pub mod adopt;
mod cut;
mod end;
mod gc;
mod give_way;
mod open;
mod proof;
mod slots;
mod table;

pub use cut::is_frozen;
pub use end::{EndReason, Ended};
pub use give_way::{GivingWay, PortLook};
pub use open::{NewFlow, OpenError};
pub use table::{Entry, State};

use slots::SlotPool;
use table::FlowTable;

/// All own flows.
#[derive(Debug)]
pub struct Flows {
    table: FlowTable,
    slots: SlotPool,
    /// Translated ports.
    pub ports: PortPool,
    /// Flows in `Ending` or `Unlinked`, in the order in which their grace ends.
    ending: VecDeque<end::Ending>,
    /// Flows in `Finished` that were recorded in this turn, with the log's batch.
    finished: Vec<(u64, end::Ended)>,
    /// Those of before whose batches are on their way to the log's file, in order.
    unwritten: VecDeque<(u64, end::Ended)>,
    /// Closed flows that still hold their slot, oldest first, for when slots run short.
    closed: VecDeque<(u32, u32)>,
    next_end_id: u32,
    scan: gc::Scan,
    /// VMs among which slots and ports are shared.
    vms: usize,
}

impl Flows {
    /// No flows yet, for this many slots in all.
    pub fn new(slots: u32, ports: PortPool) -> Self {
        Self {
            table: FlowTable::new(slots, MAX_VMS as usize),
            slots: SlotPool::new(),
            ports,
            ending: VecDeque::new(),
            finished: Vec::new(),
            unwritten: VecDeque::new(),
            closed: VecDeque::new(),
            next_end_id: 0,
            scan: gc::Scan::default(),
            vms: 1,
        }
    }

    /// The flow that has this tuple on its guest's link.
    pub fn by_guest(&self, tuple: &Tuple) -> Option<u32> {
        self.table.by_guest(tuple)
    }

    /// The flow that has this tuple on the world's links.
    pub fn by_world(&self, tuple: &Tuple) -> Option<u32> {
        self.table.by_world(tuple)
    }

    /// What is known of an own slot in use.
    pub fn entry(&self, slot: u32) -> Option<&Entry> {
        self.table.get(slot)
    }

    /// Flows of a VM that hold a slot.
    pub fn slots_of(&self, row: u16) -> &[u32] {
        self.table.slots_of(row)
    }

    /// Flows of a VM that count against its cap: all whose tuples are in the kernel, so that what
    /// carries packets counts.
    pub fn count(&self, row: u16) -> usize {
        self.table.counted(row)
    }

    /// Of these, how many the world opened.
    pub fn count_from_world(&self, row: u16) -> usize {
        self.table.counted_from_world(row)
    }

    /// Flows that live: all that hold a slot but those that are on their way out. Looks at each.
    pub fn live(&self) -> usize {
        let entries = self.table.iter();
        entries.filter(|(_, e)| e.state == State::Live).count()
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets among how many VMs slots and ports are shared.
    pub fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.ports.share_among(vms);
    }

    /// Sets how many flows a VM may have; when it has nearly as many, closed ones end early.
    pub fn set_cap(&mut self, row: u16, most: u32) {
        self.table.set_cap(row, most);
    }

    /// Has the engine carry a flow's packets from now on: they come as
    /// [`Handover::Verdict`](slipgate_abi::Handover::Verdict), but for those that a program is
    /// already at work on. Whether there is such a flow that may live on.
    pub fn hold(&mut self, datapath: &mut impl Datapath, slot: u32) -> bool {
        self.carry(datapath, slot, true)
    }

    /// Has the kernel translate them again. Whether there is such a flow that may live on.
    pub fn release(&mut self, datapath: &mut impl Datapath, slot: u32) -> bool {
        self.carry(datapath, slot, false)
    }

    fn carry(&mut self, datapath: &mut impl Datapath, slot: u32, held: bool) -> bool {
        let state = self.table.set_held(slot, held);
        // One that is ending gets its verdict when it is revived.
        if state == Some(State::Live)
            && let Some(entry) = self.entry(slot)
        {
            entry.set_verdict(datapath.slot(slot));
        }
        state.is_some_and(State::is_linked)
    }

    /// Whether any own flow has this translated address.
    pub fn slots_with_nat(&self, nat: Ip4) -> Vec<u32> {
        self.table
            .iter()
            .filter(|(_, e)| e.nat == nat)
            .map(|(slot, _)| slot)
            .collect()
    }

    /// Chunks of slots there can be.
    pub fn chunks(&self) -> usize {
        self.table.chunks()
    }

    /// Whether a chunk ever had any.
    pub fn has_chunk(&self, chunk: usize) -> bool {
        self.table.chunk(chunk).is_some()
    }

    /// The slots in use of a chunk, if it ever had any.
    pub fn in_chunk(&self, chunk: usize) -> Option<impl Iterator<Item = u32>> {
        let entries = self.table.chunk(chunk)?;
        let first = chunk as u32 * SLOTS_PER_CHUNK;
        let used = (first..).zip(entries).filter(|(_, entry)| entry.is_some());
        Some(used.map(|(slot, _)| slot))
    }

    /// Whether there are chunks that might be given back.
    pub fn has_spare_chunks(&self) -> bool {
        self.slots.has_spare()
    }

    /// Every own slot in use.
    pub fn all(&self) -> Vec<u32> {
        self.table.iter().map(|(slot, _)| slot).collect()
    }
}
