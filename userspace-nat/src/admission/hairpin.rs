//! Flows of guests to translated addresses of this host (RFC 4787 REQ-9): to a port of another
//! guest's mapping, to one of their own, or to a forward. And to other guests' own addresses.
//!
//! # Theory of operation
//! Such a flow leaves by no link: its packets are led back in ([`crate::packet_path::hairpin`]), as
//! if a router outside had returned them. So a guest that asks for hairpinning opens a flow here as
//! it would to any host, with the translated port that all see, and the receiver's side is decided
//! as for a packet from the world ([`super::inbound`]): the receiver has a flow of its own, unless
//! its filtering or its rules keep the sender out.
//!
//! The host's address is not what such a packet reaches, so no safe default refuses it. All else
//! decides: the sender's rules about the address as it was sent, the receiver's about the address
//! that it sees. Under an inspect rule the flow is refused.
//!
//! A guest whose prefix is routed has no translated address, and reaches other such guests of this engine
//! by their own addresses, at ports that are open to the world. Neither end is translated, and no
//! setting asks for it: the sender's rules decide as about any address, so that guests are protected
//! unless one opens them. Its source is a guest's, as nobody outside can be.
use std::net::{IpAddr, Ipv4Addr};

use slipgate_abi::{Refusal, VmId, VmRow};
use slipgate_model::{FlowTuple, route::OUT_THERE};

use super::plan::{Path, Plan, Planner};
use crate::{
    datapath::Datapath,
    flow::mappings::{Inside, Pool},
    route::Route,
    state::{Core, Forward, Forwards, Nat, Network, Refused, Rules, VmState},
};
use slipgate_policy::{Destination, NatBehaviour};

/// Returns an address of the family of `addr` that only a route to all of the internet has.
fn anywhere(addr: IpAddr) -> IpAddr {
    match addr {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => OUT_THERE.into(),
    }
}

/// Plan of a flow whose destination leads back to a guest of this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hairpin {
    /// The VM to which the destination leads.
    pub(crate) to: VmId,
    /// Translated address of the sender; `None`: there is none, and the flow is refused.
    pub(crate) external: Option<IpAddr>,
}

/// Where a packet to a translated port of this host leads.
pub(crate) struct LeadsIn {
    pub(crate) row: VmRow,
    pub(crate) vm: VmId,
    by: By,
}

/// What leads there.
#[derive(Clone, Copy)]
enum By {
    Mapping,
    Forward,
    /// An open port of the guest's own address.
    OwnPort,
}

impl LeadsIn {
    /// Where this forward leads.
    fn by_forward(forward: &Forward) -> Self {
        Self {
            row: forward.vm_row,
            vm: forward.vm,
            by: match forward.is_own {
                true => By::OwnPort,
                false => By::Forward,
            },
        }
    }

    /// Whether packets of this VM may go there by the uplinks and routes that both have.
    fn is_open_to(&self, from: VmId, network: &Network) -> bool {
        let leave_alike = || network.leave_alike(from, self.vm);
        match self.by {
            By::Mapping => true,
            // A forward of a VM with an uplink or routes of its own is for those behind them.
            By::Forward => network.leaves_as_all(self.vm) || leave_alike(),
            // Another's uplink or routes are no way for this one.
            By::OwnPort => leave_alike(),
        }
    }
}

/// Returns the VM to which a packet with this tuple on the world's side leads by a mapping or a
/// forward of this engine.
pub(crate) fn leads_in<D: Datapath>(
    nat: &Nat<D>,
    rules: &Rules,
    forwards: &Forwards,
    world: &FlowTuple,
) -> Option<LeadsIn> {
    // Not a broadcast address.
    if !nat.network.routes.may_send_from(world.local) {
        return None;
    }
    let mapped = nat.flows.mappings.by_outside(world);
    let mapped = mapped.filter(|(inside, mapping)| {
        mapping.has_flows() && rules.nat_behaviour(inside.vm, inside.protocol).hairpins()
    });
    match mapped {
        Some((inside, mapping)) => Some(LeadsIn {
            row: mapping.row,
            vm: inside.vm,
            by: By::Mapping,
        }),
        None => forwards.at(world).map(LeadsIn::by_forward),
    }
}

