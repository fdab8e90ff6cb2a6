//! The definition of the guest as clients of the API see and change it, and the policies that they put.
//!
//! A policy or a definition is put in force as the policy files are ([`super::policy`]). Of the definition
//! that is its policy, quotas, labels, forwards, ports of the host's loopback and the silence after which it
//! is idle; the rest is the command line's for as long as the guest runs.
use slipgate_ipc::client::{
    ClientAnswer, ClientId, PolicyStatus, Replaces, Version, VmChange, VmDefinition, VmState,
    VmStatus,
};
use slipgate_policy::document::{
    Forward, LoadedPolicies, PutPolicy, check_named, inline_name, is_inline,
};

use super::{Served, policy::Changed};
use crate::{
    config::{Config, VmConfig},
    kernel_state::ipv6_status,
    policy_apply::check_unused,
};

/// Other forwards, if there are some, and the configuration with its policies.
type Prepared = (Option<Vec<Forward>>, (LoadedPolicies, Config));

/// A TAP's name that any definition may have: user mode has no TAP.
const NO_TAP: &str = "none";

impl Served {
    /// The VM with its present state.
    pub(super) fn status(&self) -> VmStatus {
        let maps = &self.place.memory.maps;
        let row = self.place.open.row;
        let ipv6 = self.vm.spec.ipv6.map(|net| {
            let guests = maps.vm6(row).map(|row| row.copy().guests);
            ipv6_status(&net, guests.into_iter().flatten())
        });
        VmStatus {
            definition: self.definition(),
            id: self.place.open.id,
            worker: 0,
            generation: self.definitions,
            state: match maps.is_frozen(row) {
                true => VmState::Frozen,
                false => VmState::Served,
            },
            idle: self.vm.spec.is_idle,
            lacks_uplink: false,
            guest_ipv6: ipv6,
            unserved_forwards: Vec::new(),
        }
    }

    fn definition(&self) -> VmDefinition {
        let name = self.vm.spec.name.clone();
        let vm = self.nat.vms.first();
        let definition = vm.map_or_else(|| VmDefinition::new(name, ""), VmConfig::definition);
        VmDefinition {
            tap: String::new(),
            forwards: self.forwards.specs(),
            ..definition
        }
    }

    /// Gives the VM another definition, as far as that can be while its guest runs.
    pub(super) fn put_vm(
        &mut self,
        client: ClientId,
        vm: VmDefinition,
        replaces: &Replaces,
        has_tap: bool,
    ) -> anyhow::Result<()> {
        // What would be replaced is not in force yet.
        if self.is_changing(client.into()) {
            return Ok(());
        }
        let now = self.definition();
        let served = &now.name;
        if vm.name != *served {
            let why = format!(
                "{}: this slipgate serves {served}, the guest of its command, and no other: start a command \
                 for each, or have VMs served by `slipgate serve`",
                vm.name
            );
            self.clients.answer(client, &ClientAnswer::error(why));
            return Ok(());
        }
        if !replaces.permits(Some(now.version())) {
            let answer = ClientAnswer::replaced(served, true);
            self.clients.answer(client, &answer);
            return Ok(());
        }
        let vm = with_command_line(vm, &now);
        if let Some(field) = other_field(&now, &vm).or(has_tap.then_some("tap")) {
            let why = format!(
                "{field}: in user mode it stays as the command line has it: leave it out, or start the \
                 command again with another one"
            );
            self.clients.answer(client, &ClientAnswer::error(why));
            return Ok(());
        }
        if vm == now {
            let answer = ClientAnswer::Vm {
                vm: Box::new(self.status()),
                change: VmChange::Unchanged,
            };
            self.clients.answer(client, &answer);
            return Ok(());
        }
        let prepared = self.with_definition(vm, &now).and_then(|(new, changed)| {
            // Last, so that no port is taken for a definition that can't be.
            let forwards = new.map(|new| self.forwards.reserve_change(new));
            Ok((forwards.transpose()?, changed))
        });
        let policy_of = |nat: &Config| nat.vms.first().and_then(|vm| vm.policy.clone());
        let (forwards, changed) = match prepared {
            Ok((forwards, changed)) => (forwards, Ok(changed)),
            Err(e) => (None, Err(e)),
        };
        let has_other_policy = changed
            .as_ref()
            .is_ok_and(|(_, config)| policy_of(config) != policy_of(&self.nat));
        let what = Changed::Vm {
            has_other_policy,
            forwards,
        };
        self.change(client.into(), changed, what)
    }

    /// Returns the forwards of another definition, if it has others, and the configuration with the rest.
    fn with_definition(&self, vm: VmDefinition, now: &VmDefinition) -> anyhow::Result<Prepared> {
        let has_other_forwards = vm.forwards != now.forwards;
        let vm = VmDefinition {
            tap: NO_TAP.into(),
            // More may be held by the command line than a definition may have.
            forwards: match has_other_forwards {
                true => vm.forwards,
                false => Vec::new(),
            },
            ..vm
        };
        let mut new = VmConfig::checked(&vm, &self.nat.network)?;
        self.nat.settle_forwards_of(&mut new)?;
        let mut config = self.nat.clone();
        config.named_policies.retain(|name, _| !is_inline(name));
        if let Some(text) = &new.flags.inline_policy {
            let name = inline_name(text);
            let policy = PutPolicy::parse(&name, text, config.base_file.as_ref())?;
            config.named_policies.insert(name, policy);
        }
        for served in &mut config.vms {
            served.flags = new.flags.clone();
            served.labels = new.labels.clone();
            served.host_loopback = new.host_loopback.clone();
            served.idle_after = new.idle_after;
        }
        let changed = self.with_its_policies(config)?;
        Ok((has_other_forwards.then_some(new.forwards), changed))
    }

