//! All inspection sessions, their timers, and their limits per VM.
use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
};

use slipgate_abi::{DropReason, Protocol, SlotIndex, VmId, segment::Segments};
use slipgate_policy::Http;

use crate::{
    inspection::{
        Refused, RefusedCounts, quic,
        tcp::{SLOW_NS, Session},
    },
    mss,
    name_gate::LearntName,
    packet::{Ip, Packet, Transport, Version},
    port::{VirtioNetHdr, single},
    stats::VmStats,
    vm::VmNet,
};

/// Most inspected flows of a VM at once.
pub(crate) const MAX_SESSIONS: usize = 4_096;
/// Most memory held for a VM's sessions at once, bytes.
pub(crate) const MAX_HELD: usize = 8 << 20;
/// All sessions of all VMs.
#[derive(Debug, Default)]
pub(crate) struct Inspected {
    pub(crate) sessions: HashMap<SlotIndex, Box<Inspection>>,
    pub(crate) timers: BTreeSet<(u64, SlotIndex)>,
    pub(crate) vms: HashMap<VmId, OfVm>,
}

#[derive(Debug)]
pub(crate) struct Inspection {
    pub(crate) generation: u32,
    pub(crate) vm: VmId,
    pub(crate) stats: VmStats,
    pub(crate) due_ns: Option<u64>,
    pub(crate) held: usize,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Tcp(Box<Session>),
    Quic {
        flow: quic::Flow,
        /// Time by which waiting data must be complete, ns.
        ends_ns: Option<u64>,
        named: Vec<Rc<LearntName>>,
    },
}

impl Kind {
    /// Begins the inspection of a flow that a packet opens. `mtus`: the largest packets that its
    /// uplink carries, and that its whole path does, bytes.
    pub(crate) fn begin(packet: &Packet<'_>, mtus: (u32, u32), http: Http, now_ns: u64) -> Self {
        match packet.transport {
            Transport::Tcp(tcp) => {
                let header = packet.ip.payload().get(..tcp.header_len);
                let header = header.unwrap_or_default();
                let mss = |mtu| mss::for_mtu(packet.ip.version(), mtu);
                let mss = (mss(mtus.0), mss(mtus.1));
                let session = Session::new(tcp.sequence, header, mss, http, now_ns);
                Self::Tcp(Box::new(session))
            }
            _ => Self::Quic {
                flow: quic::Flow::default(),
                ends_ns: None,
                named: Vec::new(),
            },
        }
    }

    pub(crate) fn due_ns(&self) -> Option<u64> {
        match self {
            Self::Tcp(session) => session.due_ns(),
            Self::Quic { ends_ns, .. } => *ends_ns,
        }
    }

    pub(crate) fn held(&self) -> usize {
        match self {
            Self::Tcp(session) => session.held(),
            Self::Quic { flow, .. } => flow.held(),
        }
    }

    fn is_admitted(&self) -> bool {
        match self {
            Self::Tcp(session) => session.is_admitted(),
            Self::Quic { flow, .. } => flow.is_open(),
        }
    }

