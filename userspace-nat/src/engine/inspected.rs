//! Inspected flows: what their packets lead to. [`crate::inspect`] says what is looked for.
//!
//! A flow that an inspect rule lets in opens with the verdict `Engine`, and a session beside it.
//! Each packet of its comes here, from either side, until the session lets the flow go to the
//! kernel or ends it. A flow that is held and has no session (its engine is gone) is ended: nobody
//! knows what went by.
//!
//! Books: what a session holds is dropped as [`DropReason::Held`]; what it sends to the server is
//! counted in the flow by the kernel, and what it sends to the guest as the engine's own.
use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{Command, DropReason, Ip4, PortHeader, Protocol, Refusal, Verdict};

use super::{
    core::{Core, VmState},
    dispatch::{Change, Finish, Job},
};
use crate::{
    datapath::Datapath,
    flow::EndReason,
    inspect::{
        HostName, Refused, RefusedCounts,
        tcp::{Fate, Outcome, Received, Segment, Session, Wire},
    },
    packet::{Packet, Transport, checksum::Sum, ipv4},
    port::{ETHERNET_LEN, ETHERTYPE_IPV4, Outbox, VirtioNetHdr},
    rules::{self, Http, LearntName},
    vm::VmNet,
};

/// Inspected flows of a VM at once.
pub(crate) const MAX_SESSIONS: usize = 4_096;
/// What is held for a VM at once, bytes.
pub(crate) const MAX_HELD: usize = 8 << 20;
/// Names that a connection named are remembered, so many.
const MAX_NAMED: usize = 16;

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Inspected {
    sessions: HashMap<u32, Box<Inspection>>,
    timers: BTreeSet<(u64, u32)>,
    vms: HashMap<u32, OfVm>,
}

#[derive(Debug)]
struct Inspection {
    generation: u32,
    vm: u32,
    due_ns: Option<u64>,
    held: usize,
    session: Session,
}

#[derive(Debug, Default)]
struct OfVm {
    sessions: usize,
    held: usize,
    counts: RefusedCounts,
}

impl Inspected {
    /// Whether a VM may have another session.
    fn has_room(&self, vm: u32) -> bool {
        let of_vm = self.vms.get(&vm);
        of_vm.is_none_or(|of_vm| of_vm.sessions < MAX_SESSIONS && of_vm.held < MAX_HELD)
    }

    /// What was refused of a VM's.
    pub(crate) fn counts(&self, vm: u32) -> RefusedCounts {
        self.vms
            .get(&vm)
            .map(|of_vm| of_vm.counts)
            .unwrap_or_default()
    }

    pub(crate) fn count(&mut self, vm: u32, why: Refused) {
        self.vms.entry(vm).or_default().counts.add(why);
    }

    fn add(&mut self, slot: u32, generation: u32, vm: u32, session: Session) {
        self.forget(slot);
        self.vms.entry(vm).or_default().sessions += 1;
        let inspection = Inspection {
            generation,
            vm,
            due_ns: None,
            held: 0,
            session,
        };
        self.put(slot, Box::new(inspection));
    }

    fn take(&mut self, slot: u32, generation: u32) -> Option<Box<Inspection>> {
        let inspection = self.sessions.get(&slot)?;
        if inspection.generation != generation {
            return None;
        }
        self.sessions.remove(&slot)
    }

