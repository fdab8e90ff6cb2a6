//! Flows that the world opens: the first packet to a forward, to an open port of a guest's own address, or
//! to a port of an endpoint-independent mapping.
//!
//! # Theory of operation
//! No rule judges who connects to a forward, and the source of a first packet may be forged. So a
//! flow that the world opened allows the guest to answer its remote, and nothing else: a connection
//! of the guest's own to the same remote is judged like any other. Packets from addresses that
//! cannot be a client's are refused ([`slipgate_policy::Space::may_come_in`]).
//!
//! A mapping ([`crate::flow::mappings`]) is the guest's doing, not the operator's. So who sends to
//! its port must be one whom the rules let the guest send to, and whom the policy's filtering lets in.
//! A sender under an inspect rule is refused: what it sends first says nothing about a name.
//!
//! A guest has several addresses of IPv6, and chooses them itself. A flow by a forward leads to the one
//! that it used last; while none is bound, flows are refused. A flow by a mapping leads to the address
//! whose port has the mapping. A flow to a port of the guest's own leads to the address that it names, if
//! that is bound to the guest.
//!
//! Forwards and mappings may use a share of each quota, so the world cannot use up the whole quota of a guest.
use std::{net::IpAddr, rc::Rc, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Direction, IfIndex, Refusal, RuleIndex, SlotIndex, Verdict, Vm6Ref};
use slipgate_model::FlowTuple;
use slipgate_policy::{Destination, Filtering};

use super::{Admission, Opener, admit_known, hairpin::lets_in_guest, opens, room::Room};
use crate::{
    datapath::{Datapath, Hop},
    flow::{Insertion, NewFlow, OpenError},
    name_gate::LearntName,
    nat_ports::{Destination as Toward, Freed},
    ndp::addresses,
    packet::Packet,
    route::{Route, ask::Transport, spread},
    state::{Forwards, Journal, Nat, Rules, VmState},
};

/// Plan for a flow that the world opens.
struct InboundPlan {
    /// Whether the flow is to the guest's own address, without translation.
    is_own: bool,
    /// Port of the guest.
    guest_port: u16,
    /// Element of `RULES` that the flow shows.
    rule: RuleIndex,
    /// Name by which DNS opened the sender's address, if it did.
    name: Option<Rc<LearntName>>,
    /// The guest's address, next hop to the client, unless that is a guest, and room among the VM's
    /// flows, or the reason for a refusal.
    room: Result<(IpAddr, Option<Hop>, Room), Refusal>,
}

/// Whose packet it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// It came by a link.
    Outside,
    /// A guest of this engine sent it to a translated address, and it was led back in.
    Guest,
}

