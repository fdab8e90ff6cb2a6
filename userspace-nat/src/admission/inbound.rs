//! Flows that the world opens: the first packet to a forward.
//!
//! # Theory of operation
//! No rule judges who connects to a forward, and the source of a first packet may be forged. So a
//! flow that the world opened allows the guest to answer its remote, and nothing else: a connection
//! of the guest's own to the same remote is judged like any other. Packets from addresses that
//! cannot be a client's are refused ([`slipgate_policy::Space::may_come_in`]).
//!
//! Forwards may use a share of each quota, so the world cannot use up the whole quota of a guest.
use slipgate_abi::{Direction, Refusal, SlotIndex, Verdict};
use slipgate_model::FlowTuple;

use super::{Admission, Opener, admit_known, opens, room::Room};
use crate::{
    datapath::{Datapath, Hop},
    flow::{Insertion, NewFlow, OpenError},
    nat_ports::{Destination, Freed},
    packet::Packet,
    route::Route,
    state::{Forward, Forwards, Journal, Nat, Rules, VmState},
};

/// Plan for a flow that the world opens.
struct InboundPlan {
    /// The forward that the packet matches.
    forward: Forward,
    /// Next hop to the client and room among the VM's flows, or the reason for a refusal.
    room: Result<(Hop, Room), Refusal>,
}

/// Decides about a packet from the world to a forward.
pub(crate) fn admit_inbound<D: Datapath>(
    nat: &mut Nat<D>,
    rules: &Rules,
    forwards: &Forwards,
    journal: &mut Journal,
    vm: &mut VmState,
    packet: &Packet<'_>,
    now_ns: u64,
) -> Admission {
    let Some(world) = packet.tuple(FlowTuple::WORLD, Direction::Rx) else {
        return Admission::NoFlow;
    };
    let known = nat.flows.by_world(&world);
    if let Some(admission) = admit_known(nat, rules, known, packet, Direction::Rx, now_ns) {
        return admission;
    }
    let Some(isn) = opens(packet) else {
        return Admission::NoFlow;
    };
    let Some(plan) = plan(nat, rules, forwards, vm, &world, now_ns) else {
        return Admission::NoFlow;
    };
    match commit(nat, vm, plan, (world, isn), now_ns) {
        Ok(slot) => {
            journal.flow_started(slot);
            Admission::Flow { slot }
        }
        Err(reason) => {
            let guest = FlowTuple {
                scope: vm.net.id.get(),
                ..world
            };
            journal.flow_refused(&guest, reason.into(), now_ns);
            Admission::Refused(reason)
        }
    }
}

/// Returns the plan for a flow that the world opens; `None` when the packet matches no forward.
fn plan<D: Datapath>(
    nat: &Nat<D>,
    rules: &Rules,
    forwards: &Forwards,
    vm: &VmState,
    world: &FlowTuple,
    now_ns: u64,
) -> Option<InboundPlan> {
    let forward = *forwards.matching(world, vm.net.id)?;
    let routes = &nat.network.routes;
    // A host that routes sees packets to other hosts: they match no forward.
    if routes.lookup(world.local) != Route::HostLocal {
        return None;
    }
    let room = if rules.may_come_in(&vm.net, world.remote) {
        let route = nat.network.route(vm.net.id, world.remote);
        let room = || Room::find(nat, vm, true, now_ns);
        // Answers from another uplink's address would reach nobody, and tell who the guest is.
        let leaves_by = |hop: &(Hop, _)| {
            let own = nat.network.uplink_of(vm.net.id);
            own.is_none() || routes.carries(hop.0.ifindex, world.local)
        };
        let hop = route.hop().filter(leaves_by);
        hop.map(|(hop, _)| (hop, room())).ok_or(Refusal::NoRoute)
    } else {
        Err(Refusal::Protected)
    };
    Some(InboundPlan { forward, room })
}

/// Opens a flow from the world as planned. Returns its slot. Its rate is judged only now: a
/// retransmission is recognized by the earlier refusal.
fn commit<D: Datapath>(
    nat: &mut Nat<D>,
    vm: &mut VmState,
    plan: InboundPlan,
    (world, isn): (FlowTuple, u32),
    now_ns: u64,
) -> Result<SlotIndex, Refusal> {
    let forward = plan.forward;
    let (hop, room) = plan.room?;
    let protocol = world.protocol().ok_or(Refusal::Insertion)?;
    room.take(nat, vm, Opener::World((world, isn)), now_ns)?;
    let guest = FlowTuple {
        scope: vm.net.id.get(),
        local: vm.net.guest.into(),
        local_port: forward.guest_port,
        ..world
    };
    let to = Destination {
        nat: world.local,
        remote: world.remote,
        remote_port: world.remote_port,
        protocol,
    };
    let flow = NewFlow {
        guest,
        vm_row: vm.net.row,
        protocol,
        nat: world.local,
        nat_port: world.local_port,
        rule: forward.rule,
        uplink_ifindex: hop.ifindex,
        next_hop: nat.next_hop(hop, world.remote),
        isn,
        inbound: true,
        verdict: Verdict::Fast,
        insertion: Insertion::Engine,
    };
    let (flows, port, id) = (&mut nat.flows, flow.nat_port, vm.net.id);
    flows.ports.mark(to, port, id);
    let opened = flows
        .open(&mut nat.datapath, &flow, now_ns)
        .map_err(|error| {
            flows.ports.free(to, port, id, Freed::Safe, now_ns);
            match error {
                OpenError::NoSlot | OpenError::MapFull => Refusal::TableFull,
                _ => Refusal::Insertion,
            }
        });
    nat.settle(vm, opened, now_ns)
}