    /// Brings a session back, with what changed in it.
    fn put(&mut self, slot: u32, mut inspection: Box<Inspection>) {
        let due_ns = inspection.session.due_ns();
        if due_ns != inspection.due_ns {
            if let Some(at) = std::mem::replace(&mut inspection.due_ns, due_ns) {
                self.timers.remove(&(at, slot));
            }
            self.timers.extend(due_ns.map(|at| (at, slot)));
        }
        let held = inspection.session.held();
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held = of_vm.held + held - inspection.held;
        }
        inspection.held = held;
        self.sessions.insert(slot, inspection);
    }

    /// Ends a session that is taken out.
    fn end(&mut self, slot: u32, inspection: &Inspection) {
        if let Some(at) = inspection.due_ns {
            self.timers.remove(&(at, slot));
        }
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held -= inspection.held;
            of_vm.sessions -= 1;
        }
    }

    /// A flow has ended, if this was its generation.
    pub(crate) fn flow_ended(&mut self, slot: u32, generation: u32) {
        if let Some(inspection) = self.take(slot, generation) {
            self.end(slot, &inspection);
        }
    }

    fn forget(&mut self, slot: u32) {
        if let Some(inspection) = self.sessions.remove(&slot) {
            self.end(slot, &inspection);
        }
    }

    /// A VM is gone; its flows are about to end.
    pub(crate) fn forget_vm(&mut self, vm: u32) {
        let of_vm =
            |(slot, inspection): (&u32, &Box<Inspection>)| (inspection.vm == vm).then_some(*slot);
        let slots: Vec<u32> = self.sessions.iter().filter_map(of_vm).collect();
        for slot in slots {
            self.forget(slot);
        }
        self.vms.remove(&vm);
    }

    /// When the next session's timer is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }
}

impl<D: Datapath> Core<D> {
    /// Whether a flow under an inspect rule may be opened for a packet.
    pub(crate) fn may_inspect(&mut self, vm: &VmState, packet: &Packet<'_>) -> bool {
        let why = match packet.transport {
            Transport::Tcp(_) if self.inspected.has_room(vm.net.id) => return true,
            Transport::Tcp(_) => Refused::Limit,
            _ => Refused::Unknown,
        };
        self.inspected.count(vm.net.id, why);
        false
    }

    /// A flow under an inspect rule was opened by a packet.
    pub(crate) fn begin_inspection(
        &mut self,
        vm: &VmState,
        packet: &Packet<'_>,
        slot: u32,
        http: Http,
        now_ns: u64,
    ) {
        let Transport::Tcp(tcp) = packet.transport else {
            return;
        };
        let generation = self.datapath.slot(slot).generation().load(Relaxed);
        let header = packet.ip.payload().get(..tcp.header_len);
        let mtu = self.uplink_mtu(slot);
        let session = Session::new(tcp.sequence, header.unwrap_or_default(), mtu, http, now_ns);
        self.inspected.add(slot, generation, vm.net.id, session);
    }

