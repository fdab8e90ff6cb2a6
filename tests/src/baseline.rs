//! The baselines of slipgate: nftables masquerade, and plain IP forwarding without any NAT.
//!
//! Both make the host the guest's gateway (address on the TAP, TAP up) and need a world with
//! `ip_forward` on. Every guest needs its own subnet here, which slipgate does not need.

use crate::{
    error::Result,
    guest::Guest,
    world::{HOST, UPLINK, World},
};

/// Adds NAT for this guest by `nft … masquerade`.
pub fn masquerade(world: &World, guest: &Guest) -> Result<()> {
    gateway(world, guest)?;
    masquerade_all(world)
}

/// Adds masquerading for the guest of a VMM, with 10.0.2.2/24 as its gateway on the TAP.
///
/// # Errors
/// A command fails.
pub fn masquerade_tap(world: &World, tap: &str) -> Result<()> {
    world.host.ip(&format!("addr add 10.0.2.2/24 dev {tap}"))?;
    world.host.ip(&format!("link set {tap} up"))?;
    masquerade_all(world)
}

fn masquerade_all(world: &World) -> Result<()> {
    world.host.nft(&format!(
        "table ip testbed {{
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                oifname \"{UPLINK}\" masquerade
            }}
        }}"
    ))
}

/// Enables forwarding without NAT; the world gets a route to the guest's subnet.
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
