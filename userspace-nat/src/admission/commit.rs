//! Doing what a plan says: opening the flow, or counting the refusal.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Protocol, Refusal, Tuple, Verdict};

use super::{
    Opener, Refused,
    plan::{Path, Plan},
};
use crate::{
    datapath::Datapath,
    flow::{NewFlow, OpenError},
    nat_ports::{Destination, Freed, PortPool},
    packet::{
        Packet, Transport,
        transport::{OPTION_TIMESTAMPS, tcp_options},
    },
    relay::Opening,
    state::{Core, VmState},
    stats::Tally,
};

/// Ports to try when others have the translated tuple in the kernel.
const PORT_TRIES: usize = 8;
/// Of these, before what is kept for our process is tried.
const COMMON_PORT_TRIES: usize = 4;

impl<D: Datapath> Core<D> {
    /// Opens a flow of a guest's as planned; its slot.
    pub(super) fn commit_outbound(
        &mut self,
        vm: &mut VmState,
        plan: Plan,
        packet: &Packet<'_>,
        (guest, isn): (Tuple, u32),
        now_ns: u64,
    ) -> Result<u32, Refused> {
        let protocol = Protocol::from_ip(guest.protocol).ok_or(Refusal::Insertion)?;
        self.take_room(vm, &plan, protocol, now_ns)?;
        let hop = plan.route.and_then(|route| route.hop());
        let (hop, source) = hop.ok_or(Refusal::NoRoute)?;
        let is_inspected = plan.path == Path::Inspected;
        let flow = NewFlow {
            guest,
            vm_row: vm.net.row,
            protocol,
            nat: source.into(),
            nat_port: 0,
            rule: self.rule_base + plan.decision.rule.0,
            uplink_ifindex: hop.ifindex,
            next_hop: self.next_hop(hop, guest.remote),
            isn,
            inbound: false,
            verdict: if is_inspected {
                Verdict::Engine
            } else {
                Verdict::Fast
            },
        };
        if let Some(refused) = plan.refused {
            if let Some(look) = &plan.port {
                let to = toward(&flow);
                self.flows
                    .look_was_in_vain(&mut self.datapath, to, look, now_ns);
            }
            return Err(refused);
        }
        let opened = self.open_with_port(flow, has_timestamps(packet), now_ns);
        if let (Ok(slot), true) = (&opened, is_inspected) {
            let http = self
                .judge
                .borrow()
                .policy(vm.net.id)
                .http(plan.decision.rule);
            self.begin_inspection(vm, packet, *slot, http, now_ns);
        }
        if let (Ok(slot), Some(name)) = (&opened, plan.name) {
            let generation = self.datapath.slot(*slot).generation().load(Relaxed);
            self.opened_by.insert(*slot, (generation, name));
        }
        Ok(self.settle(vm, opened, now_ns)?)
    }

    /// Makes room as planned for a connection to the host's loopback.
    pub(super) fn commit_to_loopback(
        &mut self,
        vm: &mut VmState,
        plan: Plan,
        protocol: Protocol,
        now_ns: u64,
    ) -> Result<Opening, Refused> {
        self.take_room(vm, &plan, protocol, now_ns)?;
        match plan.path {
            Path::Relayed(lead) => Ok(Opening {
                host_port: lead.host_port,
                rule: lead.text.into(),
            }),
            Path::Translated | Path::Inspected => Err(Refusal::Insertion.into()),
        }
    }

    /// Takes the room that was planned for a flow. What was refused before that mattered is counted.
    fn take_room(
        &mut self,
        vm: &mut VmState,
        plan: &Plan,
        protocol: Protocol,
        now_ns: u64,
    ) -> Result<(), Refused> {
        if let Some(room) = &plan.room {
            return Ok(self.charge(vm, room, Opener::Guest, now_ns)?);
        }
        let refused = plan.refused.ok_or(Refusal::Insertion)?;
        if let Some(rule) = refused.rule {
            vm.net.stats.refused_by(rule);
        }
        if refused.reason == Refusal::Inspection
            && let Some(why) = self.inspected.refuses(vm.net.id, protocol)
        {
            self.inspected.count(vm.net.id, why);
        }
        Err(refused)
    }

