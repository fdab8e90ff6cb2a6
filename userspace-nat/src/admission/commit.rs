//! Execution of a plan: opens the flow, or counts the refusal.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{IfIndex, Protocol, Refusal, SlotIndex, Verdict, VmId};
use slipgate_model::FlowTuple;

use super::{
    FirstPacket, Opener,
    plan::{Path, Plan},
};
use crate::{
    datapath::Datapath,
    flow::{Insertion, NewFlow, OpenError},
    host_sockets::Busy,
    inspection::sessions::{Inspected, Kind},
    nat_ports::{Destination, Freed, PortPool},
    packet::{
        Packet, Transport,
        transport::{OPTION_TIMESTAMPS, tcp_options},
    },
    relay::Opening,
    state::{Nat, Refused, Rules, VmState},
    stats::Tally,
};

/// Most ports that are tried when other processes have the translated tuple in the kernel.
pub(super) const PORT_TRIES: usize = 8;
/// Most ports that are found to be of flows still to be adopted, beside [`PORT_TRIES`].
const MOST_KEPT: usize = 64;
/// Most ports that the host is found not to let a flow have, beside [`PORT_TRIES`].
const MOST_BUSY: usize = 64;
/// Tries before the ports that are kept for this process.
const COMMON_PORT_TRIES: usize = 4;

/// Opens a guest's flow as planned. Returns its slot.
pub(super) fn commit_outbound<D: Datapath>(
    nat: &mut Nat<D>,
    rules: &mut Rules,
    inspected: &mut Inspected,
    vm: &mut VmState,
    plan: Plan,
    first: &FirstPacket<'_>,
    now_ns: u64,
) -> Result<SlotIndex, Refused> {
    let guest = first.tuple;
    let protocol = guest.protocol().ok_or(Refusal::Insertion)?;
    take_room(nat, inspected, vm, &plan, protocol, now_ns)?;
    let (uplink_ifindex, next_hop, source) = match plan.path {
        Path::Hairpin(hairpin) => {
            let external = hairpin.external.ok_or(Refusal::NoRoute)?;
            (IfIndex::NONE, 0, external)
        }
        _ => {
            let hop = plan.route.and_then(|route| route.hop());
            let (hop, source) = hop.ok_or(Refusal::NoRoute)?;
            (hop.ifindex, nat.next_hop(hop, guest.remote), source)
        }
    };
    let is_hairpin = matches!(plan.path, Path::Hairpin(_));
    let is_inspected = plan.path == Path::Inspected;
    let is_routed = vm.net.is_routed_to(guest.remote);
    let flow = NewFlow {
        guest,
        vm_row: vm.net.row,
        protocol,
        nat: if is_routed { guest.local } else { source },
        nat_port: if is_routed { guest.local_port } else { 0 },
        rule: Rules::element_of(plan.decision.rule),
        uplink_ifindex,
        next_hop,
        isn: first.isn,
        inbound: false,
        hairpin: is_hairpin,
        verdict: if is_inspected || is_hairpin {
            Verdict::Engine
        } else {
            Verdict::Fast
        },
        // While a predecessor's flows are left a tuple may be one's: the error tells whose.
        insertion: match nat.flows.takes_orders
            && !is_inspected
            && !is_hairpin
            && !vm.is_captured
            && !nat.flows.are_left()
        {
            true => Insertion::Ordered,
            false => Insertion::Engine,
        },
    };
    if let Some(refused) = plan.refused {
        if let Some(look) = &plan.port {
            let (flows, to) = (&mut nat.flows, toward(&flow));
            flows.note_failed_search(&mut nat.datapath, to, look, now_ns);
        }
        return Err(refused);
    }
    let opened = match plan.mapped {
        _ if is_routed => nat.open_untranslated(flow, now_ns),
        Some(behaviour) => nat.open_mapped(flow, behaviour, now_ns),
        None => nat.open_with_port(flow, has_timestamps(first.packet), now_ns),
    };
    if let Ok(slot) = opened {
        let generation = nat.datapath.slot(slot).generation().load(Relaxed);
        if is_inspected {
            let mtus = (nat.uplink_mtu(slot), nat.path_mtu(&vm.net, slot));
            let judge = rules.judge.borrow();
            let http = judge.policy(vm.net.id).http(plan.decision.rule);
            let kind = Kind::begin(first.packet, mtus, http, now_ns);
            inspected.add(slot, generation, &vm.net, kind);
        }
        if let Some(name) = plan.name {
            rules.opened_by(slot, generation, name);
        }
    }
    Ok(nat.settle(vm, opened, now_ns)?)
}

