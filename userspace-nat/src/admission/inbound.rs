//! What the world opens: the first packet to a forward.
//!
//! # Theory of operation
//! No rule judges who connects to a forward, and the source of a first packet may be forged. So a flow
//! that the world opened lets the guest answer whoever has written, and no more: a connection of the
//! guest's own to the same remote is judged like any other, and from addresses that are no client's,
//! whatever a packet says, nobody gets in ([`slipgate_policy::Space::may_come_in`]).
//!
//! What forwards let in may use its share of a quota, so that the world can't use up a guest's own.
use std::net::Ipv4Addr;

use slipgate_abi::{Direction, Protocol, Refusal, Tuple, Verdict};

use super::{Admission, Opener, opens, room::Room};
use crate::{
    datapath::{Datapath, Hop},
    flow::{NewFlow, OpenError},
    nat_ports::{Destination, Freed},
    packet::Packet,
    route::Route,
    state::{Core, Forward, VmState},
    vm::VmNet,
};

/// What is to become of a flow that the world opens.
struct InboundPlan {
    /// The forward that leads it in.
    forward: Forward,
    /// The next hop to its client and its place among the VM's flows, or why it may not be.
    way: Result<(Hop, Room), Refusal>,
}

impl<D: Datapath> Core<D> {
    /// Decides about a packet of the world to a forward.
    pub(crate) fn admit_inbound(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        now_ns: u64,
    ) -> Admission {
        let Some(world) = packet.tuple(Tuple::WORLD, Direction::Rx) else {
            return Admission::NoFlow;
        };
        let known = self.flows.by_world(&world);
        if let Some(admission) = self.admit_known(known, packet, Direction::Rx, now_ns) {
            return admission;
        }
        let Some(isn) = opens(packet) else {
            return Admission::NoFlow;
        };
        let Some(plan) = self.plan_inbound(vm, &world, now_ns) else {
            return Admission::NoFlow;
        };
        match self.commit_inbound(vm, plan, (world, isn), now_ns) {
            Ok(slot) => Admission::Flow { slot },
            Err(refusal) => {
                let guest = Tuple {
                    scope: vm.net.id,
                    ..world
                };
                self.refuse(vm.net.id, &guest, refusal.into(), now_ns)
            }
        }
    }

    /// Whether somebody at an address may be a forward's client: not one of a VM's own network, of the
    /// host, or of space that nobody who is outside has.
    pub(crate) fn may_come_in(&self, vm: &VmNet, remote: Ipv4Addr) -> bool {
        let judge = self.judge.borrow();
        let space = judge.policy(vm.id).protected(remote);
        !vm.is_on_link(remote) && space.is_none_or(|(_, space)| space.may_come_in())
    }

    /// What is to become of a flow that the world opens; `None`: it meets no forward.
    fn plan_inbound(&self, vm: &VmState, world: &Tuple, now_ns: u64) -> Option<InboundPlan> {
        let forward = self.forward_for(world, vm.net.id)?;
        // A host that routes sees packets of others: they are no forward's.
        if self.routes.lookup(world.local.into()) != Route::HostLocal {
            return None;
        }
        let way = if self.may_come_in(&vm.net, world.remote.into()) {
            let route = self.routes.lookup(world.remote.into());
            let hop = route.hop().map(|(hop, _)| hop);
            let room = || self.room_for_world(vm, now_ns);
            hop.map(|hop| (hop, room())).ok_or(Refusal::NoRoute)
        } else {
            Err(Refusal::Protected)
        };
        Some(InboundPlan { forward, way })
    }

    /// Opens a flow of the world's as planned; its slot. Its rate is judged only now: who asks again
    /// is known by having been refused.
    fn commit_inbound(
        &mut self,
        vm: &mut VmState,
        plan: InboundPlan,
        (world, isn): (Tuple, u32),
        now_ns: u64,
    ) -> Result<u32, Refusal> {
        let InboundPlan { forward, way } = plan;
        let (hop, room) = way?;
        let protocol = Protocol::from_ip(world.protocol).ok_or(Refusal::Insertion)?;
        self.charge(vm, &room, Opener::World((world, isn)), now_ns)?;
        let guest = Tuple {
            scope: vm.net.id,
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
            next_hop: self.next_hop(hop, world.remote),
            isn,
            inbound: true,
            verdict: Verdict::Fast,
        };
        self.flows.ports.mark(to, flow.nat_port, vm.net.id);
        let opened = self
            .flows
            .open(&mut self.datapath, &flow, now_ns)
            .map_err(|error| {
                self.flows
                    .ports
                    .free(to, flow.nat_port, vm.net.id, Freed::Safe, now_ns);
                match error {
                    OpenError::NoSlot | OpenError::MapFull => Refusal::TableFull,
                    _ => Refusal::Insertion,
                }
            });
        self.settle(vm, opened, now_ns)
    }
}
