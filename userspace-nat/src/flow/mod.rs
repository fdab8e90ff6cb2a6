//! The engine's own flows: opening, finding, ending, adopting.
//!
//! # Theory of operation
//! The slot in `SLOTS` is the flow; kernel and engine both change it. This module is an index over
//! the slots of this process (`table`), so that a packet finds its flow without a system call. It
//! also accounts for what a flow holds: its slot (`slots`), its port ([`crate::nat_ports`]), its
//! place in its VM's quota. Ports that flows share are in [`mappings`].
//!
//! | state | kernel | leaves it |
//! | --- | --- | --- |
//! | `Live` | both tuples in `FLOWS`, verdict `Fast`, `Engine` or `Drop` | [`Flows::begin_end`] to `Ending`; [`Flows::unlink`] to `Unlinked` |
//! | `Ending` | both tuples, verdict `Closing`: packets come to the engine, which sends them on unless the flow is cut | after the grace to `Finished`, or back to `Live` when it was only idle and a packet came |
//! | `Unlinked` | no tuple, verdict `Closing`: its tuples may be used again at once | after the grace to `Finished` |
//! | `Finished` | no tuple, verdict `Closing`, counts final, record on its way to the log | once the record is with the kernel, or lost: counts moved to `COUNTERS`, verdict `Free`; the slot rests |
//!
//! The grace ([`CLOSING_GRACE_NS`](slipgate_abi::timeout::CLOSING_GRACE_NS)) outlasts any program
//! that read the verdict before it changed, so the counts read after it are final.
//!
//! Opening is in this order: slot filled, world tuple, guest tuple, verdict. The last three are the
//! engine's, or the program's at its port, on the engine's order: with the frame of the first packet,
//! which saves two system calls ([`Insertion`]). If the program can't carry the order out, the flow
//! is gone and its first packet is handled again, now by system calls. A crash at any point leaves
//! what [`adopt`] can tell apart: a free slot's tuples are dangling, a closing slot without tuples is
//! to be recorded if its id is not in the log's tail.
use std::collections::VecDeque;

use slipgate_abi::{SlotIndex, VmRow};
use slipgate_model::FlowTuple;

use crate::{
    datapath::{Datapath, Tables},
    nat_ports::PortPool,
};

pub mod adopt;
mod cut;
mod end;
mod gc;
mod give_way;
pub mod mappings;
mod open;
mod proof;
mod slots;
mod table;
mod walk;

pub use cut::{is_asleep, is_paused};
#[cfg(test)]
pub(crate) use end::ENDS_AT_ONCE;
pub(crate) use end::last_seen_ns;
pub use end::{EndReason, Ended};
pub use give_way::{GivingWay, PortSearch};
pub use open::{Insertion, NewFlow, OpenError};
pub use table::{Entry, State};
pub(crate) use walk::{STEPS_PER_TURN, SlotWalk};

use mappings::Mappings;
use slots::SlotPool;
use table::{FlowTable, Marks};

/// The flows of this process, with the slots and ports that they hold.
#[derive(Debug)]
pub struct Flows {
    table: FlowTable,
    slots: SlotPool,
    /// The translated ports of this process.
    pub ports: PortPool,
    /// Translated ports that do not depend on the destination.
    pub mappings: Mappings,
    /// Flows in `Ending` or `Unlinked`, in the order in which their grace ends.
    ending: VecDeque<end::Ending>,
    /// Flows in `Finished` that were recorded in this turn, with the log's batch.
    finished: Vec<(u64, end::Ended)>,
    /// Flows in `Finished` from earlier turns whose batches are on their way to the log's file, in
    /// order.
    unwritten: VecDeque<(u64, end::Ended)>,
    /// Closed flows that still hold their slot, oldest first, for when slots run short.
    closed: VecDeque<(SlotIndex, u32)>,
    next_end_id: u32,
    scan: gc::Scan,
    /// Slots of a predecessor that are still to be adopted.
    left: adopt::Left,
    /// Progress of the adoption of a predecessor's flows.
    pub(crate) adoption: adopt::Adoption,
    /// Number of VMs among which slots and ports are shared.
    vms: usize,
    /// Flow whose insertion is ordered, until its first packet is written.
    ordered: Option<SlotIndex>,
    /// Whether insertions may be ordered of the program at the port.
    pub(crate) takes_orders: bool,
}