/// Makes room as planned for a connection to the host's loopback.
pub(super) fn commit_to_loopback<D: Datapath>(
    nat: &mut Nat<D>,
    inspected: &mut Inspected,
    vm: &mut VmState,
    plan: Plan,
    protocol: Protocol,
    now_ns: u64,
) -> Result<Opening, Refused> {
    take_room(nat, inspected, vm, &plan, protocol, now_ns)?;
    match plan.path {
        Path::Relayed(lead) => Ok(Opening {
            host_port: lead.host_port,
            rule: lead.text.into(),
        }),
        Path::Translated | Path::Inspected | Path::Hairpin(_) => Err(Refusal::Insertion.into()),
    }
}

/// Takes the room that was planned for a flow. Counts a refusal that came before room mattered.
fn take_room<D: Datapath>(
    nat: &mut Nat<D>,
    inspected: &mut Inspected,
    vm: &mut VmState,
    plan: &Plan,
    protocol: Protocol,
    now_ns: u64,
) -> Result<(), Refused> {
    if let Some(room) = &plan.room {
        return Ok(room.take(nat, vm, Opener::Guest, now_ns)?);
    }
    let refused = plan.refused.ok_or(Refusal::Insertion)?;
    if let Some(rule) = refused.rule {
        vm.net.stats.refused_by(rule);
    }
    if refused.reason == Refusal::Inspection
        && let Some(why) = inspected.refuses(vm.net.id, protocol)
    {
        inspected.count(vm.net.id, why);
    }
    Err(refused)
}

impl<D: Datapath> Nat<D> {
    /// Opens a flow that keeps its guest's address and port. Returns its slot. Nobody else has
    /// these: the prefix is one VM's.
    pub(super) fn open_untranslated(
        &mut self,
        flow: NewFlow,
        now_ns: u64,
    ) -> Result<SlotIndex, Refusal> {
        let world = toward(&flow).world(flow.nat_port);
        let mut opened = self.flows.open(&mut self.datapath, &flow, now_ns);
        // A deletion may have failed on either side.
        for _ in 0..2 {
            let stale = match opened {
                Err(OpenError::WorldTaken) => &world,
                Err(OpenError::GuestTaken) => &flow.guest,
                _ => break,
            };
            if !self.sweep(stale) {
                break;
            }
            opened = self.flows.open(&mut self.datapath, &flow, now_ns);
        }
        opened.map_err(|error| match error {
            OpenError::NoSlot => {
                self.make_room_for_next(flow.vm_row, now_ns);
                Refusal::TableFull
            }
            OpenError::MapFull => Refusal::TableFull,
            OpenError::WorldTaken | OpenError::GuestTaken | OpenError::Kernel(_) => {
                Refusal::Insertion
            }
        })
    }

