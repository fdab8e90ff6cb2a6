//! Packets of inspected flows. [`crate::inspection`] describes the inspection itself.
//!
//! A flow that an inspect rule admits is opened with the verdict `Engine`, and a session beside it.
//! Each of its packets comes here, from either side, until the session releases the flow to the
//! kernel or ends it. A flow of such a rule that is held and has no session (its engine is gone) is
//! ended: its earlier content is unknown.
//!
//! Counters: packets that a session of TCP holds are dropped as [`DropReason::Held`]. Packets that
//! it sends to the server are counted in the flow by the kernel, and packets that it sends to the
//! guest as the engine's own. A datagram that waits is counted when it is sent on, in the flow, or
//! when it is not, as dropped.
use std::{rc::Rc, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Command, DropReason, Refusal, SlotIndex, Verdict};

use crate::{
    datapath::Datapath,
    flow::{self, EndReason},
    inspection::{
        HostName, Refused,
        quic::{Effort, Passage},
        sessions::{Inspection, Kind, MAX_HELD, held_segments},
        tcp::{Fate, Outcome, Received, Session, Wire},
    },
    name_gate::LearntName,
    packet::{Transport, icmp::Unreachable},
    packet_path::{Disposition, Finish, Job, change::Change, done, job::read},
    port::{Frame, L3_AT, OutboxFull, Side},
    reply::IcmpError,
    state::{Core, Nat, VmState},
};

mod naming;
mod quic_flow;
mod wire;

use naming::{Naming, destination};
use quic_flow::datagrams;
use wire::{Ends, is_intact};

/// Judge of the names that a session finds, given those that the connection has named before.
type MayName<'a> = dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool + 'a;