impl Flows {
    /// Creates an empty set of flows, for `slots` slots and `vms` VMs in all.
    pub fn new(slots: u32, vms: u32, ports: PortPool) -> Self {
        Self {
            table: FlowTable::new(slots, vms as usize + 1),
            slots: SlotPool::default(),
            ports,
            mappings: Mappings::new(),
            ending: VecDeque::new(),
            finished: Vec::new(),
            unwritten: VecDeque::new(),
            closed: VecDeque::new(),
            next_end_id: 0,
            scan: gc::Scan::default(),
            left: adopt::Left::default(),
            adoption: adopt::Adoption::default(),
            vms: 1,
            ordered: None,
            takes_orders: true,
        }
    }

    /// Returns the slot of the flow with this tuple on its guest's link.
    pub fn by_guest(&self, tuple: &FlowTuple) -> Option<SlotIndex> {
        self.table.by_guest(tuple)
    }

    /// Returns the slot of the flow with this tuple on the world's links.
    pub fn by_world(&self, tuple: &FlowTuple) -> Option<SlotIndex> {
        self.table.by_world(tuple)
    }

    /// Returns the entry of an own slot in use.
    pub fn entry(&self, slot: SlotIndex) -> Option<&Entry> {
        self.table.get(slot)
    }

    /// Returns the slots of a VM's flows.
    pub fn slots_of(&self, row: VmRow) -> &[SlotIndex] {
        self.table.slots_of(row)
    }

    /// Returns the number of flows that a VM's row ever had.
    pub fn opened_by(&self, row: VmRow) -> u64 {
        self.table.opened_by(row)
    }

    /// Returns the number of a VM's flows that count against its cap: all whose tuples are in the
    /// kernel, so that every flow that carries packets counts.
    pub fn count(&self, row: VmRow) -> usize {
        self.table.counted(row) + self.left_of(row)
    }

    /// Returns the number of these flows that the world opened.
    pub fn count_from_world(&self, row: VmRow) -> usize {
        self.table.counted_from_world(row) + self.left_from_world(row)
    }

    /// Returns the number of slots in use.
    pub fn len(&self) -> usize {
        self.table.len() + self.left_in_all()
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets the number of VMs among which slots and ports are shared.
    pub fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.ports.share_among(vms);
        self.mappings.share_among(vms);
    }

    /// Sets how many flows a VM may have. When it has nearly as many, closed ones end early.
    pub fn set_cap(&mut self, row: VmRow, most: u32) {
        self.table.set_cap(row, most);
    }

    /// Has the engine carry a flow's packets from now on: they come as
    /// [`Handover::Verdict`](slipgate_abi::Handover::Verdict), except for those that a program is
    /// already handling. Returns whether there is such a flow that may live on.
    pub fn hold(&mut self, datapath: &mut impl Datapath, slot: SlotIndex) -> bool {
        self.set_mark(datapath, slot, Marks::HELD, true)
    }

    /// Has the kernel translate a flow's packets again. Returns whether there is such a flow that
    /// may live on.
    pub fn release(&mut self, datapath: &mut impl Datapath, slot: SlotIndex) -> bool {
        self.set_mark(datapath, slot, Marks::HELD, false)
    }

    /// Changes a mark that decides who carries the flow, and its verdict. Returns whether there is
    /// such a flow that may live on.
    fn set_mark(&mut self, tables: &impl Tables, slot: SlotIndex, mark: Marks, on: bool) -> bool {
        self.table.mark(slot, mark, on);
        let Some(entry) = self.entry(slot) else {
            return false;
        };
        // A flow that is ending gets its verdict when it is revived.
        if entry.state == State::Live {
            entry.set_verdict(tables.slot(slot));
        }
        entry.state.is_linked()
    }

    /// Returns the largest number of chunks of slots.
    pub fn chunks(&self) -> usize {
        self.table.chunks()
    }

    /// Whether there are chunks that might be released.
    pub fn has_spare_chunks(&self) -> bool {
        self.slots.has_spare()
    }

    /// Returns every own slot in use.
    pub fn all(&self) -> Vec<SlotIndex> {
        self.table.iter().map(|(slot, _)| slot).collect()
    }
}