    /// A guest's packet of this flow. `None`: it goes on like any.
    pub(super) fn inspect_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Taken::NotHeld => return None,
            Taken::Ended => return Some(Finish::Drop(DropReason::Refused)),
            Taken::Inspection(inspection) => inspection,
        };
        let Transport::Tcp(tcp) = job.packet.transport else {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Refused));
        };
        if tcp.is_opening_syn() {
            self.inspected.put(slot, inspection);
            // RFC 7413's data would be there before anybody has looked at it.
            return (tcp.payload_len > 0).then_some(Finish::Drop(DropReason::Held));
        }
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let segment = Received::new(&tcp, job.packet.ip.payload());
        let more = inspection.session.held_with(&segment) - inspection.session.held();
        if more > 0 && self.inspected.held(vm.net.id) + more > MAX_HELD {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::EngineBusy));
        }
        let (fate, outcome) =
            self.with_session(vm, slot, now_ns, &mut inspection, |session, wire, may| {
                session.from_guest(&segment, wire, may, now_ns)
            });
        self.conclude(vm, slot, inspection, outcome, now_ns);
        match fate {
            Fate::Pass | Fate::PassAs { .. } => None,
            Fate::Held => Some(Finish::Drop(DropReason::Held)),
            Fate::Dropped => Some(Finish::Drop(DropReason::Refused)),
        }
    }

    /// The world's packet of this flow. `None`: it goes on like any.
    pub(super) fn inspect_from_world(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Option<Finish> {
        let mut inspection = match self.take_inspection(vm, slot, now_ns) {
            Taken::NotHeld => return None,
            Taken::Ended => return Some(Finish::Drop(DropReason::Refused)),
            Taken::Inspection(inspection) => inspection,
        };
        let Transport::Tcp(tcp) = job.packet.transport else {
            self.inspected.put(slot, inspection);
            return None;
        };
        if !is_intact(&job.packet, job.frame.vnet) {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Malformed));
        }
        let segment = Received::new(&tcp, job.packet.ip.payload());
        let (fate, outcome) =
            self.with_session(vm, slot, now_ns, &mut inspection, |session, wire, may| {
                session.from_server(&segment, wire, may, now_ns)
            });
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

    /// Does what is due.
    pub(crate) fn work_inspections(&mut self, now_ns: u64) {
        while let Some(&(at, slot)) = self.inspected.timers.first() {
            if at > now_ns {
                return;
            }
            let Some(mut inspection) = self.inspected.sessions.remove(&slot) else {
                self.inspected.timers.pop_first();
                continue;
            };
            let live = self.datapath.slot(slot);
            let row = live.vm_row() as u16;
            let same = live.generation().load(Relaxed) == inspection.generation;
            let vm = self.take_vm(row, inspection.vm).filter(|_| same);
            let Some(mut vm) = vm else {
                self.inspected.end(slot, &inspection);
                continue;
            };
            let outcome =
                self.with_session(&vm, slot, now_ns, &mut inspection, |session, wire, _| {
                    session.on_timer(wire, now_ns)
                });
            self.conclude(&mut vm, slot, inspection, outcome, now_ns);
            self.put_vm(vm);
        }
    }

    /// At the start: ends the flows that a predecessor inspected, for nobody knows what of them went
    /// by, and has the kernel carry what it held for other reasons. Returns how many of those that
    /// lived it ended.
    pub(super) fn end_uninspected(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        for slot in self.flows.all() {
            let live = self.datapath.slot(slot);
            let verdict = live.verdict().load(Relaxed);
            let (held, closing) = (
                verdict == Verdict::Engine as u32,
                verdict == Verdict::Closing as u32,
            );
            if !held && !closing {
                continue;
            }
            let rule = live.rule().checked_sub(self.rule_base).map(rules::RuleId);
            let is_inspected = {
                let judge = self.judge.borrow();
                let policy = judge.policy(live.vm());
                let by_rule = rule.filter(|rule| policy.has(*rule));
                // Its rule may have been another's: what may have been inspected was.
                policy.inspections().0 && by_rule.is_none_or(|rule| policy.inspects(rule))
            };
            if is_inspected {
                self.inspected.count(live.vm(), Refused::Lost);
                self.flows
                    .unlink(&mut self.datapath, slot, EndReason::Inspection, now_ns);
                ended += usize::from(held);
            } else if held {
                self.flows.release(&mut self.datapath, slot);
            }
        }
        ended
    }

    fn take_inspection(&mut self, vm: &VmState, slot: u32, now_ns: u64) -> Taken {
        let Some(entry) = self.flows.entry(slot).copied().filter(|e| e.is_held()) else {
            return Taken::NotHeld;
        };
        match self.inspected.take(slot, entry.generation) {
            Some(inspection) => Taken::Inspection(inspection),
            None => {
                self.end_inspected(vm, slot, Refused::Lost, now_ns);
                Taken::Ended
            }
        }
    }

    fn with_session<T>(
        &mut self,
        vm: &VmState,
        slot: u32,
        now_ns: u64,
        inspection: &mut Inspection,
        work: impl FnOnce(&mut Session, &mut dyn Wire, &mut May<'_>) -> T,
    ) -> T {
        let live = self.datapath.slot(slot);
        let tuple = live.guest_tuple();
        let to = rules::Destination {
            addr: tuple.remote.into(),
            port: tuple.remote_port,
            protocol: Protocol::from_ip(tuple.protocol).unwrap_or(Protocol::Tcp),
        };
        let (judge, id) = (&self.judge, vm.net.id);
        let mut opened_by = None;
        let mut may = |said: &HostName, named: &mut Vec<Rc<LearntName>>| {
            let text = said.name().without_dot();
            // What DNS told may be over by now; what was named once may be named again.
            let before = named.iter().find(|name| *name.name == *text).cloned();
            let name = before.or_else(|| judge.borrow().said(id, to, said.name(), now_ns).ok());
            let Some(name) = name else { return false };
            if !named.contains(&name) && named.len() < MAX_NAMED {
                named.push(name.clone());
            }
            opened_by = Some(name);
            true
        };
        let mut wire = Ends {
            out: &mut self.out,
            packet: &mut self.scratch,
            vm: &vm.net,
            guest: (tuple.local, tuple.local_port),
            server: (tuple.remote, tuple.remote_port),
            sent_to_server: 0,
        };
        let done = work(&mut inspection.session, &mut wire, &mut may);
        if let Some(name) = opened_by {
            self.opened_by.insert(slot, (inspection.generation, name));
        }
        done
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
                self.inspected.end(slot, &inspection);
                self.flows.release(&mut self.datapath, slot);
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
        self.flows
            .cut(&mut self.datapath, slot, EndReason::Inspection, now_ns);
    }
}

