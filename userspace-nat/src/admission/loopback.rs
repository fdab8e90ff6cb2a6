//! Ports of the gateway that lead to the host's loopback: who may open a connection there.
//!
//! Like any other flow it is admitted once: it must be listed by the VM's policy, no rule may stand
//! against it ([`Policy::host_loopback`](slipgate_policy::Policy::host_loopback)), and it counts toward
//! the VM's cap and rate. The [relay](crate::relay) carries it then.
use std::net::Ipv4Addr;

use crate::{datapath::Datapath, relay::Standing, state::Core, vm::VmNet};
use slipgate_policy::{Destination, Lead, OnReload};

impl<D: Datapath> Core<D> {
    /// Whether ports of an address may lead there.
    pub(crate) fn leads_to_loopback(&self, vm: &VmNet, addr: Ipv4Addr) -> bool {
        let judge = self.judge.borrow();
        judge.policy(vm.id).has_loopback_at(addr, vm.gateway)
    }

    /// Where a destination leads there.
    pub(crate) fn lead(&self, vm: &VmNet, to: Destination) -> Option<Lead> {
        let judge = self.judge.borrow();
        judge.policy(vm.id).host_loopback(to, vm.gateway)
    }

    /// What the rules of now say of a connection that lives.
    pub(crate) fn stands(&self, vm: &VmNet, to: Destination, host_port: u16) -> Standing {
        match self.lead(vm, to) {
            Some(lead) if lead.decision.is_allowed() && lead.host_port == host_port => {
                Standing::Stands
            }
            _ => match self.judge.borrow().on_reload(vm.id) {
                OnReload::Keep => Standing::Left,
                OnReload::Cut => Standing::Cut,
            },
        }
    }
}
