//! Prefixes that the network routes to this host, and which VM has which (`--ipv6 routed:PREFIX`).
//!
//! A VM has a /64 of the daemon's pool, or the one that its definition says. Which of the pool
//! follows from its name, so that it is the same after a restart; where another VM has that one, it
//! is the next free one. Of a pool with several, the first is left to the host itself. The prefix is part of the VM's definition from then on, and is kept with
//! it. No two VMs have the same: the programs find a guest by its address.
use ipnet::Ipv6Net;
use slipgate_model::Ipv6Mode;
use slipgate_policy::document::ConfigError;

use super::{Config, VmConfig, network};

/// Shortest prefix of a pool: it has 2^32 prefixes for VMs then.
const SHORTEST_POOL: u8 = 32;
/// Length of a VM's prefix, as SLAAC requires.
const VM_PREFIX_LEN: u8 = 64;

/// Checks a prefix that the network routes to this host, for one VM or for many.
///
/// # Errors
/// It is none whose addresses guests can have, or has another length; the error names `flag`.
pub fn check_routed_pool(flag: &'static str, given: &str) -> Result<Ipv6Net, ConfigError> {
    const LIKE: &str = "give one like 2001:db8:1:2::/64, or 2001:db8::/56 for 255 VMs";
    let refused = |problem: &str| Err(ConfigError::new(flag, given, problem, LIKE));
    let Ok(pool) = given.parse::<Ipv6Net>() else {
        return refused("not an IPv6 prefix");
    };
    if !(SHORTEST_POOL..=VM_PREFIX_LEN).contains(&pool.prefix_len()) {
        return refused("each VM has a /64 of it, so it takes a prefix of 32 to 64 bits");
    }
    if pool.trunc() != pool {
        return refused("it has bits beyond its length");
    }
    match network::unfit_for_guests(pool.network()) {
        Some(problem) => refused(problem),
        None => Ok(pool),
    }
}

/// Returns the /64 of a pool that a VM of this name gets; `None` if others have all of them.
pub fn prefix_in_pool(
    pool: Ipv6Net,
    name: &str,
    is_taken: impl Fn(Ipv6Net) -> bool,
) -> Option<Ipv6Net> {
    let all = 1_u64 << (VM_PREFIX_LEN - pool.prefix_len().min(VM_PREFIX_LEN));
    // Of several the first is left to the host, which often has an address there.
    let kept = u64::from(all > 1);
    let size = all - kept;
    let first = hash(name) % size;
    let base = pool.network().to_bits();
    (0..size).find_map(|step| {
        let at = u128::from(kept + (first + step) % size) << VM_PREFIX_LEN;
        let prefix = Ipv6Net::new((base | at).into(), VM_PREFIX_LEN).ok()?;
        (!is_taken(prefix)).then_some(prefix)
    })
}

/// FNV-1a: it is the same in every build.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Config {
    /// Gives a VM whose prefix is to be routed one of the pool, unless its definition says which.
    ///
    /// # Errors
    /// Another VM has its prefix, there is no pool, or all of the pool is taken.
    pub(super) fn assign_prefix(&self, vm: &mut VmConfig) -> Result<(), ConfigError> {
        if !self.is_routed(vm) {
            return Ok(());
        }
        let others = || {
            let routed = self.vms.iter().filter(|other| other.name != vm.name);
            routed.filter(|other| self.is_routed(other))
        };
        let holder = |prefix| others().find(|other| other.ipv6_prefix == Some(prefix));
        if let Some(prefix) = vm.ipv6_prefix {
            return match holder(prefix) {
                None => Ok(()),
                Some(other) => {
                    let problem = format!("{} has it, and it is routed to one VM", other.name);
                    let remedy = "give each VM its own /64";
                    Err(ConfigError::new("ipv6_prefix", prefix, problem, remedy))
                }
            };
        }
        let served = self.vms.iter().find(|served| served.name == vm.name);
        let served = served.filter(|served| self.is_routed(served));
        if let Some(prefix) = served.and_then(|served| served.ipv6_prefix) {
            vm.ipv6_prefix = Some(prefix);
            return Ok(());
        }
        let Some(pool) = self.network.ipv6_pool else {
            return Err(ConfigError::new(
                "--ipv6",
                "routed",
                format!("no prefix is given for {}", vm.name),
                "give the one that the network routes to this host, --ipv6 routed:PREFIX, or the VM \
                 one of its own by ipv6_prefix",
            ));
        };
        let prefix = prefix_in_pool(pool, &vm.name, |prefix| holder(prefix).is_some());
        vm.ipv6_prefix = prefix;
        match prefix {
            Some(_) => Ok(()),
            None => Err(ConfigError::new(
                "ipv6",
                format!("routed:{pool}"),
                format!(
                    "other VMs have every /64 of it: none is left for {}",
                    vm.name
                ),
                "route a shorter prefix to this host, as 2001:db8::/56 for 255 VMs, or remove VMs",
            )),
        }
    }

    /// Whether a VM's prefix is routed to the host, by what is configured.
    fn is_routed(&self, vm: &VmConfig) -> bool {
        vm.ipv6.unwrap_or(self.network.ipv6) == Ipv6Mode::Routed
    }
}

#[cfg(test)]
#[path = "routed_test.rs"]
mod tests;
