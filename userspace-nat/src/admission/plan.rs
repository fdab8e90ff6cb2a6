//! The plan: the outcome of admission for a guest's new flow, with the reasons.
//!
//! # Theory of operation Making a plan changes and counts nothing. So a plan can be made for a
//! packet, which commits it at once ([`super::commit`]), and for `slipgate why`, which prints it. A
//! plan covers all that is known without asking the kernel to take the flow: rules, route,
//! inspection, cap, rate, and the ports toward the destination. The commit can still refuse what a
//! plan admits, for reasons that only the attempt shows (a tuple that another process has, a table
//! that is full). It never admits what a plan refuses.
use std::rc::Rc;

use slipgate_abi::{Protocol, Refusal, VmId};
use slipgate_model::FlowTuple;

use super::{hairpin::Hairpin, room::Room};
use crate::{
    datapath::Datapath,
    flow::{
        PortSearch,
        mappings::{Inside, Pool},
    },
    inspection::sessions::Inspected,
    name_gate::LearntName,
    nat_ports,
    route::{Route, RouteEntry, ask::Transport, spread},
    state::{Forwards, Nat, Refused, Rules, VmState},
};
use slipgate_policy::{Decision, Destination, Lead, NatBehaviour};

/// Decisions about a new flow.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The deciding rule and its decision.
    pub(crate) decision: Decision,
    /// Name by which DNS opened the address, if it did.
    pub(crate) name: Option<Rc<LearntName>>,
    /// Path of the flow's packets.
    pub(crate) path: Path,
    /// Route to the destination; `None` where it does not matter.
    pub(crate) route: Option<Route>,
    /// Room among the VM's flows; `None` where it does not matter.
    pub(crate) room: Option<Room>,
    /// Search for a translated port; `None` where it does not matter.
    pub(super) port: Option<PortSearch>,
    /// Behaviour of the translated port, if it does not depend on the destination.
    pub(crate) mapped: Option<NatBehaviour>,
    /// Reason for a refusal; `None` when the flow is admitted.
    pub(crate) refused: Option<Refused>,
}

/// Path of a flow's packets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Path {
    /// The kernel translates them, from the first one on.
    Translated,
    /// The engine carries them until it has read a name that the rules admit; then the kernel
    /// translates them.
    Inspected,
    /// The engine relays them to a port of the host's loopback.
    Relayed(Lead),
    /// The engine translates them, and leads them back in to a guest of its own.
    Hairpin(Hairpin),
}

/// The state that plans are made of. It is shared: a plan changes nothing.
pub(crate) struct Planner<'a, D> {
    pub(crate) nat: &'a Nat<D>,
    pub(crate) rules: &'a Rules,
    pub(crate) forwards: &'a Forwards,
    pub(crate) inspected: &'a Inspected,
    pub(crate) now_ns: u64,
}

impl<'a, D: Datapath> Planner<'a, D> {
    pub(crate) fn new(
        nat: &'a Nat<D>,
        (rules, forwards): (&'a Rules, &'a Forwards),
        inspected: &'a Inspected,
        now_ns: u64,
    ) -> Self {
        Self {
            nat,
            rules,
            forwards,
            inspected,
            now_ns,
        }
    }

    /// Plans a VM's flow to an address outside its own network. `timestamps`: whether it begins
    /// with a SYN with TCP timestamps. `guest`: its tuple on the guest's link; `None`: it is of a
    /// port of which there is no flow.
    pub(crate) fn outbound(
        &self,
        vm: &VmState,
        to: Destination,
        timestamps: bool,
        guest: Option<&FlowTuple>,
    ) -> Plan {
        let behaviour = self.rules.nat_behaviour(vm.net.id, to.protocol);
        if let Some(plan) = self.hairpin(vm, to, guest, behaviour) {
            return plan;
        }
        if let Some(plan) = self.between_own(vm, to, guest) {
            return plan;
        }
        let verdict = self.rules.judge.borrow().decide(vm.net.id, to, self.now_ns);
        let path = match verdict.inspect {
            true => Path::Inspected,
            false => Path::Translated,
        };
        let mut plan = Plan {
            decision: verdict.decision,
            name: verdict.name,
            path,
            route: None,
            room: None,
            port: None,
            mapped: None,
            refused: None,
        };
        let checked = self.check_outbound(vm, to, (timestamps, guest, behaviour), &mut plan);
        plan.refused = checked.err();
        plan
    }

