//! Whether the host's own NAT and sockets keep clear of guests' tuples.
//!
//! A look at each new flow whether the host's connection tracking has its tuple would not do: it
//! costs 2.8 µs by ctnetlink, of the 4 µs that a new flow costs in all, and helps only those of the
//! host's connections that were first. The host's NAT does not know guests' flows, and may pick the
//! tuple of one a moment later. So the ports have to be separate, or the addresses.
use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use slipgate_abi::IfIndex;
use slipgate_control::{
    Network,
    host::{GuestsTuples, HostFacts, Sources},
    netlink::{Address, AddressState},
};
use slipgate_policy::{AddressPool, document::ConfigError};

use crate::config::{Config, HostNat};

/// Most ways in which guests' tuples meet the host's own NAT that an error names.
const MOST_SHOWN: usize = 4;
/// What else than a change helps.
const OR_ACCEPT: &str = "or accept by --host-nat share that connections of the host's may break";

/// Guests whose flows leave by one device with the same source addresses.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct GuestsAt {
    /// Name of the device.
    pub uplink: String,
    /// Its index; [`IfIndex::NONE`]: it does not exist now.
    pub ifindex: IfIndex,
    /// Whose routes lead to it, in words; `None`: it is named as an uplink.
    pub by_routes: Option<String>,
    /// Source addresses of IPv4 flows; `None`: there are none; empty: those that the routes choose.
    pub ipv4: Option<Vec<IpAddr>>,
    /// The same of IPv6 flows.
    pub ipv6: Option<Vec<IpAddr>>,
}

impl GuestsAt {
    /// Guests whose addresses the routes choose. `has_ipv6`: whether flows of IPv6 are translated,
    /// or may be.
    pub fn new((uplink, ifindex): (&str, IfIndex), has_ipv6: bool) -> Self {
        Self {
            uplink: uplink.to_owned(),
            ifindex,
            by_routes: None,
            ipv4: Some(Vec::new()),
            ipv6: has_ipv6.then(Vec::new),
        }
    }

    /// The same guests with addresses of a pool, for those families of theirs that it has addresses
    /// of.
    pub(crate) fn with(mut self, pool: &AddressPool) -> Self {
        for (is_ipv6, own) in [(false, &mut self.ipv4), (true, &mut self.ipv6)] {
            let of_pool: Vec<IpAddr> = pool.of_family(is_ipv6).collect();
            if own.is_some() && !of_pool.is_empty() {
                *own = Some(of_pool);
            }
        }
        self
    }

    /// Returns what their flows have at the device.
    pub fn tuples(&self, network: &Network, ports: &RangeInclusive<u16>) -> GuestsTuples {
        let own = || {
            network
                .addresses
                .iter()
                .filter(|of| of.ifindex == self.ifindex)
        };
        let sources = |of_guests: &Vec<IpAddr>, by_masquerade| Sources {
            of_guests: of_guests.clone(),
            by_masquerade,
        };
        GuestsTuples {
            uplink: self.uplink.clone(),
            by_routes: self.by_routes.clone(),
            ports: ports.clone(),
            ipv4: self.ipv4.as_ref().map(|of_guests| {
                let first = first_address(own()).map(IpAddr::V4);
                sources(of_guests, first.into_iter().collect())
            }),
            ipv6: self.ipv6.as_ref().map(|of_guests| {
                let all = || own().filter(|of| is_global_ipv6(of));
                let preferred = all().filter(|of| of.state != AddressState::Deprecated);
                let by_masquerade = preferred.map(|of| of.address).collect();
                match of_guests.is_empty() {
                    true => sources(&all().map(|of| of.address).collect(), by_masquerade),
                    false => sources(of_guests, by_masquerade),
                }
            }),
        }
    }
}

/// Refuses to share the guests' address with the host's own NAT and sockets, unless their ports are
/// separate, or `--host-nat share` accepts it. `serves`: whether guests are served here already, who
/// would lose more by a refusal. Returns what is shared, which is logged.
pub(crate) fn check(
    config: &Config,
    facts: &HostFacts,
    uplink: (&str, IfIndex),
    network: &Network,
    serves: bool,
) -> Result<BTreeSet<String>, ConfigError> {
    let guests = of_all(config, uplink);
    let met = config.source_ports();
    let met = met.flat_map(|ports| facts.meets(&guests.tuples(network, ports)));
    let met: BTreeSet<String> = met.collect();
    if config.host_nat == HostNat::Share || serves {
        met.iter().for_each(|met| tracing::warn!("{met}"));
        return Ok(met);
    }
    match met.is_empty() {
        true => Ok(met),
        false => {
            let met = Vec::from_iter(met).join("; ");
            Err(ConfigError::new("--host-nat", "refuse", met, OR_ACCEPT))
        }
    }
}

/// Returns what the command line says of guests at the uplink of all.
pub(crate) fn of_all(config: &Config, uplink: (&str, IfIndex)) -> GuestsAt {
    let all = GuestsAt::new(uplink, config.translates_ipv6());
    GuestsAt {
        ipv4: Some(config.nat_address.map(IpAddr::V4).into_iter().collect()),
        ..all
    }
}

/// Returns how the host's own NAT may give connections tuples of guests', in sentences.
pub(crate) fn shared<'g>(
    config: &Config,
    facts: &HostFacts,
    network: &Network,
    guests: impl IntoIterator<Item = &'g GuestsAt>,
) -> BTreeSet<String> {
    let mut met = BTreeSet::new();
    if facts.source_nat.iter().flatten().next().is_none() {
        return met;
    }
    for guests in guests {
        for ports in config.source_ports() {
            met.extend(facts.translates_to(&guests.tuples(network, ports)));
        }
    }
    met
}

/// Returns the error of a setting by which guests would share tuples with the host's own NAT.
pub(crate) fn refused(key: &'static str, value: &str, met: &BTreeSet<String>) -> ConfigError {
    ConfigError::new(key, value, some_of(met), OR_ACCEPT)
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

/// Whether it is an IPv6 address that packets to the world may have.
fn is_global_ipv6(of: &Address) -> bool {
    matches!(of.address, IpAddr::V6(address) if !address.is_unicast_link_local())
        && of.state != AddressState::Unusable
}

/// The IPv4 address that masquerading gives packets at a device with these addresses: the first one, if
/// they are of one network. With several it depends on the next hop.
fn first_address<'a>(of_device: impl Iterator<Item = &'a Address>) -> Option<Ipv4Addr> {
    let mut all = of_device.filter_map(|of| match of.address {
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
