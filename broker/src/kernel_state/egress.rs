//! As whom VMs reach the world: their pools of source addresses, and uplinks that policies name.
//!
//! What a VM's definition says comes before what its policy says. Both are checked when they are put
//! in force: the addresses must be the host's then, and a policy's device must exist. What goes
//! later is missing until it comes back: flows of a VM without an address or device are refused.
//!
//! Addresses of a policy are shared by its VMs. An address in a VM's definition is that VM's alone:
//! no other VM's definition, no policy and no `--nat-address` may have it.
use std::collections::BTreeSet;

use anyhow::anyhow;
use slipgate_model::route::RouteTable;
use slipgate_policy::{
    AddressPool,
    document::{ConfigError, LoadedPolicy, NAT_ADDRESSES},
};

use super::{Attached, ServedVm, Taken};
use crate::{config::VmConfig, host};

impl Attached {
    /// Returns the name of the uplink that a VM's flows leave by, if it or its policy names one.
    pub(super) fn uplink_named_by<'a>(&'a self, vm: &'a VmConfig) -> Option<&'a str> {
        let of_policy = || {
            self.policies
                .loaded(&vm.policy)?
                .settings
                .egress
                .uplink
                .as_deref()
        };
        vm.uplink.as_deref().or_else(of_policy)
    }

    /// Returns the source addresses that a VM may have; none: the routes choose.
    pub(super) fn pool_of(&self, vm: &ServedVm) -> AddressPool {
        if !vm.config.nat_addresses.is_empty() {
            return vm.config.nat_addresses.clone();
        }
        let policy = self.policies.loaded(&vm.config.policy);
        policy.map_or_else(AddressPool::default, |policy| {
            policy.settings.nat_addresses.clone()
        })
    }

    /// Returns the uplinks that VMs and policies name.
    pub(super) fn named_uplinks(&self) -> BTreeSet<String> {
        let of_vms = self.vms.uplinks().map(str::to_owned);
        of_vms.chain(self.policies.uplinks()).collect()
    }

    /// Checks how flows of policies that are new or changed would leave.
    ///
    /// # Errors
    /// An address is not the host's, is a VM's alone, or may be the host's own NAT's, too; or a
    /// device does not exist, or leads nowhere.
    pub(crate) fn check_egress(&self, put: &[LoadedPolicy]) -> anyhow::Result<()> {
        let is_new = |new: &&LoadedPolicy| self.policies.loaded(&new.settings.name) != Some(*new);
        self.check_egress_of(put.iter().filter(is_new))
    }

    /// Checks how flows of the first policies would leave. What is wrong is only logged of policies
    /// that clients put, who could not change them if there were no daemon; and of all if a
    /// predecessor served VMs, who would lose more by a refusal.
    ///
    /// # Errors
    /// As [`Attached::check_egress`].
    pub(crate) fn check_first_egress(&self) -> anyhow::Result<()> {
        let adopted = self.has_adopted();
        for policy in self.policies.all_loaded() {
            let Err(e) = self.check_egress_of([policy].into_iter()) else {
                continue;
            };
            let name = policy.settings.name.as_ref();
            let is_put = name.is_some_and(|name| self.config.named_policies.contains_key(name));
            match adopted || is_put {
                true => tracing::warn!("{e:#}"),
                false => return Err(e),
            }
        }
        Ok(())
    }

    fn check_egress_of<'p>(
        &self,
        policies: impl Iterator<Item = &'p LoadedPolicy>,
    ) -> anyhow::Result<()> {
        for policy in policies {
            let settings = &policy.settings;
            let whose = match &settings.name {
                Some(name) => format!("the policy {name}"),
                None => "the policy of all VMs".to_owned(),
            };
            if let Some(uplink) = &settings.egress.uplink {
                self.check_vm_uplink(uplink)
                    .map_err(|e| anyhow!("{whose}: {e:#}"))?;
                if self.watch.network().link_by_name(uplink).is_none() {
                    let problem = format!("there is no such device, which {whose} names");
                    let remedy = "make it first, or give one that `ip link` shows";
                    return Err(ConfigError::new("egress.uplink", uplink, problem, remedy).into());
                }
            }
            let pool = &settings.nat_addresses;
            self.check_pool(pool, &whose)?;
            let others = self.vms.iter().map(|vm| &vm.config);
            if let Some((address, vm)) = owner_among(others, pool) {
                let text = format!(
                    "{NAT_ADDRESSES} {address} of {whose}: it is of {vm} alone, whose definition \
                     has it: leave it out of the policy, or of the definition"
                );
                return Err(Taken(text).into());
            }
        }
        Ok(())
    }

    /// Checks the addresses of a VM's definition.
    ///
    /// # Errors
    /// One is not the host's, or others may have it.
    pub(crate) fn check_own_addresses(&self, new: &VmConfig) -> anyhow::Result<()> {
        let pool = &new.nat_addresses;
        if pool.is_empty() {
            return Ok(());
        }
        let present = self.vms.named(&new.name).map(|at| &self.vms[at].config);
        if present.is_some_and(|present| present.nat_addresses == *pool) {
            return Ok(());
        }
        self.check_pool(pool, &new.name)?;
        let taken = |address, by: &str| {
            Taken(format!(
                "{NAT_ADDRESSES} {address}: {by} has it, and an address in a VM's definition is of \
                 that VM alone: give another, or put it into a policy that both have"
            ))
        };
        let others = self.vms.iter().map(|vm| &vm.config);
        let others = others.filter(|other| other.name != new.name);
        if let Some((address, vm)) = owner_among(others, pool) {
            return Err(taken(address, vm).into());
        }
        for policy in self.policies.all_loaded() {
            if let Some(address) = policy.settings.nat_addresses.common_with(pool) {
                let by = match &policy.settings.name {
                    Some(name) => format!("the policy {name}"),
                    None => "the policy of all VMs".to_owned(),
                };
                return Err(taken(address, &by).into());
            }
        }
        match self.config.nat_address {
            Some(address) if pool.contains(address.into()) => {
                Err(taken(address.into(), "--nat-address").into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that answers to these addresses come to this host, and to nobody on it but slipgate.
    fn check_pool(&self, pool: &AddressPool, whose: &str) -> Result<(), ConfigError> {
        if pool.is_empty() {
            return Ok(());
        }
        let routes = RouteTable::new(&self.network_view().routes);
        let mut all = pool.addresses();
        if let Some(missing) = all.find(|address| !routes.may_send_from(*address)) {
            let bits = if missing.is_ipv4() { 32 } else { 128 };
            return Err(ConfigError::new(
                NAT_ADDRESSES,
                missing,
                format!("it is not an address of this host, and {whose} has it"),
                format!(
                    "add it to the uplink: ip address add {missing}/{bits} dev {}; or have a prefix \
                     that is routed here delivered: ip route add local PREFIX dev lo",
                    self.uplink.name
                ),
            ));
        }
        let at = (&*self.uplink.name, self.uplink.ifindex);
        host::check_pool(&self.config, at, self.watch.network(), pool)
    }
}

/// Returns an address of a pool that is in a VM's definition, and the VM's name.
fn owner_among<'v>(
    mut vms: impl Iterator<Item = &'v VmConfig>,
    pool: &AddressPool,
) -> Option<(std::net::IpAddr, &'v str)> {
    vms.find_map(|vm| Some((vm.nat_addresses.common_with(pool)?, &*vm.name)))
}
