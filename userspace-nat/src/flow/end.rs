//! The end of a flow, in two phases.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Counter, Protocol, Slot, SlotIndex, SlotRef, Verdict, VmId, VmRow,
    activity::LastPackets,
    maps::SLOTS_PER_CHUNK,
    slot::SlotFlags,
    tcp::{Phase, TcpBits},
    timeout::CLOSING_GRACE_NS,
};
use slipgate_model::{FlowAddresses, FlowTuple};
use slipgate_policy::Timers;

use super::{
    Entry, Flows, State,
    give_way::{Standing, has_both_syns},
    proof::proof_left_ns,
};
use crate::{datapath::Datapath, nat_ports::Freed};

/// Divisor: at most this fraction of the table waits for a slow file.
const UNWRITTEN_SHARE: usize = 8;
/// Flows whose end is completed in one call, about 0.3 ms: first packets wait meanwhile.
pub(crate) const ENDS_AT_ONCE: usize = 64;

/// Reason for the end of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EndReason {
    /// Silent for longer than its timeout, or for long enough when its place was needed.
    Idle,
    /// TCP closed by both sides.
    Closed,
    /// TCP reset by either side.
    Reset,
    /// TCP reset, and the inspection that followed the connection knows that no further segment is
    /// legitimate.
    ResetForGood,
    /// A new connection took its tuple.
    TupleReused,
    /// Its VM was removed.
    VmRemoved,
    /// The host no longer has its translated address.
    AddressGone,
    /// The present rules or forwards do not admit it.
    Policy,
    /// slipgate ended every flow and detached.
    Detached,
    /// An earlier process had begun to end it.
    Adopted,
    /// Its remote had not proven that it exists, and a new flow needed its place.
    MadeRoom,
    /// A client of the control socket cut it.
    Cut,
    /// Its VM goes on from another state of its memory, which does not know it.
    Generation,
    /// Its VM leaves by another uplink now, which does not have its translated address.
    Uplink,
    /// Its translated address is not one of its VM's pool any more.
    NatAddresses,
    /// Its VM has no IPv6 any more, or another prefix.
    Prefix,
    /// The host's routes refuse its destination now, deliver it to the host, or lead there by a link
    /// by which its VM may not leave, or which does not have its translated address.
    Route,
    /// Its content, or the lack of it, violates the inspect rule that admitted it.
    Inspection,
    /// The user-mode engine that had its socket ended without ending it: it crashed or was killed.
    EngineDied,
}

impl EndReason {
    /// Returns the name used in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Closed => "closed",
            Self::Reset | Self::ResetForGood => "reset",
            Self::TupleReused => "tuple-reused",
            Self::VmRemoved => "vm-removed",
            Self::AddressGone => "address-gone",
            Self::Policy => "policy",
            Self::Detached => "detached",
            Self::Adopted => "adopted",
            Self::MadeRoom => "made-room",
            Self::Cut => "cut",
            Self::Generation => "generation",
            Self::Uplink => "uplink",
            Self::NatAddresses => "nat-addresses",
            Self::Prefix => "prefix",
            Self::Route => "route",
            Self::Inspection => "inspection",
            Self::EngineDied => "engine-died",
        }
    }

    /// Whether a packet in the grace makes the flow live on.
    const fn is_revived_by_traffic(self) -> bool {
        matches!(self, Self::Idle | Self::Reset | Self::Adopted)
    }
}

/// A flow in its grace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    slot: SlotIndex,
    end_id: u32,
    due_ns: u64,
    seen_ns: u64,
}

/// Final state of a flow that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Index of its slot.
    pub slot: SlotIndex,
    /// Content of its slot.
    pub content: Slot,
    /// Addresses of the flow's ends, and the translated one.
    pub addresses: FlowAddresses,
    /// Reason for its end.
    pub reason: EndReason,
    /// Whether the engine carried its packets until the end.
    pub held: bool,
    /// Time of its end, ns.
    pub ended_ns: u64,
}

/// Returns the time of a flow's last packet, ns.
pub(crate) fn last_seen_ns(slot: SlotRef) -> u64 {
    let (tx, rx) = (
        slot.tx_last_ns().load(Relaxed),
        slot.rx_last_ns().load(Relaxed),
    );
    tx.max(rx).max(slot.created_ns())
}

/// Returns how long a flow may still be silent, ns; 0: its timeout is over.
pub(super) fn idle_left_ns(slot: SlotRef, protocol: Protocol, timers: Timers, now_ns: u64) -> u64 {
    let idle_ns = timers.idle_ns(protocol, TcpBits(slot.tcp().load(Relaxed)));
    let left_ns = idle_ns.saturating_sub(now_ns.saturating_sub(last_seen_ns(slot)));
    proof_left_ns(slot, protocol, now_ns).map_or(left_ns, |proof_ns| left_ns.min(proof_ns))
}

impl Flows {
    /// Begins the first phase of a flow's end: from now on its packets come to the engine.
    pub fn begin_end(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        reason: EndReason,
        now_ns: u64,
    ) {
        if self.entry(slot).is_some_and(|e| e.state == State::Live) {
            self.enqueue_end(datapath, slot, State::Ending, reason, now_ns);
        }
    }

