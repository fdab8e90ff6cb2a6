//! IPv6 in the private world: addresses of the same places, and the routes between them.

use std::{
    net::Ipv6Addr,
    thread,
    time::{Duration, Instant},
};

pub use crate::addresses_ipv6::*;
use crate::{
    GUEST_DEVICE, Guest,
    error::{Error, Result},
    netns::NetNs,
    world::{UPLINK, WORLD_LINK, World},
};

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

/// Longest time that a kernel takes until it receives what is for a new address.
const OWN_WITHIN: Duration = Duration::from_secs(20);

/// Adds an address without probing whether another has it, and waits until the kernel takes packets for
/// it. It lets the address be used, and shows it, at once, but adds the route by which it knows its own
/// packets later, in a queue of work of all namespaces. Answers until then are lost, those of neighbours
/// among them, and a connection that begins meanwhile takes a second longer.
///
/// # Errors
/// `ip` refuses the address, or the kernel takes too long.
pub fn add_address(ns: &NetNs, address: Ipv6Addr, prefix_len: u8, device: &str) -> Result<()> {
    ns.ip(&format!(
        "-6 addr add {address}/{prefix_len} dev {device} nodad"
    ))?;
    let end = Instant::now() + OWN_WITHIN;
    while !ns
        .ip(&format!("-6 route show table local {address}"))?
        .contains("local ")
    {
        if Instant::now() > end {
            return Err(Error::unexpected(format!(
                "{address} on {device}: the kernel has no route to its own address"
            )));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Guest {
    /// Gives the guest [`GUEST6`] and a route by [`GATEWAY6`], without a question to anybody.
    ///
    /// # Errors
    /// A sysctl can't be set, or `ip` refuses the address or the route.
    pub fn give_ipv6(&self) -> Result<()> {
        for of in ["default", GUEST_DEVICE] {
            for key in ["accept_ra", "accept_dad"] {
                self.ns.sysctl(&format!("net.ipv6.conf.{of}.{key}"), "0")?;
            }
        }
        enable(&self.ns, &[GUEST_DEVICE])?;
        add_address(&self.ns, GUEST6, 64, GUEST_DEVICE)?;
        self.ns.ip(&format!(
            "-6 route add default via {GATEWAY6} dev {GUEST_DEVICE}"
        ))?;
        Ok(())
    }
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
        let host = self.config().host_address6;
        add_address(&self.host, host, 64, UPLINK)?;
        add_address(&self.net, ROUTER6, 64, WORLD_LINK)?;
        for server in [SERVER6, SERVER6_2] {
            add_address(&self.net, server, 128, "lo")?;
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
