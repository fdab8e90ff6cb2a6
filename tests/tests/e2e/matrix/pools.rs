//! Addresses that a host has besides its first one, by the family of a cell: those of pools, of VMs, and
//! of prefixes that are routed to it.

use std::net::IpAddr;

use slipgate_testbed::World;

use super::{Cell, cells};
use crate::stand::SECOND;

/// An address of a family, as the tests write it.
fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

impl Cell {
    /// Two addresses that the host has besides its first one.
    pub(crate) fn pool(self) -> [IpAddr; 2] {
        match self.is_ipv6() {
            false => ["198.18.0.8", "198.18.0.9"].map(ip),
            true => ["2001:db8:1::8", "2001:db8:1::9"].map(ip),
        }
    }

    /// Two more.
    pub(crate) fn others(self) -> [IpAddr; 2] {
        match self.is_ipv6() {
            false => ["198.18.0.12", "198.18.0.13"].map(ip),
            true => ["2001:db8:1::c", "2001:db8:1::d"].map(ip),
        }
    }

    /// The first two, as a prefix in a policy.
    pub(crate) fn pool_prefix(self) -> &'static str {
        ["\"198.18.0.8/31\"", "\"2001:db8:1::8/127\""][usize::from(self.is_ipv6())]
    }

    /// The other two, as a prefix in a policy.
    pub(crate) fn others_prefix(self) -> &'static str {
        ["\"198.18.0.12/31\"", "\"2001:db8:1::c/127\""][usize::from(self.is_ipv6())]
    }

    /// A prefix that is routed to the host, and an address of it.
    pub(crate) fn routed(self) -> (&'static str, IpAddr) {
        match self.is_ipv6() {
            false => ("203.0.112.0/30", ip("203.0.112.1")),
            true => ("2001:db8:70::/126", ip("2001:db8:70::1")),
        }
    }

    /// An address that the host has on its second uplink besides the first one.
    pub(crate) fn second_of_two(self) -> IpAddr {
        ip(["198.18.1.8", "2001:db8:2::8"][usize::from(self.is_ipv6())])
    }
}

/// Gives a device of the host's one more address. What is of no pool leaves from the first one as
/// before: by IPv4 that is the primary one, and by IPv6 the default route has to say so, since the
/// kernel prefers what was added last.
pub(crate) fn add_address(world: &World, address: IpAddr, device: &str) {
    let IpAddr::V6(ip) = address else {
        let line = format!("addr add {address}/32 dev {device}");
        world.host.ip(&line).unwrap();
        return;
    };
    let add = format!("-6 addr add {ip}/128 dev {device} nodad");
    world.host.ip(&add).unwrap();
    let cell = cells::hybrid_ipv6;
    let (router, first, metric) = match device {
        SECOND => (cell.second_router(), cell.second_address(), 9_000),
        _ => (cell.router(), cell.host(), 1_024),
    };
    let route = format!("default via {router} dev {device} metric {metric} src {first}");
    world.host.ip(&format!("-6 route replace {route}")).unwrap();
}

/// Takes an address away that [`add_address`] gave.
pub(crate) fn remove_address(world: &World, address: IpAddr, device: &str) {
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let line = format!("addr del {address}/{bits} dev {device}");
    world.host.ip(&line).unwrap();
}
