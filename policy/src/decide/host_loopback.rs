//! Where a destination leads that a policy lists as a port of the host's loopback.
//!
//! What is listed is let in for being listed: neither the default nor the safe defaults stand
//! against it. A rule by address that denies does, wherever it stands in the order, unless one that
//! allows comes first; and so does one that inspects, for nothing here is inspected.
use std::net::Ipv4Addr;

use slipgate_abi::Refusal;

use crate::{Decision, Destination, Policy};

/// Where a listed destination leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lead {
    /// The port of the host's 127.0.0.1.
    pub host_port: u16,
    /// The entry as written.
    pub text: String,
    /// What the rules by address say. It is refused where a rule stands against it, else not,
    /// whatever rule is named.
    pub decision: Decision,
}

impl Policy {
    /// Where a destination leads that is listed as a port of the host's loopback. `gateway`: the
    /// gateway's address as the guest sees it.
    pub fn host_loopback(&self, to: Destination, gateway: Ipv4Addr) -> Option<Lead> {
        let mut entries = self.settings().host_loopback.iter();
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

    /// Whether an address is one whose ports may lead to the host's loopback.
    pub fn has_loopback_at(&self, addr: Ipv4Addr, gateway: Ipv4Addr) -> bool {
        let mut entries = self.settings().host_loopback.iter();
        entries.any(|entry| entry.address.unwrap_or(gateway) == addr)
    }

    /// [`Policy::host_loopback`] in sentences, one a line.
    pub fn explain_loopback(&self, to: Destination, lead: &Lead) -> String {
        let target = to.describe();
        let entry = format!(
            "`{}` leads it to the host's 127.0.0.1:{}",
            lead.text, lead.host_port
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