/// Returns the VM whose own address this is, if the port is open to the world.
pub(crate) fn leads_to_own(forwards: &Forwards, world: &FlowTuple) -> Option<LeadsIn> {
    let forward = forwards.at(world).filter(|forward| forward.is_own)?;
    Some(LeadsIn::by_forward(forward))
}

/// Tuple on the world's side of packets to this destination, of whatever source.
fn to_world(to: Destination) -> FlowTuple {
    FlowTuple {
        scope: FlowTuple::WORLD,
        local: to.addr,
        remote: anywhere(to.addr),
        local_port: to.port,
        remote_port: 0,
        protocol: to.protocol as u8,
    }
}

/// Whether the rules in force let a VM have a flow that is led back in.
pub(super) fn may_hairpin(rules: &Rules, vm: VmId, to: Destination) -> bool {
    rules.nat_behaviour(vm, to.protocol).hairpins() && rules.decide_hairpin(vm, to).is_allowed()
}

/// Whether policies that are in force now keep a VM from where this destination leads. What leads nowhere
/// any more is not kept apart: its receiver's half is judged for that.
pub(super) fn is_kept_apart<D: Datapath>(core: &Core<D>, vm: VmId, to: Destination) -> bool {
    let Core {
        nat,
        rules,
        forwards,
        ..
    } = core;
    let world = to_world(to);
    let leads = leads_in(nat, rules, forwards, &world);
    let leads = leads.or_else(|| leads_to_own(forwards, &world));
    leads.is_some_and(|leads| !leads.is_open_to(vm, &nat.network))
}

/// Whether a forward lets in the guest of this engine that sent a packet with this tuple, as its receiver
/// has it. Without the sender's half nothing comes, so there is nothing to keep out.
pub(super) fn lets_in_guest<D: Datapath>(
    nat: &Nat<D>,
    forward: &Forward,
    world: &FlowTuple,
) -> bool {
    let sent = FlowTuple {
        local: world.remote,
        local_port: world.remote_port,
        remote: world.local,
        remote_port: world.local_port,
        ..*world
    };
    let sender = nat.flows.by_world(&sent);
    let sender = sender.and_then(|slot| nat.flows.entry(slot));
    let leads = LeadsIn::by_forward(forward);
    sender.is_none_or(|sender| leads.is_open_to(sender.vm(), &nat.network))
}

