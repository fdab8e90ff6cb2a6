//! What admission would do with a new flow of a guest's, and why: the plan.
//!
//! # Theory of operation
//! Making a plan changes nothing and counts nothing, so it can be made for a packet, which commits to
//! it at once ([`super::commit`]), and for `slipgate why`, which prints it. A plan goes as far as it
//! can without asking the kernel to take the flow: rules, route, inspection, cap, rate, and the ports
//! toward the destination. What only the attempt shows (a tuple that another process has, a table that
//! is full) can still refuse what a plan admits; nothing admits what a plan refuses.
use std::rc::Rc;

use slipgate_abi::{Protocol, Refusal};

use super::{Refused, room::Room};
use crate::{
    datapath::Datapath,
    flow::PortLook,
    name_gate::LearntName,
    nat_ports,
    route::Route,
    state::{Core, VmState},
};
use slipgate_policy::{Decision, Destination, Lead};

/// What is to become of a new flow.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The rule that decides, and what it says.
    pub(crate) decision: Decision,
    /// The name that opened the address, where DNS did.
    pub(crate) name: Option<Rc<LearntName>>,
    /// How its packets go.
    pub(crate) path: Path,
    /// How its destination is reached; `None` where that does not matter.
    pub(crate) route: Option<Route>,
    /// Its place among its VM's flows; `None` where that does not matter.
    pub(crate) room: Option<Room>,
    /// Whether a port is left for it; `None` where that does not matter.
    pub(super) port: Option<PortLook>,
    /// Why it may not be; `None`: it may.
    pub(crate) refused: Option<Refused>,
}

/// How the packets of a flow go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Path {
    /// The kernel translates them, from the first one on.
    Translated,
    /// The engine carries them until it has read a name that the rules let in; then the kernel
    /// translates them.
    Inspected,
    /// The engine relays them to a port of the host's loopback.
    Relayed(Lead),
}

impl<D: Datapath> Core<D> {
    /// What is to become of a flow of this VM to an address that is not of its own network.
    /// `timestamps`: whether it begins with a SYN that carries them.
    pub(crate) fn plan_outbound(
        &self,
        vm: &VmState,
        to: Destination,
        timestamps: bool,
        now_ns: u64,
    ) -> Plan {
        let verdict = self.judge.borrow().decide(vm.net.id, to, now_ns);
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
            refused: None,
        };
        let checked = self.check_outbound(vm, to, timestamps, &mut plan, now_ns);
        plan.refused = checked.err();
        plan
    }

    /// Rules come before quotas, so that what may never be does not use up what may.
    fn check_outbound(
        &self,
        vm: &VmState,
        to: Destination,
        timestamps: bool,
        plan: &mut Plan,
        now_ns: u64,
    ) -> Result<(), Refused> {
        let rule = Some(self.rule_base + plan.decision.rule.0);
        let by_rule = |reason| Refused { reason, rule };
        if let Some(refusal) = plan.decision.refusal {
            return Err(by_rule(refusal));
        }
        let route = self.routes.lookup(to.addr);
        plan.route = Some(route);
        // A rule opened an address of the host's own: it has no link to leave by.
        if route == Route::HostLocal {
            return Err(Refusal::Protected.into());
        }
        let (_, source) = route.hop().ok_or(Refusal::NoRoute)?;
        let is_inspected = plan.path == Path::Inspected;
        if is_inspected && self.inspected.refuses(vm.net.id, to.protocol).is_some() {
            return Err(by_rule(Refusal::Inspection));
        }
        let room = plan.room.insert(self.room_for_guest(vm, now_ns));
        room.check(vm, now_ns)?;
        let toward = nat_ports::Destination {
            nat: source.into(),
            remote: to.addr.into(),
            remote_port: to.port,
            protocol: to.protocol,
        };
        let (flows, datapath) = (&self.flows, &self.datapath);
        if is_inspected && !flows.ports.may_inspect(vm.net.id) {
            return Err(Refusal::PortsExhausted.into());
        }
        let what = (toward, vm.net.id, timestamps);
        let look = flows.look_for_port(datapath, what, &room.leaving(), now_ns);
        let has_found = look.has_found();
        plan.port = Some(look);
        match has_found {
            true => Ok(()),
            false => Err(Refusal::PortsExhausted.into()),
        }
    }

    /// What is to become of a flow of this VM to a port that leads to the host's loopback; `None`: it
    /// leads nowhere.
    pub(crate) fn plan_to_loopback(
        &self,
        vm: &VmState,
        to: Destination,
        now_ns: u64,
    ) -> Option<Plan> {
        let lead = self.lead(&vm.net, to)?;
        let decision = lead.decision;
        let mut room = None;
        let refused = match decision.refusal {
            Some(reason) => Some(Refused {
                reason,
                rule: Some(self.rule_base + decision.rule.0),
            }),
            None => {
                let room = room.insert(self.room_for_guest(vm, now_ns));
                room.check(vm, now_ns).err().map(Refused::from)
            }
        };
        Some(Plan {
            decision,
            name: None,
            path: Path::Relayed(lead),
            route: None,
            room,
            port: None,
            refused,
        })
    }
}

/// Whether a packet of this protocol carries TCP timestamps, as far as that is known without it: most
/// systems' SYNs do.
pub(crate) fn has_timestamps_by_default(protocol: Protocol) -> bool {
    protocol == Protocol::Tcp
}
