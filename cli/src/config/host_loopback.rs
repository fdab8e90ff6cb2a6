//! `--host-loopback [ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]` and `[host_loopback]`: ports of the
//! gateway that lead to the host's 127.0.0.1.
use std::net::Ipv4Addr;

use userspace_nat::rules::{LoopbackError, LoopbackPorts};

use super::{
    Config, ConfigError, LoadedPolicies,
    policy_file::{HostLoopback, PolicyFile},
};

const FLAG: &str = "--host-loopback";
const FORMS: &str = "give 8080, 9000-9010/udp or 8080:80/tcp (the guest's port, then the host's)";
const ONCE: &str = "give each port once, in flags and file";

/// The flags'.
pub(super) fn parse(specs: &[String]) -> Result<Vec<LoopbackPorts>, ConfigError> {
    let mut all = Vec::new();
    for spec in specs {
        let entry = spec.parse().map(typed);
        entry
            .and_then(|entry: LoopbackPorts| entry.add_to(&mut all))
            .map_err(|e| ConfigError::new(FLAG, spec, e.to_string(), remedy(&e)))?;
    }
    Ok(all)
}

fn typed(entry: LoopbackPorts) -> LoopbackPorts {
    LoopbackPorts {
        typed: true,
        ..entry
    }
}

fn remedy(error: &LoopbackError) -> &'static str {
    match error {
        LoopbackError::Twice(..) => ONCE,
        LoopbackError::TooMany => "give ranges, or let the service listen on fewer",
        LoopbackError::Ours(..) => {
            "give another port of the guest's: 5300:53 leads to the host's 53"
        }
        _ => FORMS,
    }
}

/// A policy's, as its file says; behind those typed, which are in each policy.
pub(super) fn of_file(
    file: &PolicyFile,
    said: &HostLoopback,
) -> Result<Vec<LoopbackPorts>, ConfigError> {
    let mut all = Vec::new();
    for entry in &said.ports {
        let parsed = entry.get_ref().to_string().parse();
        let added = parsed.and_then(|parsed: LoopbackPorts| {
            let address = said.address.as_ref().map(|address| *address.get_ref());
            let address = parsed.address.or(address);
            LoopbackPorts { address, ..parsed }.add_to(&mut all)
        });
        added.map_err(|e| file.error(&entry.span(), e.to_string(), remedy(&e)))?;
    }
    Ok(all)
}

impl LoadedPolicies {
    /// The same with what was typed, which is in each policy.
    pub(super) fn with_host_loopback(
        mut self,
        typed: &[LoopbackPorts],
    ) -> Result<Self, ConfigError> {
        for policy in &mut self.policies {
            let mut all = typed.to_vec();
            for entry in policy.settings.host_loopback.drain(..) {
                // Said of the file's entry: the flag alone was right.
                let text = entry.to_string();
                entry.add_to(&mut all).map_err(|e| {
                    let given = text.split_once(' ').map_or("", |(_, given)| given);
                    let problem = format!("the policy file's entry clashes with a flag: {e}");
                    ConfigError::new(FLAG, given, problem, ONCE)
                })?;
            }
            policy.settings.host_loopback = all;
        }
        Ok(self)
    }
}

impl Config {
    /// Whether each address is one that guests reach, and nobody else's.
    pub(super) fn check_host_loopback(&self) -> Result<(), ConfigError> {
        for entry in &self.typed.host_loopback {
            if let Some(address) = entry.address
                && let Some(problem) = self.not_reached(address)
            {
                return Err(ConfigError::new(FLAG, address, problem, self.may_be()));
            }
        }
        let Some(file) = &self.policy_file else {
            return Ok(());
        };
        let named = file.document.policy.values();
        let sections = named.map(|policy| &policy.host_loopback);
        for said in sections.chain([&file.document.host_loopback]) {
            let address = said.address.as_ref();
            let of_all = address.map(|address| (*address.get_ref(), address.span()));
            let own = said.ports.iter().filter_map(|entry| {
                let parsed: LoopbackPorts = entry.get_ref().to_string().parse().ok()?;
                Some((parsed.address?, entry.span()))
            });
            for (address, span) in of_all.into_iter().chain(own) {
                if let Some(problem) = self.not_reached(address) {
                    let problem = format!("{address}: {problem}");
                    return Err(file.error(&span, problem, self.may_be()));
                }
            }
        }
        Ok(())
    }

    fn not_reached(&self, address: Ipv4Addr) -> Option<String> {
        if let Err(e) = self.network.check_host(FLAG, "", address) {
            return Some(e.problem);
        }
        let guest = self.vms.iter().find(|vm| vm.ip == address)?;
        Some(format!("that is the address of the guest {}", guest.name))
    }

    fn may_be(&self) -> String {
        format!(
            "leave it out, and it is the gateway's, {}; or give another of the guests' network",
            self.network.gateway
        )
    }
}

#[cfg(test)]
#[path = "host_loopback_test.rs"]
mod tests;