/// Decides about a packet from the world to a forward or mapping, or one that was led back in
/// (`is_hairpin`).
pub(crate) fn admit_inbound<D: Datapath>(
    nat: &mut Nat<D>,
    rules: &mut Rules,
    forwards: &Forwards,
    journal: &mut Journal,
    vm: &mut VmState,
    (packet, is_hairpin): (&Packet<'_>, bool),
    now_ns: u64,
) -> Admission {
    let Some(world) = packet.tuple(FlowTuple::WORLD, Direction::Rx) else {
        return Admission::NoFlow;
    };
    let known = nat.flows.by_world(&world);
    if known.is_some_and(|slot| nat.is_hairpin(slot) != is_hairpin) {
        return Admission::NoFlow;
    }
    if let Some(admission) = admit_known(nat, rules, known, packet, Direction::Rx, now_ns) {
        return admission;
    }
    let Some(isn) = opens(packet) else {
        return Admission::NoFlow;
    };
    let from = match is_hairpin {
        true => Sender::Guest,
        false => Sender::Outside,
    };
    let Some(plan) = plan(nat, (rules, forwards), vm, &world, from, now_ns) else {
        return Admission::NoFlow;
    };
    let name = plan.name.clone();
    match commit(nat, vm, plan, (world, isn), now_ns) {
        Ok(slot) => {
            if let Some(name) = name {
                let generation = nat.datapath.slot(slot).generation().load(Relaxed);
                rules.opened_by(slot, generation, name);
            }
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

/// Returns the plan for a flow that the world opens; `None` when the packet matches neither a
/// forward nor a mapping that lets its sender in.
fn plan<D: Datapath>(
    nat: &Nat<D>,
    (rules, forwards): (&Rules, &Forwards),
    vm: &VmState,
    world: &FlowTuple,
    from: Sender,
    now_ns: u64,
) -> Option<InboundPlan> {
    let matched = match forwards.matching(world, vm.net.id) {
        // The sender's half may be of before its policy, or this one's, kept them apart.
        Some(forward) if from == Sender::Guest && !lets_in_guest(nat, forward, world) => {
            return None;
        }
        // As the programs have it, but for what they handed over before.
        Some(forward) if forward.is_own && nat.network.are_own_ports_shut(vm.net.id) => {
            return None;
        }
        Some(forward) => Matched {
            guest: match forward.is_own {
                true => Some(own_address(nat, vm, world.local)?),
                false => None,
            },
            is_own: forward.is_own,
            guest_port: forward.guest_port,
            rule: forward.rule,
            name: None,
            refused: None,
        },
        None => mapped(nat, rules, vm, world, from, now_ns)?,
    };
    let routes = &nat.network.routes;
    let row = || nat.datapath.vm6(vm.net.row);
    let guest = || (matched.guest).or_else(|| addresses::guest_for(&vm.net, world.local, row));
    // A host that routes sees packets to other hosts: they match no forward. Of what is routed to the guest
    // nothing is the host's.
    let is_hosts = routes.lookup(world.local) == Route::HostLocal;
    if is_hosts == matched.is_own {
        return None;
    }
    let room = if let Some(refusal) = matched.refused {
        Err(refusal)
    } else if from == Sender::Guest {
        let room = || Room::find(nat, vm, true, now_ns);
        guest().map_or(Err(Refusal::NoAddress), |guest| Ok((guest, None, room())))
    } else if rules.may_come_in(&vm.net, world.remote) {
        let guest = guest();
        let tuple = FlowTuple {
            scope: vm.net.id.get(),
            local: guest.unwrap_or(world.local),
            local_port: matched.guest_port,
            ..*world
        };
        let choose = &mut spread::by_flow(&tuple);
        let (from, transport) = (Some(world.local), Transport::of(world));
        let network = &nat.network;
        let route = match matched.is_own {
            true => network.route_choosing(vm.net.id, world.remote, transport, choose),
            false => network.route_of_host(vm.net.id, world.remote, from, transport, choose),
        };
        let room = || Room::find(nat, vm, true, now_ns);
        let leaves_by = |hop: &(Hop, _)| {
            let link = hop.0.ifindex;
            matched.is_own || nat.network.answers_by(vm.net.id, link, world.local)
        };
        let hop = route.hop().filter(leaves_by);
        match (hop, guest) {
            (Some((hop, _)), Some(guest)) => Ok((guest, Some(hop), room())),
            (None, _) => Err(Refusal::NoRoute),
            (_, None) => Err(Refusal::NoAddress),
        }
    } else {
        Err(Refusal::Protected)
    };
    Some(InboundPlan {
        guest_port: matched.guest_port,
        is_own: matched.is_own,
        rule: matched.rule,
        name: matched.name,
        room,
    })
}

/// Returns an address if it is bound to the guest, whose own it is. To others of its prefix nothing is let
/// in: nobody has them.
fn own_address<D: Datapath>(nat: &Nat<D>, vm: &VmState, address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(own) = address else {
        return None;
    };
    let is_bound = |row: Vm6Ref| row.place_of(own.into()).is_some();
    let is_its = vm.net.may_have_flows_of(address, true) && !own.is_unicast_link_local();
    (is_its && nat.datapath.vm6(vm.net.row).is_some_and(is_bound)).then_some(address)
}

/// The forward that a packet from the world matches, and the guest behind it.
struct Matched {
    /// Address of the guest; `None`: the one that it used last.
    guest: Option<IpAddr>,
    /// Whether it is the address that the sender names: there is no translation.
    is_own: bool,
    guest_port: u16,
    rule: RuleIndex,
    name: Option<Rc<LearntName>>,
    /// Reason for which the rules refuse the sender.
    refused: Option<Refusal>,
}

/// Returns what a packet leads to by a mapping of the VM; `None` if its sender is not let in.
fn mapped<D: Datapath>(
    nat: &Nat<D>,
    rules: &Rules,
    vm: &VmState,
    world: &FlowTuple,
    sender: Sender,
    now_ns: u64,
) -> Option<Matched> {
    let (inside, mapping) = nat.flows.mappings.by_outside(world)?;
    let behaviour = rules.nat_behaviour(inside.vm, inside.protocol);
    let is_let_in = match behaviour.filtering {
        Filtering::AddressAndPortDependent => false,
        Filtering::AddressDependent => mapping.has_peer(world.remote),
        Filtering::EndpointIndependent => true,
    };
    // The VM had the address, and has another pool now.
    if !nat.network.may_be_translated_to(vm.net.id, world.local) {
        return None;
    }
    if inside.vm != vm.net.id || !behaviour.is_mapped() || !mapping.is_open() || !is_let_in {
        return None;
    }
    let from = Destination {
        addr: world.remote,
        port: world.remote_port,
        protocol: inside.protocol,
    };
    if sender == Sender::Guest {
        let decision = rules.decide_hairpin(vm.net.id, from);
        return behaviour.hairpins().then_some(Matched {
            guest: Some(inside.guest),
            is_own: false,
            guest_port: inside.port,
            rule: Rules::element_of(decision.rule),
            name: None,
            refused: decision.refusal,
        });
    }
    let verdict = rules.judge.borrow().decide(vm.net.id, from, now_ns);
    let inspected = verdict.inspect.then_some(Refusal::Inspection);
    Some(Matched {
        guest: Some(inside.guest),
        is_own: false,
        guest_port: inside.port,
        rule: Rules::element_of(verdict.decision.rule),
        refused: verdict.decision.refusal.or(inspected),
        name: verdict.name,
    })
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
    let (local, hop, room) = plan.room?;
    let protocol = world.protocol().ok_or(Refusal::Insertion)?;
    room.take(nat, vm, Opener::World((world, isn)), now_ns)?;
    let guest = FlowTuple {
        scope: vm.net.id.get(),
        local,
        local_port: plan.guest_port,
        ..world
    };
    let to = Toward {
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
        rule: plan.rule,
        uplink_ifindex: hop.map_or(IfIndex::NONE, |hop| hop.ifindex),
        next_hop: hop.map_or(0, |hop| nat.next_hop(hop, world.remote)),
        isn,
        inbound: true,
        hairpin: hop.is_none(),
        verdict: match hop {
            Some(_) => Verdict::Fast,
            None => Verdict::Engine,
        },
        insertion: Insertion::Engine,
    };
    // Its address and port are the guest's alone: they are of no pool.
    if plan.is_own {
        let opened = nat.open_untranslated(flow, now_ns);
        return nat.settle(vm, opened, now_ns);
    }
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
