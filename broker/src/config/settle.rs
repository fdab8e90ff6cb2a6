//! Combines flags and policy file into each VM's policy and quotas.
//!
//! Typed rules come before the file's, in every policy of the file. A flag takes precedence over
//! the file's value, and a value in `--vm` takes precedence over the flag.
use std::{ops::RangeInclusive, path::Path};

use anyhow::Context as _;
use slipgate_control::Sizes;
use slipgate_ipc::client::VmDefinition;
use slipgate_policy::document::{
    CliOverrides, ConfigError, Forward, Limits, LoadedPolicies, PolicyFile, Reader, VmChoice,
    check_dns, check_vms, forwards, policy_of, quotas_of, with_named,
};

use super::{Config, VmConfig, files::from_disk};

/// Reads a policy file from the disk.
///
/// # Errors
/// The file can't be read or is not valid.
pub fn read_policy_file(path: &Path) -> Result<PolicyFile, ConfigError> {
    let text = from_disk(path).map_err(|e| {
        let problem = format!("it can't be read ({e})");
        ConfigError::of_file(path, problem, "give a policy file, in TOML")
    })?;
    PolicyFile::parse(path, text)
}

impl Config {
    /// Reads the policy file, if there is one, and derives each VM's policy and quotas, and the
    /// forwards.
    ///
    /// # Errors
    /// The file can't be used, or flags and file contradict each other.
    pub fn settle(&mut self) -> Result<(), ConfigError> {
        let file = self.flags.file.as_deref().map(read_policy_file);
        self.settle_with(file.transpose()?)
    }

    /// Derives policies, quotas and forwards from a policy file, or from none.
    pub(super) fn settle_with(&mut self, file: Option<PolicyFile>) -> Result<(), ConfigError> {
        self.base_file = file.clone();
        let file = with_named(file, &self.named_policies)?;
        if let Some(name) = &self.flags.policy_name
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
        for vm in &mut self.vms {
            settle_vm(vm, &self.flags, file.as_ref())?;
        }
        if let Some(file) = &file {
            check_vms(file)?;
            check_dns(file)?;
            for vm in file.document.vms.keys() {
                if self.vms.iter().all(|served| served.name != *vm.get_ref()) {
                    tracing::debug!("{}: no VM {} here", file.line(&vm.span()), vm.get_ref());
                }
            }
        }
        self.flags.resolvers()?;
        if let Some(file) = file.as_ref().filter(|_| self.is_daemon)
            && let Some(forward) = file.document.forward.first()
        {
            return Err(file.error(
                &forward.span(),
                "a daemon's VMs come later than its policy file",
                "give each VM its forwards: `slipgate vm add NAME --forward ...`",
            ));
        }
        let names: Vec<&str> = self.vms.iter().map(|vm| &*vm.name).collect();
        self.forwards = forwards(&self.flags.forwards, file.as_ref(), &names)?;
        check_nat_ports(&self.nat_ports, &self.forwards)?;
        self.policy_file = file;
        self.check_host_loopback()
    }

    /// Sizes with which the maps are made, if they are not there.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            slots: self.flow_table,
            vms: self.max_vms,
            rules: self.max_rules,
        }
    }

    /// Adds the VMs that a predecessor served.
    ///
    /// # Errors
    /// One of them can't be served by these settings; the error names it.
    pub(crate) fn serve_kept(&mut self, kept: &[VmDefinition]) -> anyhow::Result<()> {
        for definition in kept {
            let vm = VmConfig::checked(definition, &self.network)
                .and_then(|mut vm| self.settle_vm(&mut vm).map(|()| vm));
            let name = &definition.name;
            let vm = vm.with_context(|| format!("the VM {name}, which was served before"))?;
            self.vms.push(vm);
        }
        Ok(())
    }

    /// Derives the policy and the quotas of a further VM, and checks its forwards.
    ///
    /// # Errors
    /// There is no such policy, or a forwarded port is among those of translated flows.
    pub(crate) fn settle_vm(&self, vm: &mut VmConfig) -> Result<(), ConfigError> {
        check_nat_ports(&self.nat_ports, &vm.forwards)?;
        self.check_loopback_of(vm)?;
        settle_vm(vm, &self.flags, self.policy_file.as_ref())
    }

    /// Loads the policies, with the deny files that they name. `read`: function that reads a file.
    ///
    /// # Errors
    /// A deny file can't be read, or a rule is not valid.
    pub fn load_policies_by(&self, read: Reader<'_>) -> Result<LoadedPolicies, ConfigError> {
        let loaded = LoadedPolicies::of(&self.flags, self.policy_file.as_ref(), read)?;
        loaded.with_host_loopback(&self.flags.host_loopback)
    }

    /// Loads the policies, with deny files read from the disk.
    ///
    /// # Errors
    /// As [`Config::load_policies_by`].
    pub fn load_policies(&self) -> Result<LoadedPolicies, ConfigError> {
        self.load_policies_by(&from_disk)
    }
}

fn settle_vm(
    vm: &mut VmConfig,
    flags: &CliOverrides,
    file: Option<&PolicyFile>,
) -> Result<(), ConfigError> {
    let policy = vm.flags.policy_name();
    let choice = VmChoice {
        name: &vm.name,
        policy: policy.as_deref(),
    };
    vm.policy = policy_of(choice, flags, file)?;
    vm.limits = Limits::default();
    if let Some(file) = file {
        vm.limits.change(quotas_of(&file.document, vm.policy));
    }
    vm.limits.change(&flags.quotas);
    vm.limits.change(&vm.flags.quotas);
    Ok(())
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