    /// Ends a flow and frees its tuples at once: both are deleted before the grace, so its packets
    /// miss. Its counts and its slot follow after the grace.
    pub fn unlink(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        reason: EndReason,
        now_ns: u64,
    ) {
        let Some(entry) = self.entry(slot).copied() else {
            return;
        };
        if entry.state.is_linked() {
            datapath.slot(slot).set_verdict(Verdict::Closing);
            delete(datapath, &tuples_of(&entry));
            self.free_tuples(datapath, slot, &entry, now_ns);
            // A flow that was cut keeps that reason, whichever flow has its tuples next.
            let reason = match entry.state {
                State::Ending if entry.end_reason.is_cut() => entry.end_reason,
                _ => reason,
            };
            self.enqueue_end(datapath, slot, State::Unlinked, reason, now_ns);
        }
    }

    pub(super) fn enqueue_end(
        &mut self,
        datapath: &impl Datapath,
        slot: SlotIndex,
        state: State,
        reason: EndReason,
        now_ns: u64,
    ) {
        let live = datapath.slot(slot);
        live.set_verdict(Verdict::Closing);
        self.next_end_id = self.next_end_id.wrapping_add(1);
        self.table.set_state(slot, state, self.next_end_id, reason);
        self.ending.push_back(Ending {
            slot,
            end_id: self.next_end_id,
            due_ns: now_ns + CLOSING_GRACE_NS,
            seen_ns: last_seen_ns(live),
        });
    }

    /// Handles a packet of a flow with verdict `Closing`: the flow lives on if it was only silent.
    /// Returns whether its packets may be sent on.
    pub fn revive(&mut self, datapath: &mut impl Datapath, slot: SlotIndex) -> bool {
        let Some(entry) = self.entry(slot) else {
            return false;
        };
        match entry.state {
            State::Live => true,
            State::Ending => {
                let cut = entry.end_reason.is_cut();
                if entry.end_reason.is_revived_by_traffic() {
                    self.make_live(datapath, slot);
                }
                !cut
            }
            State::Unlinked | State::Finished => false,
        }
    }

    fn make_live(&mut self, datapath: &impl Datapath, slot: SlotIndex) {
        self.table.set_state(slot, State::Live, 0, EndReason::Idle);
        if let Some(entry) = self.entry(slot) {
            entry.set_verdict(datapath.slot(slot));
        }
    }

    /// Returns when the next grace ends, ns; `None` when no flow is ending.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.ending.front().map(|e| e.due_ns)
    }

    /// Does the second phase for flows whose grace is over, for [`ENDS_AT_ONCE`] at most: deletes
    /// tuples and passes the final counts to `record`, which calls [`Flows::recorded`] with the
    /// batch of the record.
    pub fn finish_due(
        &mut self,
        datapath: &mut impl Datapath,
        timers: impl Fn(VmId) -> Timers,
        now_ns: u64,
        record: &mut dyn FnMut(&Ended),
    ) {
        let (mut over, mut tuples) = (Vec::new(), Vec::new());
        for _ in 0..ENDS_AT_ONCE {
            let Some(ending) = self.ending.pop_front_if(|e| e.due_ns <= now_ns) else {
                break;
            };
            let Some(entry) = self.entry(ending.slot).copied() else {
                continue;
            };
            if entry.end_id != ending.end_id {
                continue;
            }
            let live = datapath.slot(ending.slot);
            if entry.state == State::Ending {
                let moved = last_seen_ns(live) != ending.seen_ns;
                if moved
                    && entry.end_reason.is_revived_by_traffic()
                    && idle_left_ns(live, entry.protocol(), timers(entry.vm()), now_ns) > 0
                {
                    self.make_live(datapath, ending.slot);
                    continue;
                }
                tuples.extend(tuples_of(&entry));
            }
            over.push((ending.slot, entry));
        }
        delete(datapath, &tuples);
        for (slot, entry) in over {
            if entry.state == State::Ending {
                self.free_tuples(datapath, slot, &entry, now_ns);
            }
            let reason = entry.end_reason;
            self.table
                .set_state(slot, State::Finished, entry.end_id, reason);
            record(&Ended {
                slot,
                content: read(datapath.slot(slot)),
                addresses: entry.addresses(),
                reason,
                held: entry.live_verdict() == Verdict::Engine,
                ended_ns: now_ns,
            });
        }
    }

    /// Notes that a finished flow was recorded in this batch of the log. Its slot is freed by
    /// [`Flows::free_finished`] once the batch is no longer on its way to the file.
    pub fn recorded(&mut self, ended: &Ended, batch: u64) {
        self.finished.push((batch, *ended));
    }

    /// Frees recorded flows, except for those whose records are in a batch on its way to the log's
    /// file: if the engine dies before they are written, its successor finds the flows. The counts
    /// of a freed flow move to the VM's `COUNTERS` in the same step, so that they are never missing
    /// from both for long, and the slot rests.
    ///
    /// A file that accepts no writes must not use up the table: of more than a fraction of it, the
    /// oldest are freed all the same, and are recorded unless the engine dies too.
    pub fn free_finished(
        &mut self,
        datapath: &mut impl Datapath,
        is_under_way: impl Fn(u64) -> bool,
        now_ns: u64,
    ) {
        let most = self.table.chunks() * SLOTS_PER_CHUNK as usize / UNWRITTEN_SHARE;
        // One by one: a list of flows that end at once would be larger than their slots.
        let mut free = |ended: &Ended| {
            free_slot(datapath, ended);
            self.table.remove(ended.slot);
            self.slots.release(ended.slot, now_ns);
        };
        for (batch, ended) in std::mem::take(&mut self.finished) {
            if is_under_way(batch) {
                self.unwritten.push_back((batch, ended));
            } else {
                free(&ended);
            }
        }
        let too_many = self.unwritten.len().saturating_sub(most);
        for (_, ended) in self.unwritten.drain(..too_many) {
            free(&ended);
        }
        let is_done = |(batch, _): &mut (u64, Ended)| !is_under_way(*batch);
        while let Some((_, ended)) = self.unwritten.pop_front_if(is_done) {
            free(&ended);
        }
    }

    /// Lets other flows have a flow's tuples, which are no longer in the kernel, and its port.
    fn free_tuples(
        &mut self,
        datapath: &impl Datapath,
        slot: SlotIndex,
        entry: &Entry,
        now_ns: u64,
    ) {
        let how = freed(datapath.slot(slot), entry, now_ns);
        let (to, vm) = (entry.destination(), entry.vm());
        self.ports.free(to, entry.nat_port, vm, how, now_ns);
        self.mappings.left(slot, entry, now_ns);
        self.table.unlink(slot);
    }
}

