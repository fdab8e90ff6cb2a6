//! Whether the host's own NAT and sockets keep clear of guests' tuples.
//!
//! A look at each new flow whether the host's connection tracking has its tuple would not do: it
//! costs 2.8 µs by ctnetlink, of the 4 µs that a new flow costs in all, and helps only those of the
//! host's connections that were first. The host's NAT does not know guests' flows, and may pick the
//! tuple of one a moment later. So the ports have to be separate, or the addresses.
use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use slipgate_abi::IfIndex;
use slipgate_control::{
    Network,
    host::{GuestsTuples, HostFacts},
};
use slipgate_policy::{
    AddressPool,
    document::{ConfigError, NAT_ADDRESSES},
};

use crate::config::{Config, HostNat};

/// Most ways in which a pool meets the host's own NAT that an error names.
const MOST_SHOWN: usize = 4;

/// Refuses to share the guests' address with the host's own NAT and sockets, unless their ports are
/// separate, or `--host-nat share` accepts it: then it is logged. `serves`: whether guests are served
/// here already, who would lose more by a refusal.
pub(crate) fn check(
    config: &Config,
    (uplink, ifindex): (&str, IfIndex),
    network: &Network,
    serves: bool,
) -> Result<(), ConfigError> {
    let facts = HostFacts::read();
    let mut met = Vec::new();
    for ports in config.source_ports() {
        let at = (uplink, ifindex);
        let ipv6 = config.translates_ipv6();
        let guests = guests_tuples(at, network, config.nat_address, ports, ipv6);
        met.extend(facts.meets(&guests));
    }
    if config.host_nat == HostNat::Share || serves {
        met.iter().for_each(|met| tracing::warn!("{met}"));
        return Ok(());
    }
    match met.is_empty() {
        true => Ok(()),
        false => Err(ConfigError::new(
            "--host-nat",
            "refuse",
            met.join("; "),
            "or accept by --host-nat share that connections of the host's may break",
        )),
    }
}

/// Refuses source addresses of guests that the host's own NAT gives connections, too, unless ports
/// are separate or `--host-nat share` accepts it: then it is logged.
pub(crate) fn check_pool(
    config: &Config,
    (uplink, ifindex): (&str, IfIndex),
    network: &Network,
    pool: &AddressPool,
) -> Result<(), ConfigError> {
    let facts = HostFacts::read();
    let met = config.source_ports().flat_map(|ports| {
        let addresses = pool.of_family(false).filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let of = |address| guests_tuples((uplink, ifindex), network, Some(address), ports, false);
        let met: Vec<String> = addresses
            .flat_map(|of_pool| facts.translates_to(&of(of_pool)))
            .collect();
        met
    });
    let met: BTreeSet<String> = met.collect();
    if config.host_nat == HostNat::Share {
        if !met.is_empty() {
            tracing::warn!("{}", some_of(&met));
        }
        return Ok(());
    }
    match met.is_empty() {
        true => Ok(()),
        false => Err(ConfigError::new(
            NAT_ADDRESSES,
            pool.texts().join(", "),
            some_of(&met),
            "or accept by --host-nat share that connections of the host's may break",
        )),
    }
}

/// Joins the first of these sentences, and says how many are left out.
fn some_of(all: &BTreeSet<String>) -> String {
    let shown: Vec<&str> = all.iter().take(MOST_SHOWN).map(String::as_str).collect();
    let shown = shown.join("; ");
    match all.len().saturating_sub(MOST_SHOWN) {
        0 => shown,
        left => format!("{shown}; and {left} more like these"),
    }
}

/// Returns what guests' flows have at an uplink. `address`: their source address, if one is given.
/// `has_ipv6`: whether guests have IPv6, or may get it.
pub fn guests_tuples(
    (uplink, ifindex): (&str, IfIndex),
    network: &Network,
    address: Option<Ipv4Addr>,
    ports: &RangeInclusive<u16>,
    has_ipv6: bool,
) -> GuestsTuples {
    GuestsTuples {
        uplink: uplink.to_owned(),
        address,
        masquerade: first_address(network, ifindex),
        ports: ports.clone(),
        addresses6: has_ipv6.then(|| addresses6(network, ifindex)),
    }
}

/// The IPv6 addresses of a device that packets to the world may have.
fn addresses6(network: &Network, ifindex: IfIndex) -> Vec<Ipv6Addr> {
    let all = network.addresses.iter().filter(|of| of.ifindex == ifindex);
    let all = all.filter_map(|of| match of.address {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    });
    all.filter(|address| !address.is_unicast_link_local())
        .collect()
}

/// The IPv4 address that masquerading gives packets at a device: its first one, if it has only one
/// network. With several it depends on the next hop.
fn first_address(network: &Network, ifindex: IfIndex) -> Option<Ipv4Addr> {
    let all = network.addresses.iter().filter(|of| of.ifindex == ifindex);
    let mut all = all.filter_map(|of| match of.address {
        IpAddr::V4(address) => Some((address, of.prefix_len)),
        IpAddr::V6(_) => None,
    });
    let (first, prefix_len) = all.next()?;
    let mask = u32::MAX
        .checked_shl(32 - u32::from(prefix_len))
        .unwrap_or(0);
    let of = |address: Ipv4Addr| u32::from(address) & mask;
    // /32 besides are for `--nat-address` and the like: the kernel prefers those of the next hop's
    // network.
    all.all(|(other, prefix_len)| prefix_len == 32 || of(other) == of(first))
        .then_some(first)
}

#[cfg(test)]
#[path = "tuples_test.rs"]
mod tests;