    /// Fills in the plan. Rules come before quotas, so that denied flows do not use up the quota.
    fn check_outbound(
        &self,
        vm: &VmState,
        to: Destination,
        (timestamps, guest, behaviour): (bool, Option<&FlowTuple>, NatBehaviour),
        plan: &mut Plan,
    ) -> Result<(), Refused> {
        let Nat {
            datapath,
            flows,
            network,
            ..
        } = self.nat;
        let rule = Some(Rules::element_of(plan.decision.rule));
        let by_rule = |reason| Refused { reason, rule };
        if let Some(refusal) = plan.decision.refusal {
            return Err(by_rule(refusal));
        }
        let choose =
            &mut |hops: &[&RouteEntry]| guest.map_or(0, |guest| spread::by_flow(guest)(hops));
        let unknown = || Transport::to(to.protocol, to.port);
        let transport = guest.map_or_else(unknown, Transport::of);
        let route = network.route_choosing(vm.net.id, to.addr, transport, choose);
        plan.route = Some(route);
        // A rule opened an address of the host itself: it has no link to leave by.
        if route == Route::HostLocal {
            return Err(Refusal::Protected.into());
        }
        if route == Route::NoSource {
            return Err(Refusal::NoAddress.into());
        }
        let (_, source) = route.hop().ok_or(Refusal::NoRoute)?;
        let is_inspected = plan.path == Path::Inspected;
        if is_inspected && self.inspected.refuses(vm.net.id, to.protocol).is_some() {
            return Err(by_rule(Refusal::Inspection));
        }
        let room = plan.room.insert(self.room_for_guest(vm));
        room.check(vm, self.now_ns)?;
        let host = self.nat.host_sockets.as_deref();
        if host.is_some_and(|host| host.lacks(to.addr, to.protocol)) {
            return Err(Refusal::NoSocket.into());
        }
        // Its port is the guest's own.
        if vm.net.is_routed_to(to.addr) {
            return Ok(());
        }
        // A port that was inspected is to rest toward its destination.
        // A guest may have given itself the host's own address of IPv6.
        let is_apart = source.is_ipv4() || guest.is_none_or(|guest| guest.local != source);
        let can_be_mapped = flows.mappings.range().is_some() && is_apart;
        if behaviour.is_mapped() && can_be_mapped && !is_inspected {
            plan.mapped = Some(behaviour);
            let inside = guest.and_then(|guest| Inside::of(guest, source));
            let known = inside.and_then(|inside| flows.mappings.external_of(&inside, source));
            let route = known.map(|known| network.keeping_source(vm.net.id, route, to.addr, known));
            plan.route = route.or(plan.route);
            let source = route
                .and_then(Route::hop)
                .map_or(source, |(_, source)| source);
            let pool = Pool {
                protocol: to.protocol,
                nat: source,
            };
            return self.check_mapped(vm.net.id, pool, guest, room);
        }
        let toward = nat_ports::Destination {
            nat: source,
            remote: to.addr,
            remote_port: to.port,
            protocol: to.protocol,
        };
        if is_inspected && !flows.ports.may_inspect(vm.net.id) {
            return Err(Refusal::PortsExhausted.into());
        }
        let what = (toward, vm.net.id, timestamps);
        let look = flows.find_port(datapath, what, &room.leaving(), self.now_ns);
        let has_found = look.has_found();
        plan.port = Some(look);
        match has_found {
            true => Ok(()),
            false => Err(Refusal::PortsExhausted.into()),
        }
    }

    /// Checks whether a guest's port has a translated port of this pool, or could be given one.
    pub(super) fn check_mapped(
        &self,
        vm: VmId,
        pool: Pool,
        guest: Option<&FlowTuple>,
        room: &Room,
    ) -> Result<(), Refused> {
        let flows = &self.nat.flows;
        let port = guest.and_then(|guest| Inside::of(guest, pool.nat));
        let entries = room
            .leaving()
            .into_iter()
            .filter_map(|slot| flows.entry(slot));
        let leaving: Vec<_> = entries
            .filter_map(|entry| Inside::of(&entry.guest, entry.nat))
            .collect();
        let mappings = &flows.mappings;
        match mappings.would_give((vm, pool), port.as_ref(), &leaving) {
            true => Ok(()),
            false => Err(Refusal::PortsExhausted.into()),
        }
    }

    /// Plans a VM's flow to a port that leads to the host's loopback. Returns `None` when the port
    /// leads nowhere.
    pub(crate) fn to_loopback(&self, vm: &VmState, to: Destination) -> Option<Plan> {
        let lead = self.rules.lead(&vm.net, to)?;
        let decision = lead.decision;
        let mut room = None;
        let refused = match decision.refusal {
            Some(reason) => Some(Refused {
                reason,
                rule: Some(Rules::element_of(decision.rule)),
            }),
            None => {
                let room = room.insert(self.room_for_guest(vm));
                room.check(vm, self.now_ns).err().map(Refused::from)
            }
        };
        Some(Plan {
            decision,
            name: None,
            path: Path::Relayed(lead),
            route: None,
            room,
            port: None,
            mapped: None,
            refused,
        })
    }

    pub(super) fn room_for_guest(&self, vm: &VmState) -> Room {
        Room::find(self.nat, vm, false, self.now_ns)
    }
}

/// Whether the first packet of this protocol is assumed to carry TCP timestamps when it is not at
/// hand: most systems' SYNs do.
pub(crate) fn has_timestamps_by_default(protocol: Protocol) -> bool {
    protocol == Protocol::Tcp
}