/// Returns a flow's tuples in the order in which they are deleted: the guest's packets must not go
/// out when the answers are unknown.
fn tuples_of(entry: &Entry) -> [FlowTuple; 2] {
    [entry.guest, entry.world()]
}

/// Deletes tuples from the kernel. A failure leaves an entry that points to a slot of another
/// generation: a miss to programs, and an obstacle to the tuple's next user until swept.
pub(super) fn delete(datapath: &mut impl Datapath, tuples: &[FlowTuple]) {
    if !tuples.is_empty() {
        let _ = datapath.remove_all(tuples);
    }
}

/// Moves an ended flow's counts to its VM's row and marks the slot free.
pub(super) fn free_slot(datapath: &impl Datapath, ended: &Ended) {
    let content = &ended.content;
    let counter = |packets, bytes| Counter { packets, bytes };
    let tx = counter(content.tx_packets, content.tx_bytes);
    let rx = counter(content.rx_packets, content.rx_bytes);
    let stats = datapath.stats(VmRow::new(content.vm_row));
    stats.saw_until(LastPackets::of(content, ended.ended_ns));
    stats.ended(ended.slot, content.generation, tx, rx);
    datapath.slot(ended.slot).set_verdict(Verdict::Free);
}

/// Returns how safely a flow's port can be used again (RFC 6888 REQ-8): at once when the server
/// holds no state of the flow, because it has closed without TIME-WAIT, has refused the flow, or
/// never answered. In user mode a TIME-WAIT of the guest's is the host's ([`Freed::GuestFirst`]). A RST is no proof: anybody may have sent it, and the server may go on, which
/// does not concern other VMs.
pub(super) fn freed(slot: SlotRef, entry: &Entry, now_ns: u64) -> Freed {
    if slot.flags() & SlotFlags::INSPECTED != 0 {
        return Freed::Inspected;
    }
    let bits = TcpBits(slot.tcp().load(Relaxed));
    let is_closed = entry.protocol() == Protocol::Tcp && bits.phase() == Phase::Closed;
    let is_safe = if is_closed {
        bits.0 & TcpBits::PEER_TIME_WAIT == 0
    } else {
        matches!(
            Standing::of(slot, entry, now_ns),
            Some(Standing::Over | Standing::Unanswered)
        )
    };
    let is_connection =
        entry.protocol() == Protocol::Tcp && has_both_syns(bits) && bits.phase() != Phase::Reset;
    match (is_safe, is_connection) {
        (true, _) if is_closed => Freed::GuestFirst,
        (true, _) => Freed::Safe,
        (false, true) => Freed::Rests,
        (false, false) => Freed::RestsForOthers,
    }
}

/// Returns a copy of a slot. Its counters are final once no program counts any more.
pub(super) fn read(slot: SlotRef) -> Slot {
    read_as(slot, slot.verdict().load(Relaxed))
}

/// The same, with the number of its verdict as it was read before.
pub(super) fn read_as(slot: SlotRef, verdict: u32) -> Slot {
    let verdict = Verdict::from_u32(verdict).unwrap_or(Verdict::Free);
    let protocol = Protocol::from_number(slot.protocol());
    slot.copy_as(verdict, protocol.unwrap_or(Protocol::Udp))
}
