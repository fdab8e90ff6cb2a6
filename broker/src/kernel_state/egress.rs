//! As whom VMs reach the world: their pools of source addresses, and uplinks that policies name.
//!
//! What a VM's definition says comes before what its policy says. Both are checked when they are put
//! in force: the addresses must be the host's then, and a policy's device must exist. What goes
//! later is missing until it comes back: flows of a VM without an address or device are refused.
//!
//! Addresses of a policy are shared by its VMs. An address in a VM's definition is that VM's alone:
//! no other VM's definition, no policy and no `--nat-address` may have it, and no forward of
//! another VM may name it. (A forward of any address answers there, too.)
use std::collections::BTreeSet;

use anyhow::anyhow;
use slipgate_model::route::RouteTable;
use slipgate_policy::{
    AddressPool, EgressRoutes, Settings,
    document::{ConfigError, LoadedPolicy, NAT_ADDRESSES},
};

use super::{Attached, ResourceTaken, domains::vrf_table};
use crate::config::VmConfig;

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
    pub(super) fn pool_of(&self, vm: &VmConfig) -> AddressPool {
        if !vm.nat_addresses.is_empty() {
            return vm.nat_addresses.clone();
        }
        let policy = self.policies.loaded(&vm.policy);
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
    /// predecessor served VMs, who would lose more by a refusal. So is a `--nat-address` that VMs which
    /// clients defined have for themselves.
    ///
    /// # Errors
    /// As [`Attached::check_egress`].
    pub(crate) fn check_first_egress(&self) -> anyhow::Result<()> {
        for vm in self.vms.iter().map(|vm| &vm.config) {
            if let Some(taken) = self.taken_by_flag(&vm.nat_addresses) {
                tracing::warn!("{}: {taken:#}", vm.name);
            }
        }
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
            let whose = whose(settings);
            if let Some(uplink) = &settings.egress.uplink {
                self.check_vm_uplink(uplink)
                    .map_err(|e| anyhow!("{whose}: {e:#}"))?;
                if self.watch.network().link_by_name(uplink).is_none() {
                    let problem = format!("there is no such device, which {whose} names");
                    let remedy = "make it first, or give one that `ip link` shows";
                    return Err(ConfigError::new("egress.uplink", uplink, problem, remedy).into());
                }
            }
            if let Some(EgressRoutes::Vrf(device)) = &settings.egress.routes
                && vrf_table(self.watch.network(), device).is_none()
            {
                let problem = format!("there is no VRF of that name, which {whose} names");
                let remedy = "make it first, or give one that `ip vrf` shows; a table has a number";
                return Err(ConfigError::new("egress.table", device, problem, remedy).into());
            }
            let pool = &settings.nat_addresses;
            self.check_pool(pool, &whose, settings.egress.uplink.as_deref())?;
            self.check_shares_of_policy(settings)?;
            let others = self.vms.iter().map(|vm| &vm.config);
            if let Some((address, vm)) = owner_among(others, pool) {
                let text = format!(
                    "{NAT_ADDRESSES} {address} of {whose}: it is of {vm} alone, whose definition \
                     has it: leave it out of the policy, or of the definition"
                );
                return Err(ResourceTaken(text).into());
            }
        }
        Ok(())
    }

    /// Checks the addresses of a VM's definition.
    ///
    /// # Errors
    /// One is not the host's, or others may have it; or a forward names another VM's.
    pub(crate) fn check_own_addresses(&self, new: &VmConfig) -> anyhow::Result<()> {
        let pool = &new.nat_addresses;
        let present = self.vms.named(&new.name).map(|at| &self.vms[at].config);
        self.check_forwards_elsewhere(new, present)?;
        if pool.is_empty() {
            return Ok(());
        }
        if present.is_some_and(|present| present.nat_addresses == *pool) {
            return Ok(());
        }
        self.check_pool(pool, &new.name, self.uplink_named_by(new))?;
        let others = self.vms.iter().map(|vm| &vm.config);
        let others = others.filter(|other| other.name != new.name);
        for other in others.clone() {
            let mut forwards = other.forwards.iter();
            if let Some(forward) = forwards.find(|forward| pool.contains(forward.host)) {
                let (address, spec, name) = (forward.host, &forward.spec, &other.name);
                return Err(ResourceTaken(format!(
                    "{NAT_ADDRESSES} {address}: the forward {spec} of {name} names it, and an \
                     address in a VM's definition is of that VM alone: give another, or take that \
                     forward from {name} first"
                ))
                .into());
            }
        }
        if let Some((address, vm)) = owner_among(others, pool) {
            return Err(taken(address, vm).into());
        }
        for policy in self.policies.all_loaded() {
            if let Some(address) = policy.settings.nat_addresses.common_with(pool) {
                return Err(taken(address, &whose(&policy.settings)).into());
            }
        }
        self.taken_by_flag(pool)
            .map_or(Ok(()), |taken| Err(taken.into()))
    }

    /// Returns the error of a definition with the address of `--nat-address`.
    fn taken_by_flag(&self, pool: &AddressPool) -> Option<ResourceTaken> {
        let address = self.config.nat_address?.into();
        pool.contains(address)
            .then(|| taken(address, "--nat-address"))
    }

    /// Checks that no forward that a VM gets names an address of another VM's definition, or one in
    /// another's routed prefix: the programs hand packets to that one to its VM.
    fn check_forwards_elsewhere(
        &self,
        new: &VmConfig,
        present: Option<&VmConfig>,
    ) -> Result<(), ResourceTaken> {
        let is_present = |host| {
            let mut forwards = present.into_iter().flat_map(|vm| &vm.forwards);
            forwards.any(|forward| forward.host == host)
        };
        for forward in new.forwards.iter().filter(|it| !is_present(it.host)) {
            let others = self.vms.iter().map(|vm| &vm.config);
            let mut others = others.filter(|other| other.name != new.name);
            if let Some(owner) = self.routed_to_other(forward.host, &new.name) {
                return Err(ResourceTaken(format!(
                    "forwards {}: the address is routed to {owner}: leave it out, or forward the port \
                     of that VM",
                    forward.spec
                )));
            }
            if let Some(owner) = others.find(|other| other.nat_addresses.contains(forward.host)) {
                return Err(ResourceTaken(format!(
                    "forwards {}: {} has that address for itself: forward from another, or leave \
                     the address out",
                    forward.spec, owner.name
                )));
            }
        }
        Ok(())
    }

    /// Checks that answers to these addresses come to this host.
    /// `uplink`: the device by which the flows leave, if it is not the uplink of all.
    fn check_pool(
        &self,
        pool: &AddressPool,
        whose: &str,
        uplink: Option<&str>,
    ) -> Result<(), ConfigError> {
        if pool.is_empty() {
            return Ok(());
        }
        let routes = RouteTable::new(&self.network_view().routes);
        let named = uplink.and_then(|name| self.watch.network().link_by_name(name));
        let uplink = named.map_or(&*self.uplink.name, |link| &*link.name);
        let mut all = pool.addresses();
        if let Some(missing) = all.find(|address| !routes.may_send_from(*address)) {
            let bits = if missing.is_ipv4() { 32 } else { 128 };
            return Err(ConfigError::new(
                NAT_ADDRESSES,
                missing,
                format!("it is not an address of this host, and {whose} has it"),
                format!(
                    "add it to the uplink: ip address add {missing}/{bits} dev {uplink}; or have a \
                     prefix that is routed here delivered: ip route add local PREFIX dev lo"
                ),
            ));
        }
        Ok(())
    }
}

/// Says whose policy it is.
fn whose(settings: &Settings) -> String {
    match &settings.name {
        Some(name) => format!("the policy {name}"),
        None => "the policy of all VMs".to_owned(),
    }
}

fn taken(address: std::net::IpAddr, by: &str) -> ResourceTaken {
    ResourceTaken(format!(
        "{NAT_ADDRESSES} {address}: {by} has it, and an address in a VM's definition is of that VM \
         alone: give another, or put it into a policy that both have"
    ))
}

/// Returns an address of a pool that is in a VM's definition, and the VM's name.
fn owner_among<'v>(
    mut vms: impl Iterator<Item = &'v VmConfig>,
    pool: &AddressPool,
) -> Option<(std::net::IpAddr, &'v str)> {
    vms.find_map(|vm| Some((vm.nat_addresses.common_with(pool)?, &*vm.name)))
}
