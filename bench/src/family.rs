//! The two families of addresses: what differs between the same workload in IPv4 and in IPv6.

use std::net::IpAddr;

use clap::ValueEnum;
use slipgate_testbed::{world::SERVER, world_ipv6::SERVER6};

/// End of the names of workloads in IPv6.
const IPV6_NAME: &str = "-ipv6";

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub(crate) const ALL: [Family; 2] = [Family::Ipv4, Family::Ipv6];

    /// Returns the one that belongs to the family.
    pub(crate) fn of<T>(self, ipv4: T, ipv6: T) -> T {
        match self {
            Family::Ipv4 => ipv4,
            Family::Ipv6 => ipv6,
        }
    }

    /// The world's first server.
    pub(crate) fn server(self) -> IpAddr {
        self.of(SERVER.into(), SERVER6.into())
    }

    /// Address that a client binds to, to be given one by its routes.
    pub(crate) fn any(self) -> &'static str {
        self.of("0.0.0.0", "::")
    }

    /// Flag of `ip` for the family.
    pub(crate) fn flag(self) -> &'static str {
        self.of("-4", "-6")
    }
}

/// Whether a workload is one in IPv6, by its name.
pub(crate) fn is_ipv6(workload: &str) -> bool {
    workload.ends_with(IPV6_NAME)
}

/// Returns the name that a workload has in IPv4.
pub(crate) fn without_family(workload: &str) -> &str {
    workload.strip_suffix(IPV6_NAME).unwrap_or(workload)
}

/// Families to measure, as on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Families {
    Ipv4,
    Ipv6,
    Both,
}

impl Families {
    pub(crate) fn includes(self, family: Family) -> bool {
        match self {
            Families::Ipv4 => family == Family::Ipv4,
            Families::Ipv6 => family == Family::Ipv6,
            Families::Both => true,
        }
    }
}

#[cfg(test)]
#[path = "family_test.rs"]
mod tests;
