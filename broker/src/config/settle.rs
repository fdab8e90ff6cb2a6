//! Combines flags and policy file into each VM's policy and quotas.
//!
//! Typed rules come before the file's, in every policy of the file. A flag takes precedence over
//! the file's value, and a value in `--vm` takes precedence over the flag.
use std::{borrow::Cow, ops::RangeInclusive, path::Path};

use anyhow::Context as _;
use slipgate_control::Sizes;
use slipgate_ipc::client::VmDefinition;
use slipgate_model::Ipv6Mode;
use slipgate_policy::document::{
    ConfigError, Forward, Limits, LoadedPolicies, PolicyFile, PutPolicy, Quotas, Reader, VmChoice,
    check_clashes, check_dns, check_vms, forwards, policy_of, quotas_named,
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
        let put = std::mem::take(&mut self.named_policies);
        for (name, policy) in put {
            // What the file says of DNS holds for them too.
            let again = PutPolicy::parse(&name, policy.text(), file.as_ref())?;
            self.named_policies.insert(name, again);
        }
        self.base_file = file;
        let file = self.base_file.as_ref();
        if let Some(name) = &self.flags.policy_name
            && file.is_none()
            && self.named_policies.is_empty()
        {
            let remedy = "give the file that has it by --policy";
            return Err(ConfigError::new(
                "--policy-name",
                name,
                "no --policy",
                remedy,
            ));
        }
        let mut vms = std::mem::take(&mut self.vms);
        let settled = vms.iter_mut().try_for_each(|vm| self.choose_policy(vm));
        self.vms = vms;
        settled?;
        for at in 0..self.vms.len() {
            let mut vm = self.vms[at].clone();
            self.assign_prefix(&mut vm)?;
            self.vms[at] = vm;
        }
        if let Some(file) = file {
            check_vms(file, |name| self.named_policies.contains_key(name))?;
            check_dns(file)?;
            for vm in file.document.vms.keys() {
                if self.vms.iter().all(|served| served.name != *vm.get_ref()) {
                    tracing::debug!("{}: no VM {} here", file.line(&vm.span()), vm.get_ref());
                }
            }
        }
        self.flags.resolvers()?;
        if let Some(file) = file.filter(|_| self.is_daemon)
            && let Some(forward) = file.document.forward.first()
        {
            return Err(file.error(
                &forward.span(),
                "a daemon's VMs come later than its policy file",
                "give each VM its forwards: `slipgate vm add NAME --forward ...`",
            ));
        }
        let names: Vec<&str> = self.vms.iter().map(|vm| &*vm.name).collect();
        let given = forwards(&self.flags.forwards, file, &names)?;
        let mode_of = |forward: &Forward| self.vms.get(forward.vm)?.ipv6;
        let mut forwards = self.in_families(given, mode_of)?;
        for forward in &mut forwards {
            let routed = self.vms.get(forward.vm);
            forward.settle_own(routed.and_then(|vm| self.routed_prefix_of(vm)))?;
        }
        check_clashes(&forwards, &names)?;
        self.forwards = forwards;
        self.check_source_ports(&self.forwards)?;
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

    /// Whether a VM has IPv6, or gets it once the uplink leads there, by what is configured.
    pub(crate) fn wants_ipv6(&self) -> bool {
        self.has_mode(|mode| mode != Ipv6Mode::Off)
    }

    /// Whether a VM's IPv6 packets are translated to addresses of the host, or may be, by what is
    /// configured.
    pub(crate) fn translates_ipv6(&self) -> bool {
        self.has_mode(|mode| matches!(mode, Ipv6Mode::Nat | Ipv6Mode::Auto))
    }

    /// Whether this VM's are, or may be.
    pub(crate) fn translates_ipv6_of(&self, vm: &VmConfig) -> bool {
        let mode = vm.ipv6.unwrap_or(self.network.ipv6);
        matches!(mode, Ipv6Mode::Nat | Ipv6Mode::Auto)
    }

    /// Whether a VM has a prefix that is routed to it, or may get one.
    pub(crate) fn may_have_routed_prefixes(&self) -> bool {
        self.is_daemon || self.has_mode(|mode| mode == Ipv6Mode::Routed)
    }

    fn has_mode(&self, is_one: impl Fn(Ipv6Mode) -> bool) -> bool {
        is_one(self.network.ipv6) || self.vms.iter().any(|vm| vm.ipv6.is_some_and(&is_one))
    }

    /// Whether a VM has IPv6 or may get it. A daemon's VM may at any time, and programs can be loaded
    /// at the start alone: the broker gives up the capability for it.
    pub(crate) fn may_have_ipv6(&self) -> bool {
        self.is_daemon || self.wants_ipv6()
    }

    /// Adds the VMs that a predecessor served.
    ///
    /// # Errors
    /// One of them can't be served by these settings; the error names it.
    pub(crate) fn serve_kept(&mut self, kept: &[VmDefinition]) -> anyhow::Result<()> {
        for definition in kept {
            let vm = VmConfig::checked(&self.as_translated(definition), &self.network)
                .and_then(|mut vm| self.settle_vm(&mut vm).map(|()| vm));
            let name = &definition.name;
            let vm = vm.with_context(|| format!("the VM {name}, which was served before"))?;
            self.vms.push(vm);
        }
        Ok(())
    }

    /// A VM's definition, without the single address that it was given while its address was routed: of
    /// a guest that is translated now it can't be the prefix.
    fn as_translated<'a>(&self, definition: &'a VmDefinition) -> Cow<'a, VmDefinition> {
        let is_routed = definition.ipv6.unwrap_or(self.network.ipv6) == Ipv6Mode::Routed;
        let prefix = definition.ipv6_prefix.as_deref();
        let is_single = prefix.is_some_and(|prefix| prefix.ends_with("/128"));
        match is_single && !is_routed {
            false => Cow::Borrowed(definition),
            true => Cow::Owned(VmDefinition {
                ipv6_prefix: None,
                ..definition.clone()
            }),
        }
    }

    /// Derives the policy and the quotas of a further VM, and checks its forwards.
    ///
    /// # Errors
    /// There is no such policy, or a forwarded port is among those of translated flows.
    pub(crate) fn settle_vm(&self, vm: &mut VmConfig) -> Result<(), ConfigError> {
        self.assign_prefix(vm)?;
        self.settle_forwards_of(vm)?;
        self.check_loopback_of(vm)?;
        self.choose_policy(vm)
    }

    /// Derives the forwards of a VM, and checks them.
    ///
    /// # Errors
    /// A forwarded port is among those of translated flows, or the VM lacks what it needs.
    pub(crate) fn settle_forwards_of(&self, vm: &mut VmConfig) -> Result<(), ConfigError> {
        let given = std::mem::take(&mut vm.forwards);
        let mut forwards = self.in_families(given, |_| vm.ipv6)?;
        let routed = self.routed_prefix_of(vm);
        let mut all = forwards.iter_mut();
        all.try_for_each(|forward| forward.settle_own(routed))?;
        check_clashes(&forwards, &[&vm.name])?;
        vm.forwards = forwards;
        self.check_source_ports(&vm.forwards)
    }

    /// Adds the forwards of IPv6 to those that are of both families. A VM or a host without IPv6 has
    /// none. `mode`: what is configured of a forward's VM.
    fn in_families(
        &self,
        given: Vec<Forward>,
        mode: impl Fn(&Forward) -> Option<Ipv6Mode>,
    ) -> Result<Vec<Forward>, ConfigError> {
        let host_has_ipv6 = host_has_ipv6();
        let mut all = Vec::with_capacity(given.len());
        for forward in given {
            let is_off = mode(&forward).unwrap_or(self.network.ipv6) == Ipv6Mode::Off;
            if is_off && forward.host.is_ipv6() {
                let problem = "the VM has no IPv6";
                let remedy =
                    "give it `--ipv6 nat`, `auto` or `routed:PREFIX`, or an address of IPv4";
                return Err(ConfigError::new("--forward", forward.spec, problem, remedy));
            }
            let other = forward.in_ipv6().filter(|_| !is_off && host_has_ipv6);
            // Each is of one from now on.
            all.push(Forward {
                is_of_both: false,
                ..forward
            });
            all.extend(other);
        }
        Ok(all)
    }

    /// Derives the policy and the quotas of a VM.
    fn choose_policy(&self, vm: &mut VmConfig) -> Result<(), ConfigError> {
        let policy = vm.flags.policy_name();
        let choice = VmChoice {
            name: &vm.name,
            policy: policy.as_deref(),
        };
        let file = self.base_file.as_ref();
        vm.policy = policy_of(choice, &self.flags, file, &self.named_policies)?;
        let put = vm
            .policy
            .as_ref()
            .and_then(|name| self.named_policies.get(name));
        let in_file = || Some(quotas_named(&file?.document, vm.policy.as_deref()));
        let quotas = put.and_then(PutPolicy::quotas).or_else(in_file);
        vm.limits = self.limits_by(quotas, vm);
        Ok(())
    }

    /// Returns the limits of a VM with a policy of these quotas.
    pub(crate) fn limits_by(&self, quotas: Option<&Quotas>, vm: &VmConfig) -> Limits {
        let mut limits = Limits::default();
        let all = quotas
            .into_iter()
            .chain([&self.flags.quotas, &vm.flags.quotas]);
        all.for_each(|quotas| limits.change(quotas));
        limits
    }

    /// Loads the policies, with the deny files that they name. `read`: function that reads a file.
    ///
    /// # Errors
    /// A deny file can't be read, or a rule is not valid.
    pub fn load_policies_by(&self, read: Reader<'_>) -> Result<LoadedPolicies, ConfigError> {
        let loaded = LoadedPolicies::of(&self.flags, self.base_file.as_ref(), read)?;
        let mut loaded = loaded.with_host_loopback(&self.flags.host_loopback)?;
        let is_put = |name: &Option<String>| {
            let name = name.as_ref();
            name.is_some_and(|name| self.named_policies.contains_key(name))
        };
        loaded
            .policies
            .retain(|policy| !is_put(&policy.settings.name));
        for put in self.named_policies.values() {
            loaded.policies.push(put.load(&self.flags, read)?);
        }
        self.check_mappings(&loaded)?;
        Ok(loaded)
    }

    /// Checks that there are ports for what policies say of mappings.
    fn check_mappings(&self, loaded: &LoadedPolicies) -> Result<(), ConfigError> {
        let mut all = loaded.policies.iter().map(|policy| &policy.settings);
        let asking = all.find(|settings| settings.nat.is_mapped());
        let Some(settings) = asking.filter(|_| self.eim_ports.is_none()) else {
            return Ok(());
        };
        Err(ConfigError::new(
            "--policy",
            settings.source(),
            "it asks for endpoint-independent mapping, for which there are no ports",
            "give some, which the host does not use, like --eim-ports 20000-24095",
        ))
    }

    /// Returns the ranges of the source ports of translated flows.
    pub(crate) fn source_ports(&self) -> impl Iterator<Item = &RangeInclusive<u16>> {
        std::iter::once(&self.nat_ports).chain(&self.eim_ports)
    }

    fn check_source_ports(&self, forwards: &[Forward]) -> Result<(), ConfigError> {
        // The guest's own address has all ports.
        let of_host = forwards.iter().filter(|forward| !forward.is_own);
        check_ports("--nat-ports", &self.nat_ports, of_host)?;
        let Some(range) = &self.eim_ports else {
            return Ok(());
        };
        if range.start() <= self.nat_ports.end() && self.nat_ports.start() <= range.end() {
            let nat = &self.nat_ports;
            return Err(ConfigError::new(
                "--eim-ports",
                format!("{}-{}", range.start(), range.end()),
                format!("it overlaps --nat-ports {}-{}", nat.start(), nat.end()),
                "give ranges that have no port in common",
            ));
        }
        // The programs' table tells no port of the range that is a mapping's from another.
        check_ports("--eim-ports", range, forwards)
    }

    /// Loads the policies, with deny files read from the disk.
    ///
    /// # Errors
    /// As [`Config::load_policies_by`].
    pub fn load_policies(&self) -> Result<LoadedPolicies, ConfigError> {
        self.load_policies_by(&from_disk)
    }
}

/// Whether the host's kernel has IPv6 at all: `ipv6.disable=1` takes it away.
fn host_has_ipv6() -> bool {
    Path::new("/proc/net/if_inet6").exists()
}

fn check_ports<'f>(
    flag: &'static str,
    range: &RangeInclusive<u16>,
    forwards: impl IntoIterator<Item = &'f Forward>,
) -> Result<(), ConfigError> {
    let mut forwards = forwards.into_iter();
    if let Some(f) = forwards.find(|f| range.contains(&f.host_port)) {
        return Err(ConfigError::new(
            flag,
            format!("{}-{}", range.start(), range.end()),
            format!("it covers port {}, which is forwarded", f.host_port),
            "forward another port, or give another range",
        ));
    }
    Ok(())
}