impl<D: Datapath> Core<D> {
    /// Inspects a guest's packet of a flow. Returns `None` when it passes like any other.
    pub(crate) fn inspect_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
    ) -> Option<Finish> {
        let now_ns = job.now_ns;
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Ok(inspection) => inspection,
            Err(finish) => return finish,
        };
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let Transport::Tcp(tcp) = job.packet.transport else {
            return self.quic_from_guest(vm, job, slot, inspection);
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

    /// Inspects a packet of a flow from the world. Returns `None` when it passes like any other.
    pub(crate) fn inspect_from_world(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
    ) -> Option<Finish> {
        let now_ns = job.now_ns;
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Ok(inspection) => inspection,
            Err(finish) => return finish,
        };
        let Transport::Tcp(tcp) = job.packet.transport else {
            if let Kind::Quic { flow, .. } = &mut inspection.kind {
                let allowance = &mut self.inspected.of_vm(vm.net.id).of_servers;
                let mut effort = Effort::new(allowance, now_ns);
                datagrams(&job).for_each(|datagram| flow.server_datagram(datagram, &mut effort));
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
            } => {
                let change = Change::receiver(&job, acknowledgement, window);
                Some(match job.fragment_size {
                    None => Finish::Command {
                        code: Command::Deliver,
                        change,
                    },
                    Some(_) => self.deliver_in_fragments(vm, job, slot, change),
                })
            }
            Fate::Held | Fate::Dropped => Some(Finish::Drop(DropReason::Refused)),
        }
    }

    /// Delivers a packet of the server's that came in fragments, changed, in such fragments.
    fn deliver_in_fragments(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
        change: Option<Change>,
    ) -> Finish {
        let mut bytes = vec![0; L3_AT];
        bytes.extend_from_slice(job.frame.l3);
        if let Some(change) = change {
            change.apply(&mut bytes);
        }
        let frame = Frame {
            l3: &bytes[L3_AT..],
            ..job.frame
        };
        let Ok(packet) = read(frame) else {
            return Finish::Drop(DropReason::Malformed);
        };
        let job = Job {
            frame,
            packet,
            fragment_size: job.fragment_size,
            poller: job.poller,
            now_ns: job.now_ns,
        };
        done(self.nat.too_big_from_world(vm, job, slot, &mut self.out))
    }

    /// Inspects a guest's UDP frame of a flow that must be QUIC. Returns `None` when it passes.
    fn quic_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
        mut inspection: Box<Inspection>,
    ) -> Option<Finish> {
        let now_ns = job.now_ns;
        let to = destination(&self.nat.datapath.guest_tuple(slot));
        let (rules, inspected) = (&mut self.rules, &mut self.inspected);
        let outcome =
            quic_flow::inspect(rules, inspected, &mut inspection, (slot, to), &job, now_ns);
        let Some(outcome) = outcome else {
            inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Refused));
        };
        let queue = &mut self.out.queue;
        for (vnet, l3) in &outcome.released {
            if let Err(OutboxFull) = queue.as_guest(&vm.net, *vnet, l3) {
                let lost = held_segments(*vnet, l3);
                vm.net.stats.dropped(DropReason::EngineBusy, lost);
            }
        }
        let passage = match outcome.passage {
            Ok(passage) => passage,
            Err(why) => {
                inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
                let error = IcmpError::Unreachable(Unreachable::Prohibited);
                let queue = &mut self.out.queue;
                vm.answers
                    .icmp(&vm.net, Side::Guest, &job.packet, error, queue, now_ns);
                return Some(Finish::Drop(DropReason::Refused));
            }
        };
        inspected.put(slot, inspection);
        match passage {
            // Behind the held datagrams, which are written at the end of the batch.
            Passage::Goes if !outcome.released.is_empty() => {
                let (vnet, l3) = (job.frame.vnet, job.packet.ip.bytes);
                match queue.as_guest(&vm.net, vnet, l3) {
                    Ok(()) => Some(Finish::Dispose(Disposition::Consumed)),
                    Err(OutboxFull) => Some(Finish::Drop(DropReason::EngineBusy)),
                }
            }
            Passage::Goes => None,
            Passage::Held => Some(Finish::Dispose(Disposition::Consumed)),
            Passage::Dropped | Passage::Unread => Some(Finish::Drop(match outcome.is_busy {
                true => DropReason::EngineBusy,
                false => DropReason::Malformed,
            })),
        }
    }

    /// Handles the sessions' expired timers, as far as the outbox has room. Returns whether all
    /// were handled.
    pub(crate) fn work_inspections(&mut self, now_ns: u64) -> bool {
        while let Some(&(at, slot)) = self.inspected.timers.first() {
            if at > now_ns {
                break;
            }
            if self.out.queue.is_half_full() {
                return false;
            }
            let Some(mut inspection) = self.inspected.sessions.remove(&slot) else {
                self.inspected.timers.pop_first();
                continue;
            };
            let live = self.nat.datapath.slot(slot);
            let row = live.row();
            // The segments of a session go to the flow that has its tuple: only while that is its
            // own, and not denied.
            let entry = self.nat.flows.entry(slot);
            let same = entry.is_some_and(|entry| {
                entry.generation == inspection.generation && entry.state.is_linked()
            });
            let goes_on = same && !self.nat.flows.is_cut(slot);
            if goes_on && flow::is_paused(&self.nat.datapath, row) {
                inspection.kind.begin_timers(now_ns);
                self.inspected.put(slot, inspection);
                continue;
            }
            let Some(mut vm) = goes_on.then(|| self.vms.take(row, inspection.vm)).flatten() else {
                self.inspected.end(slot, &inspection);
                continue;
            };
            let done = self.with_session(&vm, slot, now_ns, &mut inspection, |session, wire, _| {
                session.on_timer(wire, now_ns)
            });
            // The only timer of QUIC is that of an incomplete hello.
            let outcome = done.unwrap_or(Outcome::Refused(Refused::Slow));
            self.conclude(&mut vm, slot, inspection, outcome, now_ns);
            self.vms.put(vm);
        }
        true
    }

    /// Ends a flow that was just adopted if a predecessor inspected it, since its earlier content
    /// is unknown. Returns whether it was live.
    pub(crate) fn end_if_uninspected(&mut self, slot: SlotIndex, now_ns: u64) -> bool {
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        let live = datapath.slot(slot);
        // A flow that was only captured had been released before.
        let is_held = flows.entry(slot).is_some_and(|entry| entry.is_held());
        // A flow that was about to end may have been held before.
        let may_be_held = is_held || live.verdict().load(Relaxed) == Verdict::Closing as u32;
        if !may_be_held || !self.rules.has_inspect_rule(live) {
            return false;
        }
        self.inspected.count(live.id(), Refused::Lost);
        flows.unlink(datapath, slot, EndReason::Inspection, now_ns);
        is_held
    }

    /// Takes out a flow's inspection while a packet is handled.
    ///
    /// # Errors
    /// Returns what to do with the packet when there is no inspection: `None` when the flow is not
    /// inspected. A held flow whose session is lost is ended.
    fn take_inspection(
        &mut self,
        vm: &VmState,
        slot: SlotIndex,
        now_ns: u64,
    ) -> Result<Box<Inspection>, Option<Finish>> {
        let held = self.nat.flows.entry(slot).copied().filter(|e| e.is_held());
        let entry = held.ok_or(None)?;
        match self.inspected.take(slot, entry.generation) {
            Some(inspection) => Ok(inspection),
            None if !self.rules.has_inspect_rule(self.nat.datapath.slot(slot)) => Err(None),
            None => {
                self.end_inspected(vm, slot, Refused::Lost, now_ns);
                Err(Some(Finish::Drop(DropReason::Refused)))
            }
        }
    }

    /// Runs `work` on a TCP session. Returns `None` when the inspection is not one of TCP.
    fn with_session<T>(
        &mut self,
        vm: &VmState,
        slot: SlotIndex,
        now_ns: u64,
        inspection: &mut Inspection,
        work: impl FnOnce(&mut Session, &mut dyn Wire, &mut MayName<'_>) -> T,
    ) -> Option<T> {
        let Kind::Tcp(session) = &mut inspection.kind else {
            return None;
        };
        let tuple = self.nat.datapath.guest_tuple(slot);
        let mut by = Naming::new(&self.rules.judge, vm.net.id, destination(&tuple), now_ns);
        let mut may = |name: &HostName, named: &mut Vec<Rc<LearntName>>| by.may(name, named);
        let mut wire = Ends::new(&vm.net, &tuple, &mut self.out);
        let done = work(session, &mut wire, &mut may);
        if let Some(name) = by.last {
            self.rules.opened_by(slot, inspection.generation, name);
        }
        Some(done)
    }

    fn conclude(
        &mut self,
        vm: &mut VmState,
        slot: SlotIndex,
        inspection: Box<Inspection>,
        outcome: Outcome,
        now_ns: u64,
    ) {
        match outcome {
            Outcome::Goes => self.inspected.put(slot, inspection),
            Outcome::Released => {
                if let Kind::Tcp(session) = &inspection.kind {
                    let live = self.nat.datapath.slot(slot);
                    let sequences = self.nat.datapath.sequences(slot);
                    sequences.hold(live, session.sequences(now_ns));
                }
                self.inspected.end(slot, &inspection);
                self.nat.flows.release(&mut self.nat.datapath, slot);
            }
            Outcome::Reset => {
                self.inspected.end(slot, &inspection);
                let reason = EndReason::ResetForGood;
                self.nat
                    .flows
                    .cut(&mut self.nat.datapath, slot, reason, now_ns);
            }
            Outcome::Refused(why) => {
                self.inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
            }
        }
    }

    fn end_inspected(&mut self, vm: &VmState, slot: SlotIndex, why: Refused, now_ns: u64) {
        let rule = self.nat.datapath.slot(slot).rule_index();
        vm.net.stats.refused(Refusal::Inspection);
        vm.net.stats.refused_by(rule);
        self.inspected.count(vm.net.id, why);
        let tuple = self.nat.datapath.guest_tuple(slot);
        let refusals = &mut self.journal.refusals;
        refusals.note(vm.net.id, why.name(), Some(rule), &tuple, now_ns);
        self.nat
            .flows
            .cut(&mut self.nat.datapath, slot, EndReason::Inspection, now_ns);
    }
}
