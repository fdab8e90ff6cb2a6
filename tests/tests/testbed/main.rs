//! The testbed against NATs that are known to work: what it says about them must be true before
//! what it says about slipgate counts.

mod frames;
mod lifetime;
mod outcomes;
mod transfers;

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use slipgate_testbed::{Guest, GuestConfig, World, WorldConfig, baseline};

/// Longer than anything takes that happens at all, on a machine that has other work as well.
const WAIT: Duration = Duration::from_secs(30);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

fn at(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

fn forwarding() -> WorldConfig {
    WorldConfig {
        ip_forward: true,
        ..Default::default()
    }
}

/// A world with one guest behind nftables masquerade.
fn masqueraded(world: WorldConfig, guest: GuestConfig) -> (World, Guest) {
    let world = World::with(world).unwrap();
    let guest = Guest::new(&world, guest).unwrap();
    baseline::masquerade(&world, &guest).unwrap();
    (world, guest)
}
