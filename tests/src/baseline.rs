//! The baselines of slipgate: nftables masquerade, and plain IP forwarding without any NAT.
//!
//! Both make the host the guest's gateway (address on the TAP, TAP up) and need a world with
//! `ip_forward` on. Every guest needs its own subnet here, which slipgate does not need.

use std::net::Ipv6Addr;

use crate::{
    error::Result,
    guest::Guest,
    world::{HOST, UPLINK, World},
    world_ipv6::{self, HOST6},
};

/// The guest's IPv6 address, of the /64 that slipgate gives by default.
pub const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 0x15);
/// The gateway's address in it.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 1);

/// Adds NAT for this guest by `nft … masquerade`.
///
/// # Errors
/// `ip` or `nft` fails.
pub fn masquerade(world: &World, guest: &Guest) -> Result<()> {
    gateway(world, guest)?;
    masquerade_all(world, "ip")
}

/// Adds masquerading for the guest of a VMM, with 10.0.2.2/24 as its gateway on the TAP.
///
/// # Errors
/// A command fails.
pub fn masquerade_tap(world: &World, tap: &str) -> Result<()> {
    world.host.ip(&format!("addr add 10.0.2.2/24 dev {tap}"))?;
    world.host.ip(&format!("link set {tap} up"))?;
    masquerade_all(world, "ip")
}

/// `family`: nftables' name of it.
fn masquerade_all(world: &World, family: &str) -> Result<()> {
    world.host.nft(&format!(
        "table {family} testbed {{
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                oifname \"{UPLINK}\" masquerade
            }}
        }}"
    ))
}

/// Enables forwarding without NAT; the world gets a route to the guest's subnet.
///
/// # Errors
/// `ip` fails.
pub fn plain_forwarding(world: &World, guest: &Guest) -> Result<()> {
    gateway(world, guest)?;
    let config = guest.config();
    world
        .net
        .ip(&format!("route add {}/{} via {HOST}", config.address, 32))
        .map(drop)
}

fn gateway(world: &World, guest: &Guest) -> Result<()> {
    let config = guest.config();
    world.host.ip(&format!(
        "addr add {}/{} dev {}",
        config.gateway,
        config.prefix,
        guest.tap()
    ))?;
    world
        .host
        .ip(&format!("link set {} mtu {} up", guest.tap(), config.mtu))?;
    Ok(())
}

/// Adds IPv6 NAT for a guest with the address [`GUEST6`], in a world with IPv6.
///
/// # Errors
/// A command fails.
pub fn masquerade6(world: &World, guest: &Guest) -> Result<()> {
    gateway6(world, guest)?;
    masquerade_all(world, "ip6")
}

/// Enables IPv6 forwarding without NAT for a guest with the address [`GUEST6`].
///
/// # Errors
/// A command fails.
pub fn plain_forwarding6(world: &World, guest: &Guest) -> Result<()> {
    gateway6(world, guest)?;
    let route = format!("-6 route add {GUEST6}/128 via {HOST6}");
    world.net.ip(&route).map(drop)
}

fn gateway6(world: &World, guest: &Guest) -> Result<()> {
    let tap = guest.tap();
    world_ipv6::enable(&world.host, &[tap])?;
    world.host.sysctl("net.ipv6.conf.all.forwarding", "1")?;
    let address = format!("-6 addr add {GATEWAY6}/64 dev {tap} nodad");
    world.host.ip(&address).map(drop)
}