    /// Opens a flow by a port of its own.
    fn open_with_port(
        &mut self,
        mut flow: NewFlow,
        timestamps: bool,
        now_ns: u64,
    ) -> Result<u32, Refusal> {
        let (to, vm) = (toward(&flow), flow.guest.scope);
        let mut swept = false;
        for tried in 0..PORT_TRIES {
            let ports = &mut self.flows.ports;
            let common = |ports: &mut PortPool| ports.pick(to, vm, timestamps, now_ns);
            let mut port = match tried {
                ..COMMON_PORT_TRIES => common(ports).or_else(|| ports.pick_kept(to, vm)),
                _ => ports.pick_kept(to, vm).or_else(|| common(ports)),
            };
            if port.is_none() {
                let reclaimed = self.flows.reclaim_port(&mut self.datapath, to, vm, now_ns);
                port = reclaimed.or_else(|| common(&mut self.flows.ports));
            }
            let port = port.ok_or(Refusal::PortsExhausted)?;
            flow.nat_port = port;
            let refusal = match self.flows.open(&mut self.datapath, &flow, now_ns) {
                Ok(slot) => return Ok(slot),
                Err(OpenError::WorldTaken) => {
                    // Another process has it; try again no sooner than if it had just ended.
                    self.flows.ports.free(to, port, vm, Freed::Taken, now_ns);
                    continue;
                }
                Err(OpenError::GuestTaken) if !swept && self.sweep(&flow.guest) => {
                    swept = true;
                    self.flows.ports.put_back(to, port, vm);
                    continue;
                }
                Err(OpenError::NoSlot) => {
                    // For the next: a slot rests.
                    let (flows, row) = (&mut self.flows, flow.vm_row);
                    let found = flows.look_for_room(&self.datapath, row, false, now_ns);
                    flows.make_room(&mut self.datapath, &found, now_ns);
                    Refusal::TableFull
                }
                Err(OpenError::MapFull) => Refusal::TableFull,
                Err(OpenError::GuestTaken | OpenError::Kernel(_)) => Refusal::Insertion,
            };
            self.flows.ports.put_back(to, port, vm);
            return Err(refusal);
        }
        Err(Refusal::PortsExhausted)
    }

    /// Deletes a tuple that no flow of ours has, although its scope is ours: a deletion failed
    /// once. Returns whether it is gone.
    fn sweep(&mut self, tuple: &Tuple) -> bool {
        self.flows.by_guest(tuple).is_none() && self.datapath.remove(tuple).unwrap_or(false)
    }

    /// Counts an admission, and remembers it for the records.
    pub(super) fn settle(
        &mut self,
        vm: &VmState,
        opened: Result<u32, Refusal>,
        now_ns: u64,
    ) -> Result<u32, Refusal> {
        if opened == Err(Refusal::TableFull)
            && let Some(slot) = self
                .flows
                .oldest_unproven(&self.datapath, vm.net.row, now_ns)
        {
            // Its slot may be taken in a second, when who was refused asks again.
            self.flows.end_unproven(&mut self.datapath, slot, now_ns);
        }
        if let Ok(slot) = opened {
            vm.net.stats.tally(Tally::Admitted, 1);
            if vm.is_captured {
                self.flows.capture(&mut self.datapath, slot, true);
            }
            if self.records_starts {
                self.started.push(slot);
            }
        }
        opened
    }
}

/// What a flow's port is to be free toward.
fn toward(flow: &NewFlow) -> Destination {
    Destination {
        nat: flow.nat,
        remote: flow.guest.remote,
        remote_port: flow.guest.remote_port,
        protocol: flow.protocol,
    }
}

/// Whether a packet is a SYN that carries timestamps.
pub(super) fn has_timestamps(packet: &Packet<'_>) -> bool {
    let Transport::Tcp(tcp) = packet.transport else {
        return false;
    };
    let header = packet
        .ip
        .payload()
        .get(..tcp.header_len)
        .unwrap_or_default();
    tcp_options(header).any(|(kind, ..)| kind == OPTION_TIMESTAMPS)
}