    /// The configuration settled, with its policies. Files are not read again.
    fn with_its_policies(&self, config: Config) -> anyhow::Result<(LoadedPolicies, Config)> {
        let config = config.settled()?;
        let mut vms = config.vms.iter();
        vms.try_for_each(|vm| config.check_loopback_of(vm))?;
        let read = |path: &std::path::Path| self.place.policies.read_again(path);
        Ok((config.load_policies_by(&read)?, config))
    }

    /// The policies that clients put, by name.
    pub(super) fn put_policies(&self) -> Vec<PolicyStatus> {
        let put = self.nat.named_policies.iter();
        put.filter(|(name, _)| !is_inline(name))
            .map(|(name, policy)| PolicyStatus {
                name: name.clone(),
                generation: self.generation(name),
                text: policy.text().to_owned(),
            })
            .collect()
    }

    fn generation(&self, name: &str) -> u64 {
        self.generations.get(name).copied().unwrap_or(0)
    }

    /// Puts a named policy in force, in place of the one of this name, or takes it back.
    pub(super) fn put_policy(
        &mut self,
        client: ClientId,
        name: String,
        text: Option<String>,
        replaces: &Replaces,
    ) -> anyhow::Result<()> {
        // What would be replaced is not in force yet.
        if self.is_changing(client.into()) {
            return Ok(());
        }
        let put = self.nat.named_policies.get(&name);
        let put = put.filter(|_| !is_inline(&name));
        let now = put.map(|policy| Version::of(policy.text().as_bytes()));
        let refusal = if !replaces.permits(now) {
            let what = format!("the policy {name}");
            Some(ClientAnswer::replaced(&what, now.is_some()))
        } else if text.is_none() && now.is_none() {
            let why = format!("no policy {name:?} was put: GET /v1/policies lists those that were");
            Some(ClientAnswer::unknown(why))
        } else if text.is_none() {
            let vm = self.nat.vms.iter();
            let users = vm.filter(|vm| vm.policy.as_ref() == Some(&name));
            let unused = check_unused(&self.nat, &name, users.map(|vm| &*vm.name));
            unused
                .err()
                .map(|taken| ClientAnswer::taken(taken.to_string()))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.clients.answer(client, &refusal);
            return Ok(());
        }
        let what = match &text {
            Some(text) => Changed::Policy {
                name: name.clone(),
                generation: self.generation(&name) + 1,
                version: Version::of(text.as_bytes()),
            },
            None => Changed::NoPolicy { name: name.clone() },
        };
        let changed = self.with_policy(name, text);
        self.change(client.into(), changed, what)
    }

    fn with_policy(
        &self,
        name: String,
        text: Option<String>,
    ) -> anyhow::Result<(LoadedPolicies, Config)> {
        let mut config = self.nat.clone();
        match text {
            Some(text) => {
                check_named(&name, &text)?;
                let policy = PutPolicy::parse(&name, &text, config.base_file.as_ref())?;
                config.named_policies.insert(name, policy);
            }
            None => drop(config.named_policies.remove(&name)),
        }
        self.with_its_policies(config)
    }
}

/// A definition with what only the command line decides, as far as it does not say otherwise.
fn with_command_line(vm: VmDefinition, now: &VmDefinition) -> VmDefinition {
    let now = now.clone();
    VmDefinition {
        mac: vm.mac.or(now.mac),
        ip: vm.ip.or(now.ip),
        ipv6: vm.ipv6.or(now.ipv6),
        ipv6_prefix: vm.ipv6_prefix.or(now.ipv6_prefix),
        uplink: vm.uplink.or(now.uplink),
        nat_addresses: match vm.nat_addresses.is_empty() {
            true => now.nat_addresses,
            false => vm.nat_addresses,
        },
        tied: now.tied,
        ..vm
    }
}

/// The first field that differs and can't be changed.
fn other_field(now: &VmDefinition, vm: &VmDefinition) -> Option<&'static str> {
    let same = [
        ("tap", now.tap == vm.tap),
        ("mac", now.mac == vm.mac),
        ("ip", now.ip == vm.ip),
        ("ipv6", now.ipv6 == vm.ipv6),
        ("ipv6_prefix", now.ipv6_prefix == vm.ipv6_prefix),
        ("uplink", now.uplink == vm.uplink),
        ("nat_addresses", now.nat_addresses == vm.nat_addresses),
    ];
    let mut other = same.into_iter().filter(|(_, is_same)| !is_same);
    other.next().map(|(field, _)| field)
}

#[cfg(test)]
#[path = "definition_test.rs"]
mod tests;
