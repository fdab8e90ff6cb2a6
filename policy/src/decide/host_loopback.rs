//! Decision about destinations that a policy lists as ports of the host's loopback.
//!
//! An entry admits by itself: neither the default nor the safe defaults apply to it. A rule by
//! address that denies has precedence, wherever it stands, unless a rule that allows comes first. A
//! rule that inspects refuses too, because nothing on this way is inspected.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use slipgate_abi::Refusal;

use crate::{Decision, Destination, LoopbackPorts, Policy};

/// Target of a listed destination, and the decision about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lead {
    /// Port of the host's loopback that the destination leads to ([`Lead::service`]).
    pub host_port: u16,
    /// Entry that lists the destination, as shown to the user.
    pub text: String,
    /// Decision by the rules by address. It is refused only if a typed rule denies or inspects the
    /// destination; `rule` is set in every case.
    pub decision: Decision,
}

impl Lead {
    /// Returns the address on the host's loopback, of the family by which the guest comes.
    pub fn service(&self, to: Destination) -> SocketAddr {
        let loopback = match to.addr {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        SocketAddr::new(loopback, self.host_port)
    }
}

impl Policy {
    /// Returns the target of a destination that is listed as a port of the host's loopback; `None`
    /// if it is not listed. `own`: the VM's entries, which come before the policy's. `gateway`: the
    /// gateway's address as the guest sees it.
    pub fn host_loopback(
        &self,
        own: &[LoopbackPorts],
        to: Destination,
        gateway: IpAddr,
    ) -> Option<Lead> {
        let mut entries = own.iter().chain(&self.settings().host_loopback);
        let (entry, host_port) = entries.find_map(|e| Some((e, e.leads(to, gateway)?)))?;
        let decided = self.decide(to);
        let refusal = match self.place_of(decided.rule) {
            Some(_) if self.inspects(decided.rule) => Some(Refusal::Inspection),
            Some(_) => decided.refusal,
            None => None,
        };
        let name = self.settings().name.as_ref();
        let of = name.map(|name| format!("[{name}] "));
        Some(Lead {
            host_port,
            text: format!("{}{entry}", of.unwrap_or_default()),
            decision: Decision { refusal, ..decided },
        })
    }

    /// Whether some port of an address may lead to the host's loopback. `own`: the VM's entries.
    pub fn has_loopback_at(&self, own: &[LoopbackPorts], addr: IpAddr, gateway: IpAddr) -> bool {
        let mut entries = own.iter().chain(&self.settings().host_loopback);
        entries.any(|entry| addr == entry.address.map_or(gateway, IpAddr::V4))
    }

    /// Explains a result of [`Policy::host_loopback`] in sentences, one per line.
    pub fn explain_loopback(&self, to: Destination, lead: &Lead) -> String {
        let target = to.describe();
        let entry = format!(
            "`{}` leads it to the host's {}",
            lead.text,
            lead.service(to)
        );
        match lead.decision.refusal {
            None => format!("{target} is allowed: {entry}."),
            Some(Refusal::Inspection) => format!(
                "{target} is refused by {}: {entry}, and nothing there is inspected.",
                self.named(lead.decision)
            ),
            Some(_) => format!(
                "{target} is refused by {}: {entry}, but a rule that denies has precedence.",
                self.named(lead.decision)
            ),
        }
    }
}

#[cfg(test)]
#[path = "host_loopback_test.rs"]
mod tests;
