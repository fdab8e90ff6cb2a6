//! IPv6 in the private world: addresses of the same places, and the routes between them.

use std::net::Ipv6Addr;

use crate::{
    error::Result,
    netns::NetNs,
    world::{UPLINK, WORLD_LINK, World},
};

/// The world's router address on the uplink.
pub const ROUTER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// The host's address on the uplink.
pub const HOST6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
/// The first server address.
pub const SERVER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 0x10);
/// The second server address.
pub const SERVER6_2: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 0x20);

/// Lets the kernel of a namespace, which the testbed makes without IPv6, have it on these devices.
///
/// # Errors
/// A sysctl can't be set, as where a device is not there.
pub fn enable(ns: &NetNs, devices: &[&str]) -> Result<()> {
    for device in ["all", "default"].iter().chain(devices) {
        ns.sysctl(&format!("net.ipv6.conf.{device}.disable_ipv6"), "0")?;
    }
    Ok(())
}

impl World {
    /// Gives host and world IPv6, and the host a default route. The world has no route to guests.
    ///
    /// # Errors
    /// `ip` refuses an address or the route.
    pub fn give_ipv6(&self) -> Result<()> {
        for (ns, device) in [(&self.host, UPLINK), (&self.net, WORLD_LINK)] {
            // A kernel asks for no neighbour's address until it is sure of its own on the link: for its
            // first second, the world would not answer.
            ns.sysctl(&format!("net.ipv6.conf.{device}.accept_dad"), "0")?;
            enable(ns, &[device])?;
        }
        self.host
            .ip(&format!("-6 addr add {HOST6}/64 dev {UPLINK} nodad"))?;
        self.net
            .ip(&format!("-6 addr add {ROUTER6}/64 dev {WORLD_LINK} nodad"))?;
        for server in [SERVER6, SERVER6_2] {
            self.net
                .ip(&format!("-6 addr add {server}/128 dev lo nodad"))?;
        }
        self.add_ipv6_route()
    }

    /// Gives the host its default route by IPv6.
    ///
    /// # Errors
    /// `ip` refuses the route, as where there is one.
    pub fn add_ipv6_route(&self) -> Result<()> {
        self.host
            .ip(&format!("-6 route add default via {ROUTER6} dev {UPLINK}"))?;
        Ok(())
    }
}
