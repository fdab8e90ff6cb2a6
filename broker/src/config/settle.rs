//! Which policy and which quotas each VM has: flags and a policy file together.
//!
//! Rules that were typed come before the file's, in every policy of it; a flag beats the file's
//! value, and what `--vm` says of one VM beats the flag.
use std::{ops::RangeInclusive, path::Path};

use slipgate_policy::document::{
    ConfigError, Forward, Limits, LoadedPolicies, PolicyFile, Reader, VmChoice, check_dns,
    check_vms, forwards, policy_of, quotas_of,
};

use super::{Config, files::from_disk};

/// Reads a policy file from the disk.
///
/// # Errors
/// It can't be read, or says what can't be meant.
pub fn read_policy_file(path: &Path) -> Result<PolicyFile, ConfigError> {
    let text = from_disk(path).map_err(|e| {
        let problem = format!("it can't be read ({e})");
        ConfigError::of_file(path, problem, "give a policy file, in TOML")
    })?;
    PolicyFile::parse(path, text)
}

impl Config {
    /// Reads the policy file, if there is one, and works out what follows: each VM's policy and
    /// quotas, and the forwards.
    ///
    /// # Errors
    /// The file can't be used, or flags and file contradict each other.
    pub fn settle(&mut self) -> Result<(), ConfigError> {
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
        check_nat_ports(&self.nat_ports, &self.forwards)?;
        self.policy_file = file;
        self.check_host_loopback()
    }

    /// Its policies, with the deny files that they name; `read`: how these are had.
    ///
    /// # Errors
    /// A deny file can't be read, or a rule can't be meant.
    pub fn load_policies_by(&self, read: Reader<'_>) -> Result<LoadedPolicies, ConfigError> {
        let loaded = LoadedPolicies::of(&self.typed, self.policy_file.as_ref(), read)?;
        loaded.with_host_loopback(&self.typed.host_loopback)
    }

    /// The same, with deny files read from the disk.
    ///
    /// # Errors
    /// As [`Config::load_policies_by`].
    pub fn load_policies(&self) -> Result<LoadedPolicies, ConfigError> {
        self.load_policies_by(&from_disk)
    }
}

fn check_nat_ports(range: &RangeInclusive<u16>, forwards: &[Forward]) -> Result<(), ConfigError> {
    if let Some(f) = forwards.iter().find(|f| range.contains(&f.host_port)) {
        return Err(ConfigError::new(
            "--nat-ports",
            format!("{}-{}", range.start(), range.end()),
            format!("it covers port {}, which is forwarded", f.host_port),
            "forward another port, or give another range",
        ));
    }
    Ok(())
}
