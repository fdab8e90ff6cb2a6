//! Which policy and which quotas each VM has: flags and a policy file together.
//!
//! Rules that were typed come before the file's, in every policy of it; a flag beats the file's
//! value, and what `--vm` says of one VM beats the flag.
use std::path::Path;

use slipgate_policy::{
    Action,
    document::{
        CliOverrides, ConfigError, Limits, LoadedPolicies, PolicyFile, Quotas, Reader, RuleFlag,
        VmChoice, check_dns, check_vms, forwards, parse_host_loopback, policy_of, quotas_of,
    },
};

use super::{Config, file::from_disk};
use crate::args::{DefaultRule, NatArgs};

/// What the flags say of policies. `rules`: the rule flags as typed.
pub(super) fn overrides(nat: &NatArgs, rules: Vec<RuleFlag>) -> Result<CliOverrides, ConfigError> {
    Ok(CliOverrides {
        rules,
        default: nat.default.map(|default| match default {
            DefaultRule::Allow => Action::Allow,
            DefaultRule::Deny => Action::Deny,
        }),
        quotas: Quotas {
            max_flows: nat.max_flows,
            new_flows_per_second: nat.new_flows_per_second,
            tx_bytes_per_second: nat.tx_bytes_per_second,
            rx_bytes_per_second: nat.rx_bytes_per_second,
            tx_packets_per_second: nat.tx_packets_per_second,
            rx_packets_per_second: nat.rx_packets_per_second,
            dns_per_second: nat.dns_per_second,
        },
        dns: nat.dns.clone(),
        forwards: nat.forward.clone(),
        host_loopback: parse_host_loopback(&nat.host_loopback)?,
        file: nat.policy.clone(),
        policy_name: nat.policy_name.clone(),
    })
}

/// Reads a policy file from the disk.
pub(crate) fn read_policy_file(path: &Path) -> Result<PolicyFile, ConfigError> {
    let text = from_disk(path).map_err(|e| {
        let problem = format!("it can't be read ({e})");
        ConfigError::of_file(path, problem, "give a policy file, in TOML")
    })?;
    PolicyFile::parse(path, text)
}

impl Config {
    /// Reads the policy file, if there is one, and works out what follows.
    pub(super) fn settle(&mut self) -> Result<(), ConfigError> {
        let file = self.typed.file.as_deref().map(read_policy_file);
        self.settle_with(file.transpose()?)
    }

    /// Works out what follows from a policy file, or from none.
    pub(super) fn settle_with(&mut self, file: Option<PolicyFile>) -> Result<(), ConfigError> {
        if let Some(name) = &self.typed.policy_name
            && file.is_none()
        {
            let remedy = "give the file that has it by --policy";
            return Err(ConfigError::new(
                "--policy-name",
                name,
                "no --policy",
                remedy,
            ));
        }
        let vms = self.vms.clone();
        for (index, vm) in vms.iter().enumerate() {
            let choice = VmChoice {
                name: &vm.name,
                policy: vm.typed.policy.as_deref(),
            };
            let policy = policy_of(choice, &self.typed, file.as_ref())?;
            let vm = &mut self.vms[index];
            vm.policy = policy;
            vm.limits = Limits::default();
            if let Some(file) = &file {
                vm.limits.change(quotas_of(&file.document, policy));
            }
            vm.limits.change(&self.typed.quotas);
            if let Some(max_flows) = vm.typed.max_flows {
                vm.limits.max_flows = max_flows;
            }
        }
        if let Some(file) = &file {
            check_vms(file)?;
            check_dns(file)?;
            for vm in file.document.vms.keys() {
                if vms.iter().all(|served| served.name != *vm.get_ref()) {
                    tracing::debug!("{}: no VM {} here", file.line(&vm.span()), vm.get_ref());
                }
            }
        }
        self.typed.resolvers()?;
        let names: Vec<&str> = vms.iter().map(|vm| &*vm.name).collect();
        self.forwards = forwards(&self.typed.forwards, file.as_ref(), &names)?;
        super::check_nat_ports(&self.nat_ports, &self.forwards)?;
        self.policy_file = file;
        self.check_host_loopback()
    }

    /// Its policies, with the deny files that they name; `read`: how these are had.
    pub(crate) fn load_policies_by(&self, read: Reader<'_>) -> Result<LoadedPolicies, ConfigError> {
        let loaded = LoadedPolicies::of(&self.typed, self.policy_file.as_ref(), read)?;
        loaded.with_host_loopback(&self.typed.host_loopback)
    }

    /// The same, with deny files read from the disk.
    pub(crate) fn load_policies(&self) -> Result<LoadedPolicies, ConfigError> {
        self.load_policies_by(&from_disk)
    }
}

#[cfg(test)]
#[path = "settle_test.rs"]
mod tests;
