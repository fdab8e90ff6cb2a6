//! Addresses of `--host-loopback` and `[host_loopback]`, held against the guests' network.
use std::net::Ipv4Addr;

use slipgate_policy::{
    LoopbackPorts,
    document::{ConfigError, PolicyFile, PutPolicy},
};

use super::{Config, VmConfig};

const FLAG: &str = "--host-loopback";

impl Config {
    /// Checks that guests can reach each address, and that it has no other use in their network.
    ///
    /// # Errors
    /// An address is unsuitable; the error names those that are possible.
    pub(super) fn check_host_loopback(&self) -> Result<(), ConfigError> {
        for entry in &self.flags.host_loopback {
            if let Some(address) = entry.address
                && let Some(problem) = self.not_reached(address)
            {
                return Err(ConfigError::new(FLAG, address, problem, self.may_be()));
            }
        }
        let put = self.named_policies.values().map(PutPolicy::file);
        let mut files = self.base_file.iter().chain(put);
        files.try_for_each(|file| self.check_loopback_in(file))
    }

    /// Checks the addresses in a file with policies.
    ///
    /// # Errors
    /// As [`Config::check_host_loopback`].
    pub(crate) fn check_loopback_in(&self, file: &PolicyFile) -> Result<(), ConfigError> {
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

    /// Checks a VM's own addresses.
    ///
    /// # Errors
    /// As [`Config::check_host_loopback`].
    pub(crate) fn check_loopback_of(&self, vm: &VmConfig) -> Result<(), ConfigError> {
        for address in vm.host_loopback.iter().filter_map(|entry| entry.address) {
            let own = || "that is the guest's own address".to_owned();
            let problem = self.not_reached(address);
            let problem = problem.or_else(|| (vm.ip == address).then(own));
            if let Some(problem) = problem {
                return Err(ConfigError::new(
                    "host_loopback",
                    address,
                    problem,
                    self.may_be(),
                ));
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
