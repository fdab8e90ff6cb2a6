//! slipgate end to end: the real binary, real stacks, real bytes. Each test makes a world of its
//! own and says in its name what must hold. They can run side by side; one that measures time or shares
//! something of the host begins with `slipgate_testbed::turns::alone`.

mod api;
mod api_at_once;
mod api_of_one;
mod as_passt;
mod broken_streams;
mod budgets;
mod captures;
mod changes;
mod clones;
mod cni;
mod compromised;
mod counting;
mod daemon;
mod daemon_forwards;
mod daemon_limits;
mod egress_devices;
mod egress_routes;
mod exec;
mod exhausted;
mod firecracker;
mod first_packets;
mod forged;
mod forwards;
mod fragments;
mod full_table;
mod guest_errors;
mod hairpin;
mod happy_eyeballs;
mod hook_places;
mod host_nat;
mod host_nat_later;
mod host_routes;
mod hostile;
mod idle;
mod inspect;
mod ipv6;
mod joined;
mod learning;
mod libvirt;
mod loopback;
mod lossy_links;
mod matrix;
mod named_tables;
mod names;
mod namespaces;
mod nat_addresses;
mod numbered_streams;
mod observability;
mod orphans;
mod other_root;
mod passed_taps;
mod path_mtu;
mod per_vm;
mod policy;
mod policy_changes;
mod processes;
mod rates;
mod reach;
mod reconnecting;
mod records;
mod refusals;
mod relayed;
mod resolvers;
mod reverse;
mod routes;
mod service_manager;
mod services;
mod shaped;
mod shortages;
mod socket;
mod stand;
mod stun;
mod taps;
mod time_wait;
mod traps;
mod two_hosts;
mod unprivileged;
mod unprivileged_demo;
mod unprivileged_forwards;
mod unprivileged_run;
mod uplinks;
mod vhost_user;
mod vm_uplinks;
mod ways_in;
mod workers;

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::{Duration, Instant},
};

use matrix::{Cell, Mode};
use slipgate_testbed::{
    frame::{FrameBuilder, Mac},
    world::GATEWAY_MAC,
};
use stand::Stand;

/// Longer than anything takes that happens at all, on a machine that has other work as well.
const WAIT: Duration = Duration::from_secs(30);
/// Long enough for an answer, short enough to wait for none.
const BRIEFLY: Duration = Duration::from_millis(300);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// MAC address of every guest.
const GUEST_MAC: Mac = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
/// The resolver that the lease names.
const DNS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 3);

fn at(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

/// A datagram of the guest's, on its way to its gateway.
fn datagram(port: u16, to: SocketAddrV4) -> FrameBuilder {
    FrameBuilder::udp(at(GUEST, port), to)
        .macs(GUEST_MAC, GATEWAY_MAC)
        .payload(b"payload")
}

/// Repeats `f` until it returns a value, for 30 s at most. `what`: description of the awaited event.
fn eventually<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT;
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