    pub(crate) fn begin_timers(&mut self, now_ns: u64) {
        match self {
            Self::Tcp(session) => session.begin_timers(now_ns),
            Self::Quic { ends_ns, .. } => *ends_ns = ends_ns.map(|_| now_ns + SLOW_NS),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct OfVm {
    sessions: usize,
    held: usize,
    counts: RefusedCounts,
    /// Work for QUIC packets of the guest; `of_servers` is that for packets of its servers.
    pub(crate) of_guest: quic::Allowance,
    pub(crate) of_servers: quic::Allowance,
}

impl Inspected {
    /// Reason for which a VM may not have another session of this protocol; `None` if it may.
    pub(crate) fn refuses(&self, vm: VmId, protocol: Protocol) -> Option<Refused> {
        let is_full = |of_vm: &OfVm| of_vm.sessions >= MAX_SESSIONS || of_vm.held >= MAX_HELD;
        match protocol {
            Protocol::Icmp | Protocol::Icmpv6 => Some(Refused::Unknown),
            Protocol::Tcp | Protocol::Udp => {
                let is_full = self.vms.get(&vm).is_some_and(is_full);
                is_full.then_some(Refused::Limit)
            }
        }
    }

    /// Counters of a VM's refusals.
    pub(crate) fn counts(&self, vm: VmId) -> RefusedCounts {
        let of_vm = self.vms.get(&vm);
        of_vm.map(|of_vm| of_vm.counts).unwrap_or_default()
    }

    pub(crate) fn count(&mut self, vm: VmId, why: Refused) {
        self.of_vm(vm).counts.add(why);
    }

    pub(crate) fn of_vm(&mut self, vm: VmId) -> &mut OfVm {
        self.vms.entry(vm).or_default()
    }

    pub(crate) fn add(&mut self, slot: SlotIndex, generation: u32, vm: &VmNet, kind: Kind) {
        self.forget(slot);
        self.of_vm(vm.id).sessions += 1;
        let inspection = Inspection {
            generation,
            vm: vm.id,
            stats: vm.stats,
            due_ns: None,
            held: 0,
            kind,
        };
        self.put(slot, Box::new(inspection));
    }

    pub(crate) fn take(&mut self, slot: SlotIndex, generation: u32) -> Option<Box<Inspection>> {
        let inspection = self.sessions.get(&slot)?;
        if inspection.generation != generation {
            return None;
        }
        self.sessions.remove(&slot)
    }

    /// Puts a session back after a step, with its changes.
    pub(crate) fn put(&mut self, slot: SlotIndex, mut inspection: Box<Inspection>) {
        let due_ns = inspection.kind.due_ns();
        if due_ns != inspection.due_ns {
            if let Some(at) = std::mem::replace(&mut inspection.due_ns, due_ns) {
                self.timers.remove(&(at, slot));
            }
            self.timers.extend(due_ns.map(|at| (at, slot)));
        }
        let held = inspection.kind.held();
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held = of_vm.held + held - inspection.held;
        }
        inspection.held = held;
        self.sessions.insert(slot, inspection);
    }

    /// Ends a session that was taken out.
    pub(crate) fn end(&mut self, slot: SlotIndex, inspection: &Inspection) {
        if let Kind::Quic { flow, .. } = &inspection.kind {
            for (vnet, l3) in flow.waiting() {
                let segments = held_segments(*vnet, l3);
                inspection.stats.dropped(DropReason::Refused, segments);
            }
        }
        if let Some(at) = inspection.due_ns {
            self.timers.remove(&(at, slot));
        }
        if let Some(of_vm) = self.vms.get_mut(&inspection.vm) {
            of_vm.held -= inspection.held;
            of_vm.sessions -= 1;
        }
    }

    /// Ends the session of a flow that has ended, if the generation is the flow's.
    pub(crate) fn flow_ended(&mut self, slot: SlotIndex, generation: u32) {
        if let Some(inspection) = self.take(slot, generation) {
            self.end(slot, &inspection);
        }
    }

    pub(crate) fn forget(&mut self, slot: SlotIndex) {
        if let Some(inspection) = self.sessions.remove(&slot) {
            self.end(slot, &inspection);
        }
    }

    fn slots_of(&self, vm: VmId) -> Vec<SlotIndex> {
        let of_vm = self.sessions.iter().filter(|(_, session)| session.vm == vm);
        of_vm.map(|(slot, _)| *slot).collect()
    }

    /// Ends the sessions of a VM that is gone; its flows are about to end.
    pub(crate) fn forget_vm(&mut self, vm: VmId) {
        for slot in self.slots_of(vm) {
            self.forget(slot);
        }
        self.vms.remove(&vm);
    }

    /// Whether a flow has a session that has admitted a name.
    pub(crate) fn is_admitted(&self, slot: SlotIndex, generation: u32) -> bool {
        let inspection = self.sessions.get(&slot);
        inspection.is_some_and(|i| i.generation == generation && i.kind.is_admitted())
    }

    /// Adopts a path MTU, bytes, that a router on a flow's path reported.
    pub(crate) fn path_carries(
        &mut self,
        slot: SlotIndex,
        generation: u32,
        (version, mtu): (Version, u32),
    ) {
        if let Some(inspection) = self.sessions.get_mut(&slot)
            && inspection.generation == generation
            && let Kind::Tcp(session) = &mut inspection.kind
        {
            session.path_carries(mss::for_mtu(version, mtu));
        }
    }

    /// Starts a VM's timers again before it is thawed, because it could not send meanwhile.
    pub(crate) fn begin_timers(&mut self, vm: VmId, now_ns: u64) {
        for slot in self.slots_of(vm) {
            if let Some(mut inspection) = self.sessions.remove(&slot) {
                inspection.kind.begin_timers(now_ns);
                self.put(slot, inspection);
            }
        }
    }

    /// Time at which the next session's timer is due, ns; `None` if none is set.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Number of sessions, number of timers, and bytes held.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> (usize, usize, usize) {
        let held = self.vms.values().map(|of_vm| of_vm.held).sum();
        (self.sessions.len(), self.timers.len(), held)
    }

    pub(crate) fn held(&self, vm: VmId) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.held)
    }
}

/// Packets and bytes of a held packet after segmentation.
pub(crate) fn held_segments(vnet: VirtioNetHdr, l3: &[u8]) -> Segments {
    let packet = Ip::parse(l3).and_then(Packet::parse);
    packet.map_or(single(l3.len()), |packet| packet.segments(vnet))
}