type May<'a> = dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool + 'a;

enum Taken {
    /// The flow is none of ours.
    NotHeld,
    /// It is held and nobody knows why: it was ended.
    Ended,
    Inspection(Box<Inspection>),
}

impl Inspected {
    /// Sessions, timers and bytes held.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> (usize, usize, usize) {
        let held = self.vms.values().map(|of_vm| of_vm.held).sum();
        (self.sessions.len(), self.timers.len(), held)
    }

    fn held(&self, vm: u32) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.held)
    }
}

/// Both ends of a connection.
struct Ends<'a> {
    out: &'a mut Outbox,
    packet: &'a mut Vec<u8>,
    vm: &'a VmNet,
    guest: (Ip4, u16),
    server: (Ip4, u16),
    sent_to_server: usize,
}

// A full outbox loses a segment like a link would; the timers and the guest send again.
impl Wire for Ends<'_> {
    fn to_server(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.guest, self.server);
        let header = PortHeader {
            code: Command::Forward as u8,
            flags: 0,
            vm_row: self.vm.row,
            id: self.vm.id,
        };
        let vnet = VirtioNetHdr::default();
        let _ = self.out.push(header, ETHERTYPE_IPV4, vnet, self.packet);
        self.sent_to_server += 1;
    }

    fn to_guest(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.server, self.guest);
        let vnet = VirtioNetHdr::default();
        let _ = self
            .out
            .to_guest(self.vm, ETHERTYPE_IPV4, vnet, self.packet);
    }

    fn sent_to_server(&self) -> usize {
        self.sent_to_server
    }
}

/// Whether a TCP segment's checksum is right, or what is there of a partial one is and it lies where
/// whoever completes it looks for it.
fn is_intact(packet: &Packet<'_>, vnet: VirtioNetHdr) -> bool {
    const CHECKSUM_AT: usize = 16;
    let l4 = packet.ip.payload();
    let pseudo = Sum::default().pseudo(
        packet.ip.source,
        packet.ip.destination,
        packet.ip.protocol,
        l4.len(),
    );
    if !vnet.needs_csum() {
        return pseudo.bytes(l4).finish() == 0;
    }
    let place = usize::from(vnet.csum_start) == ETHERNET_LEN + ipv4::HEADER_LEN
        && usize::from(vnet.csum_offset) == CHECKSUM_AT;
    let Some(field) = l4.get(CHECKSUM_AT..CHECKSUM_AT + 2) else {
        return false;
    };
    // All ones and zero are the same number.
    let field = u16::from_be_bytes([field[0], field[1]]);
    place && field % 0xffff == pseudo.folded() % 0xffff
}
