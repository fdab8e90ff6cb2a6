//! Inspected flows: what their packets lead to. [`crate::inspection`] says what is looked for.
//!
//! A flow that an inspect rule lets in opens with the verdict `Engine`, and a session beside it.
//! Each packet of its comes here, from either side, until the session lets the flow go to the
//! kernel or ends it. A flow of such a rule that is held and has no session (its engine is gone) is
//! ended: nobody knows what went by.
//!
//! Books: what a session of TCP holds is dropped as [`DropReason::Held`]; what it sends to the server is
//! counted in the flow by the kernel, and what it sends to the guest as the engine's own. A
//! datagram that waits is counted when it goes on, in the flow, or when it does not, as dropped.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Command, DropReason, Refusal, Verdict};

use crate::{
    datapath::Datapath,
    flow::{self, EndReason},
    inspection::{
        Refused,
        quic::Effort,
        sessions::{Inspection, Kind, MAX_HELD},
        tcp::{Fate, Outcome, Received},
    },
    packet::Transport,
    packet_path::{Finish, Job, change::Change},
    state::{Core, VmState},
};

mod intact;
mod naming;
mod quic_flow;
mod wire;

use intact::is_intact;
use quic_flow::datagrams;

impl<D: Datapath> Core<D> {
    /// A guest's packet of this flow. `None`: it goes on like any.
    pub(crate) fn inspect_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Ok(inspection) => inspection,
            Err(finish) => return finish,
        };
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let Transport::Tcp(tcp) = job.packet.transport else {
            return self.quic_from_guest(vm, job, slot, inspection, now_ns);
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

    /// The world's packet of this flow. `None`: it goes on like any.
    pub(crate) fn inspect_from_world(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
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
            } => Some(Finish::Command {
                code: Command::Deliver,
                change: Change::receiver(&job, acknowledgement, window),
            }),
            Fate::Held | Fate::Dropped => Some(Finish::Drop(DropReason::Refused)),
        }
    }

    /// Does what is due, as far as there is room for what is sent; whether that was all.
    pub(crate) fn work_inspections(&mut self, now_ns: u64) -> bool {
        while let Some(&(at, slot)) = self.inspected.timers.first() {
            if at > now_ns {
                break;
            }
            if self.out.is_half_full() {
                return false;
            }
            let Some(mut inspection) = self.inspected.sessions.remove(&slot) else {
                self.inspected.timers.pop_first();
                continue;
            };
            let live = self.datapath.slot(slot);
            let row = live.vm_row() as u16;
            // What it sends goes to whatever flow has the tuple: only while that is its own, and one
            // that may go on.
            let entry = self.flows.entry(slot);
            let same = entry.is_some_and(|entry| {
                entry.generation == inspection.generation && entry.state.is_linked()
            });
            let goes_on = same && !self.flows.is_cut(slot);
            if goes_on && flow::is_frozen(&self.datapath, row) {
                inspection.kind.begin_timers(now_ns);
                self.inspected.put(slot, inspection);
                continue;
            }
            let Some(mut vm) = goes_on.then(|| self.take_vm(row, inspection.vm)).flatten() else {
                self.inspected.end(slot, &inspection);
                continue;
            };
            let done = self.with_session(&vm, slot, now_ns, &mut inspection, |session, wire, _| {
                session.on_timer(wire, now_ns)
            });
            // The only timer of QUIC is that of a hello that is not whole.
            let outcome = done.unwrap_or(Outcome::Refused(Refused::Slow));
            self.conclude(&mut vm, slot, inspection, outcome, now_ns);
            self.put_vm(vm);
        }
        true
    }

    /// At the start: ends the flows that a predecessor inspected, for nobody knows what of them went
    /// by. Returns how many of those that lived it ended.
    pub(crate) fn end_uninspected(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        for slot in self.flows.all() {
            let verdict = self.datapath.slot(slot).verdict().load(Relaxed);
            // One that was captured only had been let go before.
            let held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
            // One that was about to end may have been held before.
            let may_be_held = held || verdict == Verdict::Closing as u32;
            if may_be_held && self.has_inspect_rule(slot) {
                let vm = self.datapath.slot(slot).vm();
                self.inspected.count(vm, Refused::Lost);
                self.flows
                    .unlink(&mut self.datapath, slot, EndReason::Inspection, now_ns);
                ended += usize::from(held);
            }
        }
        ended
    }

    /// Takes out a flow's inspection, for the time of a packet. Else what becomes of the packet:
    /// `None` where the flow is none of ours; one that is held and nobody knows why is ended.
    fn take_inspection(
        &mut self,
        vm: &VmState,
        slot: u32,
        now_ns: u64,
    ) -> Result<Box<Inspection>, Option<Finish>> {
        let held = self.flows.entry(slot).copied().filter(|e| e.is_held());
        let entry = held.ok_or(None)?;
        match self.inspected.take(slot, entry.generation) {
            Some(inspection) => Ok(inspection),
            None if !self.has_inspect_rule(slot) => Err(None),
            None => {
                self.end_inspected(vm, slot, Refused::Lost, now_ns);
                Err(Some(Finish::Drop(DropReason::Refused)))
            }
        }
    }

    fn conclude(
        &mut self,
        vm: &mut VmState,
        slot: u32,
        inspection: Box<Inspection>,
        outcome: Outcome,
        now_ns: u64,
    ) {
        match outcome {
            Outcome::Goes => self.inspected.put(slot, inspection),
            Outcome::Released => {
                if let Kind::Tcp(session) = &inspection.kind {
                    let live = self.datapath.slot(slot);
                    let sequences = self.datapath.sequences(slot);
                    sequences.hold(live, session.sequences(now_ns));
                }
                self.inspected.end(slot, &inspection);
                self.flows.release(&mut self.datapath, slot);
            }
            Outcome::Reset => {
                self.inspected.end(slot, &inspection);
                let reason = EndReason::ResetForGood;
                self.flows.cut(&mut self.datapath, slot, reason, now_ns);
            }
            Outcome::Refused(why) => {
                self.inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
            }
        }
    }

    fn end_inspected(&mut self, vm: &VmState, slot: u32, why: Refused, now_ns: u64) {
        let rule = self.datapath.slot(slot).rule();
        vm.net.stats.refused(Refusal::Inspection);
        vm.net.stats.refused_by(rule);
        self.inspected.count(vm.net.id, why);
        let tuple = self.datapath.slot(slot).guest_tuple();
        self.refusals
            .note(vm.net.id, why.name(), Some(rule), &tuple, now_ns);
        self.flows
            .cut(&mut self.datapath, slot, EndReason::Inspection, now_ns);
    }
}