impl<D: Datapath> Planner<'_, D> {
    /// Plans a flow to a translated port of this host. Returns `None` if the destination is none, or
    /// the VM's policy, which gives `behaviour`, does not ask for hairpinning.
    pub(super) fn hairpin(
        &self,
        vm: &VmState,
        to: Destination,
        guest: Option<&FlowTuple>,
        behaviour: NatBehaviour,
    ) -> Option<Plan> {
        if !behaviour.hairpins() || self.nat.flows.mappings.range().is_none() {
            return None;
        }
        // It has no translated address by which it would come back.
        if vm.net.is_routed_to(to.addr) {
            return None;
        }
        let world = to_world(to);
        let leads = leads_in(self.nat, self.rules, self.forwards, &world)?;
        if !leads.is_open_to(vm.net.id, &self.nat.network) {
            return None;
        }
        let inside = guest.and_then(|guest| Inside::of(guest, anywhere(to.addr)));
        let external = self.nat.hairpin_source(vm.net.id, inside.as_ref(), to.addr);
        let decision = self.rules.decide_hairpin(vm.net.id, to);
        let mut plan = Plan {
            decision,
            name: None,
            path: Path::Hairpin(Hairpin {
                to: leads.vm,
                external: external.ok(),
            }),
            route: Some(Route::HostLocal),
            room: None,
            port: None,
            mapped: Some(behaviour),
            refused: None,
        };
        let checked = self.check_hairpin(vm, (to, external), guest, &mut plan);
        plan.refused = checked.err();
        Some(plan)
    }

    /// Plans a flow of a VM with a routed prefix to an open port of another such VM's own address. Returns
    /// `None` if the destination is none.
    pub(super) fn between_own(
        &self,
        vm: &VmState,
        to: Destination,
        guest: Option<&FlowTuple>,
    ) -> Option<Plan> {
        let prefix = vm.net.ipv6.filter(|_| vm.net.is_routed_to(to.addr))?.prefix;
        let leads = leads_to_own(self.forwards, &to_world(to))?;
        let network = &self.nat.network;
        // Where the host has got the address, it is not the guest's for now.
        if leads.vm == vm.net.id
            || network.routes.is_host(to.addr)
            || !leads.is_open_to(vm.net.id, network)
        {
            return None;
        }
        let is_shut = network.are_own_ports_shut(leads.vm);
        let verdict = self.rules.judge.borrow().decide(vm.net.id, to, self.now_ns);
        let own = guest.map_or(prefix.network().into(), |guest| guest.local);
        let mut plan = Plan {
            decision: verdict.decision,
            name: verdict.name,
            path: Path::Hairpin(Hairpin {
                to: leads.vm,
                external: Some(own),
            }),
            route: None,
            room: None,
            port: None,
            mapped: None,
            refused: None,
        };
        let by_rule = |reason| Refused {
            reason,
            rule: Some(Rules::element_of(verdict.decision.rule)),
        };
        let inspected = verdict.inspect.then_some(Refusal::Inspection);
        plan.refused = match verdict.decision.refusal.or(inspected) {
            Some(refusal) => Some(by_rule(refusal)),
            None if is_shut => Some(Refusal::Protected.into()),
            None => {
                let room = plan.room.insert(self.room_for_guest(vm));
                room.check(vm, self.now_ns).err().map(Refused::from)
            }
        };
        Some(plan)
    }

    fn check_hairpin(
        &self,
        vm: &VmState,
        (to, external): (Destination, Result<IpAddr, Refusal>),
        guest: Option<&FlowTuple>,
        plan: &mut Plan,
    ) -> Result<(), Refused> {
        if let Some(reason) = plan.decision.refusal {
            let rule = Some(Rules::element_of(plan.decision.rule));
            return Err(Refused { reason, rule });
        }
        let pool = Pool {
            protocol: to.protocol,
            nat: external?,
        };
        let room = plan.room.insert(self.room_for_guest(vm));
        room.check(vm, self.now_ns)?;
        self.check_mapped(vm.net.id, pool, guest, room)
    }
}

impl<D: Datapath> Nat<D> {
    /// Returns the translated address of a VM's packets to a translated port at `to`. A VM with a
    /// pool has one address. Otherwise it is that of the guest's port's mapping, if it has one (RFC
    /// 4787 REQ-9a), else that which packets to the internet have. `inside`: the guest's port; its
    /// address does not matter.
    ///
    /// # Errors
    /// The host has no address of the VM's pool, or there is no default route.
    pub(crate) fn hairpin_source(
        &self,
        vm: VmId,
        inside: Option<&Inside>,
        to: IpAddr,
    ) -> Result<IpAddr, Refusal> {
        let Self { flows, network, .. } = self;
        let pairing = network.pairing(vm);
        if let Some(pairing) = pairing.filter(|of| of.pool().has_family(to.is_ipv6())) {
            let address = pairing.address(to.is_ipv6(), &network.routes);
            return address.ok_or(Refusal::NoAddress);
        }
        let known = inside.and_then(|inside| flows.mappings.external_of(inside, to));
        let own = || {
            network
                .route(vm, anywhere(to))
                .hop()
                .map(|(_, source)| source)
        };
        known.or_else(own).ok_or(Refusal::NoRoute)
    }
}
