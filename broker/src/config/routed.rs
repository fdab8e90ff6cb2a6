//! Prefixes that the network routes to this host, and which VM has which (`--ipv6 routed:PREFIX`).
//!
//! A VM has a /64 of the daemon's pool, or a single address (/128) if the pool is longer than 64 bits; or
//! the one that its definition says. Which of the pool follows from its name, so that it is the same
//! after a restart; where another VM has that one, it is the next free one. Of a pool with several, the
//! first is left to the host itself. The prefix is part of the VM's definition from then on, and is
//! kept with it. No two VMs have the same or one within the other's: the programs find a guest by its
//! address.
use ipnet::Ipv6Net;
use slipgate_model::{GuestIpv6, Ipv6Mode};
use slipgate_policy::document::ConfigError;

use super::{Config, VmConfig, network};

/// Shortest prefix of a pool: it has 2^32 prefixes for VMs then.
const SHORTEST_POOL: u8 = 32;
/// Length of a VM's prefix, as SLAAC requires.
const VM_PREFIX_LEN: u8 = 64;
/// Length of the prefix of a VM with a single address.
const SINGLE_LEN: u8 = 128;

/// Checks a prefix that the network routes to this host, for one VM or for many.
///
/// # Errors
/// It is none whose addresses guests can have, or has another length; the error names `flag`.
pub fn check_routed_pool(flag: &'static str, given: &str) -> Result<Ipv6Net, ConfigError> {
    const LIKE: &str = "give one like 2001:db8:1:2::/64, 2001:db8::/56 for 255 VMs, or 2001:db8::/120 \
                        for 255 VMs with an address each";
    let pool = parsed(flag, given, LIKE)?;
    let refused = |problem: &str| Err(ConfigError::new(flag, given, problem, LIKE));
    if pool.prefix_len() < SHORTEST_POOL {
        return refused("each VM has a /64 or an address of it, so it takes 32 bits or more");
    }
    if let Some(problem) = network::unfit_for_guests(pool.network()) {
        return refused(problem);
    }
    let is_shared = (VM_PREFIX_LEN + 1..SINGLE_LEN).contains(&pool.prefix_len());
    match unfit_for_single(pool, is_shared) {
        Some(problem) => refused(problem),
        None => Ok(pool),
    }
}

/// Checks what the network routes to one VM: its /64, or its single address.
///
/// # Errors
/// As for [`check_routed_pool`].
pub fn check_routed_prefix(flag: &'static str, given: &str) -> Result<Ipv6Net, ConfigError> {
    const LIKE: &str = "give one like 2001:db8:1:2::/64, or a single address like 2001:db8::17/128";
    let prefix = parsed(flag, given, LIKE)?;
    let refused = |problem: &str| Err(ConfigError::new(flag, given, problem, LIKE));
    if ![VM_PREFIX_LEN, SINGLE_LEN].contains(&prefix.prefix_len()) {
        return refused("a VM has a /64 or a single address, a /128");
    }
    let unfit = network::unfit_for_guests(prefix.network());
    match unfit.or_else(|| unfit_for_single(prefix, false)) {
        Some(problem) => refused(problem),
        None => Ok(prefix),
    }
}

fn parsed(flag: &'static str, given: &str, like: &str) -> Result<Ipv6Net, ConfigError> {
    let refused = |problem: &str| Err(ConfigError::new(flag, given, problem, like));
    let Ok(prefix) = given.parse::<Ipv6Net>() else {
        return refused("not an IPv6 prefix");
    };
    match prefix.trunc() == prefix {
        true => Ok(prefix),
        false => refused("it has bits beyond its length"),
    }
}

/// Returns the reason for which VMs can't have single addresses of a prefix, if it is for these.
/// `is_shared`: the first address is nobody's.
fn unfit_for_single(prefix: Ipv6Net, is_shared: bool) -> Option<&'static str> {
    if prefix.prefix_len() <= VM_PREFIX_LEN {
        return None;
    }
    if GuestIpv6::GATEWAY_NET.contains(&prefix) {
        return Some("the gateway of guests with single addresses is in fd73:6c69:7067::/64");
    }
    let is_anycast = prefix.network().to_bits() as u64 == 0 && !is_shared;
    is_anycast.then_some("it is the address of the routers of its /64 (RFC 4291 section 2.6.1)")
}

/// Length of the prefix that each VM of a pool has.
fn len_in(pool: Ipv6Net) -> u8 {
    match pool.prefix_len() <= VM_PREFIX_LEN {
        true => VM_PREFIX_LEN,
        false => SINGLE_LEN,
    }
}

/// Returns the /64 or the address of a pool that a VM of this name gets; `None` if others have all of
/// them.
pub fn prefix_in_pool(
    pool: Ipv6Net,
    name: &str,
    is_taken: impl Fn(Ipv6Net) -> bool,
) -> Option<Ipv6Net> {
    let len = len_in(pool);
    let all = 1_u64 << (len - pool.prefix_len());
    // Of several the first is left to the host, which often has an address there.
    let kept = u64::from(all > 1);
    let size = all - kept;
    let first = hash(name) % size;
    let base = pool.network().to_bits();
    (0..size).find_map(|step| {
        let at = u128::from(kept + (first + step) % size) << (SINGLE_LEN - len);
        let prefix = Ipv6Net::new((base | at).into(), len).ok()?;
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
        let holder = |prefix: Ipv6Net| {
            let overlaps = |own: Ipv6Net| own.contains(&prefix) || prefix.contains(&own);
            others().find(|other| other.ipv6_prefix.is_some_and(overlaps))
        };
        if let Some(prefix) = vm.ipv6_prefix {
            return match holder(prefix) {
                None => Ok(()),
                Some(other) => {
                    let problem = format!("{} has it, and it is routed to one VM", other.name);
                    let remedy = "give each VM its own /64 or address";
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
                    "other VMs have every {} of it: none is left for {}",
                    match len_in(pool) {
                        VM_PREFIX_LEN => "/64",
                        _ => "address",
                    },
                    vm.name
                ),
                "route a shorter prefix to this host, as 2001:db8::/56 for 255 VMs, or remove VMs",
            )),
        }
    }

    /// Returns the prefix of a VM that is routed to the host.
    pub(super) fn routed_prefix_of(&self, vm: &VmConfig) -> Option<Ipv6Net> {
        vm.ipv6_prefix.filter(|_| self.is_routed(vm))
    }

    /// Whether a VM's prefix is routed to the host, by what is configured.
    fn is_routed(&self, vm: &VmConfig) -> bool {
        vm.ipv6.unwrap_or(self.network.ipv6) == Ipv6Mode::Routed
    }
}

#[cfg(test)]
#[path = "routed_test.rs"]
mod tests;
