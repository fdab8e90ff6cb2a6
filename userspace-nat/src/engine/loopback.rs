//! Ports of the gateway that lead to the host's loopback: who may open a connection there.
//!
//! Like any other flow it is admitted once: it must be listed by the VM's policy, no rule may stand
//! against it ([`Policy::host_loopback`](slipgate_policy::Policy::host_loopback)), and it counts toward
//! the VM's cap and rate. The [relay](crate::relay) carries it then.
use std::net::Ipv4Addr;

use slipgate_abi::{Direction, Protocol, Refusal};

use super::core::{Core, VmState};
use crate::{
    admission::{Opener, Refused, opens},
    datapath::Datapath,
    packet::Packet,
    relay::{Opening, Standing},
    vm::VmNet,
};
use slipgate_policy::{Destination, Lead, OnReload};

impl<D: Datapath> Core<D> {
    /// Whether ports of an address may lead there.
    pub(super) fn leads_to_loopback(&self, vm: &VmNet, addr: Ipv4Addr) -> bool {
        let judge = self.judge.borrow();
        judge.policy(vm.id).has_loopback_at(addr, vm.gateway)
    }

    /// Where a destination leads there.
    pub(super) fn lead(&self, vm: &VmNet, to: Destination) -> Option<Lead> {
        let judge = self.judge.borrow();
        judge.policy(vm.id).host_loopback(to, vm.gateway)
    }

    /// Decides about a guest's packet that no relayed connection has; `None`: it opens none, or is
    /// for no port that leads to the host's loopback.
    pub(super) fn admit_to_loopback(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        now_ns: u64,
    ) -> Option<Result<Opening, Refusal>> {
        let tuple = packet.tuple(vm.net.id, Direction::Tx)?;
        opens(packet)?;
        let to = Destination {
            addr: tuple.remote.into(),
            port: tuple.remote_port,
            protocol: Protocol::from_ip(tuple.protocol)?,
        };
        let lead = self.lead(&vm.net, to)?;
        let refused = match lead.decision.refusal {
            Some(reason) => {
                let rule = self.rule_base + lead.decision.rule.0;
                vm.net.stats.refused_by(rule);
                Err(Refused {
                    reason,
                    rule: Some(rule),
                })
            }
            None => self
                .charge(vm, Opener::Guest, now_ns)
                .map_err(Refused::from),
        };
        if let Err(refused) = refused {
            let reason = refused.reason;
            self.refuse(vm.net.id, &tuple, refused, now_ns);
            return Some(Err(reason));
        }
        Some(Ok(Opening {
            host_port: lead.host_port,
            rule: lead.text.into(),
        }))
    }

    /// What the rules of now say of a connection that lives.
    pub(super) fn stands(&self, vm: &VmNet, to: Destination, host_port: u16) -> Standing {
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