    /// Opens a flow with a translated port of its own. Returns its slot.
    fn open_with_port(
        &mut self,
        mut flow: NewFlow,
        timestamps: bool,
        now_ns: u64,
    ) -> Result<SlotIndex, Refusal> {
        let (to, vm) = (toward(&flow), VmId::new(flow.guest.scope));
        let (mut swept, mut kept, mut busy, mut tried) = (false, 0, 0, 0);
        while tried < PORT_TRIES {
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
            tried += 1;
            let refusal = match self.flows.open(&mut self.datapath, &flow, now_ns) {
                Ok(slot) => match self.claim_socket(slot, now_ns) {
                    true => return Ok(slot),
                    false => {
                        // Of connections that are just over there may be many.
                        busy += 1;
                        tried -= usize::from(busy <= MOST_BUSY);
                        continue;
                    }
                },
                Err(OpenError::WorldTaken) if self.is_kept(to, port, vm) => {
                    // As often as not all ports of the range are a predecessor's.
                    kept += 1;
                    tried -= usize::from(kept <= MOST_KEPT);
                    continue;
                }
                Err(OpenError::WorldTaken) => {
                    // Another process has the tuple; try again no sooner than if it had just ended.
                    self.flows.ports.free(to, port, vm, Freed::Taken, now_ns);
                    continue;
                }
                Err(OpenError::GuestTaken) if !swept && self.sweep(&flow.guest) => {
                    swept = true;
                    self.flows.ports.put_back(to, port, vm);
                    continue;
                }
                Err(OpenError::NoSlot) => {
                    self.make_room_for_next(flow.vm_row, now_ns);
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

    /// In user mode has the host make the socket of a flow that was just opened. If it does not let the
    /// flow have its port, the flow is taken back. Returns whether it is still there.
    pub(super) fn claim_socket(&mut self, slot: SlotIndex, now_ns: u64) -> bool {
        let (Some(host), Some(entry)) = (&self.host_sockets, self.flows.entry(slot)) else {
            return true;
        };
        if entry.is_hairpin() {
            return true;
        }
        let how = match host.claim(&entry.world()) {
            Ok(()) => return true,
            Err(Busy::Bound) => Freed::Taken,
            Err(Busy::Waits) => Freed::HostWaits,
        };
        let (flows, datapath) = (&mut self.flows, &mut self.datapath);
        flows.take_back(datapath, slot, how, now_ns);
        false
    }

    /// Deletes a tuple that is this process's alone and that no flow of it has: an earlier deletion
    /// failed. Returns whether it was deleted.
    pub(super) fn sweep(&mut self, tuple: &FlowTuple) -> bool {
        let left = self.flows.left_by(&mut self.datapath, tuple);
        let known = match tuple.scope {
            FlowTuple::WORLD => self.flows.by_world(tuple),
            _ => self.flows.by_guest(tuple),
        };
        known.is_none() && matches!(left, Ok(None)) && self.datapath.remove(tuple).unwrap_or(false)
    }

    /// Whether a port that was picked for a VM, and whose tuple is taken, is that of a flow that is
    /// still to be adopted. It is busy from now on.
    fn is_kept(&mut self, to: Destination, port: u16, vm: VmId) -> bool {
        let left = self.flows.left_by(&mut self.datapath, &to.world(port));
        let Ok(Some(slot)) = left else {
            return false;
        };
        let holder = self.datapath.slot(slot).id();
        self.flows.ports.put_back(to, port, vm);
        self.flows.ports.mark(to, port, holder);
        true
    }

    /// Counts an admission, or makes room for when the refused packet is sent again.
    pub(super) fn settle(
        &mut self,
        vm: &VmState,
        opened: Result<SlotIndex, Refusal>,
        now_ns: u64,
    ) -> Result<SlotIndex, Refusal> {
        let (flows, datapath) = (&mut self.flows, &mut self.datapath);
        if opened == Err(Refusal::TableFull)
            && let Some(slot) = flows.oldest_unproven(datapath, vm.net.row, now_ns)
        {
            // Its slot may be taken in a second.
            flows.end_unproven(datapath, slot, now_ns);
        }
        if let Ok(slot) = opened
            && !flows.is_ordered(slot)
        {
            vm.net.stats.tally(Tally::Admitted, 1);
            if vm.is_captured {
                flows.capture(datapath, slot, true);
            }
        }
        opened
    }
}

/// Returns the destination toward which a flow's port has to be free.
fn toward(flow: &NewFlow) -> Destination {
    Destination {
        nat: flow.nat,
        remote: flow.guest.remote,
        remote_port: flow.guest.remote_port,
        protocol: flow.protocol,
    }
}

/// Whether a packet is a SYN with TCP timestamps.
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
