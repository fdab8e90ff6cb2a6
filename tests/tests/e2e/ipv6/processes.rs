//! Two processes of one host, to whose VMs the network routes prefixes.
use std::net::IpAddr;

use slipgate_testbed::{
    GUEST_DEVICE, Guest, GuestConfig, PinDir, Slipgate, World, WorldConfig, require_root_and_tun,
    world::UPLINK,
};

use super::{routed::route_by_host, scene::*};

const PREFIX64: &str = "2001:db8:42::/64";
/// An address of it.
const ADDRESS: &str = "2001:db8:42::9/128";
/// Another one.
const BESIDE: &str = "2001:db8:42::a/128";

/// A host with two TAPs whose guests are there.
struct Host {
    world: World,
    guests: [Guest; 2],
    pins: PinDir,
}

impl Host {
    fn new() -> Self {
        let world = World::with(WorldConfig::default()).unwrap();
        give_world(&world);
        route_by_host(&world, PREFIX64);
        let guests = ["tap0", "tap1"].map(|tap| Guest::new(&world, GuestConfig::new(tap)).unwrap());
        let pins = PinDir::new().unwrap();
        Self {
            world,
            guests,
            pins,
        }
    }

    /// Starts a process for the VM of a TAP.
    fn attach(&self, tap: &str, routed: &str) -> slipgate_testbed::Result<Slipgate> {
        let mode = format!("routed:{routed}");
        let args = ["--tap", tap, "--uplink", UPLINK, "--ipv6", &mode];
        Slipgate::attach(&self.world.host, &self.pins, &args)
    }

    /// The guest makes an address of its prefix, and reaches the world with it.
    fn reaches_the_world(&self, guest: &Guest) {
        enable(&guest.ns, &[GUEST_DEVICE]);
        until("an address", || address_in(&guest.ns).is_some());
        let server = Echo::start(&self.world, SERVER6, 7000);
        let mut stream = connect_from(&guest.ns, server.address()).unwrap();
        assert_eq!(round(&mut stream, b"own").unwrap(), b"own");
        let own = address_in(&guest.ns).unwrap();
        assert_eq!(server.peers(), [IpAddr::from(own)]);
    }
}

/// Why a start was refused for what the VM of `tap` has.
fn refused(start: slipgate_testbed::Result<Slipgate>, wanted: &str, has: &str, tap: &str) {
    let why = start.err().expect("a refusal").to_string();
    let expected = format!("{wanted} overlaps {has}, which is routed to {tap}, a VM of another");
    assert!(why.contains(&expected), "{why}");
}

#[test]
fn ipv6_routed_prefixes_of_two_processes_do_not_overlap() {
    require_root_and_tun!();
    let host = Host::new();
    for (first, second) in [(ADDRESS, PREFIX64), (PREFIX64, ADDRESS)] {
        let mut there = host.attach("tap0", first).unwrap();
        refused(host.attach("tap1", second), second, first, "tap0");
        // What is refused takes nothing from who is there, nor from the next one.
        assert!(there.broker_runs());
        if first == ADDRESS {
            let mut beside = host.attach("tap1", BESIDE).unwrap();
            assert!(beside.stop().unwrap().success());
        } else {
            host.reaches_the_world(&host.guests[0]);
        }

        // A process that is dead has nothing that the living can't have.
        there.kill_both().unwrap();
        let mut living = host.attach("tap1", second).unwrap();
        if second == PREFIX64 {
            host.reaches_the_world(&host.guests[1]);
        }
        refused(there.again(), first, second, "tap1");
        assert!(living.stop().unwrap().success());
        let mut again = there.again().unwrap();
        assert!(again.stop().unwrap().success());
        assert!(host.pins.pins().is_empty(), "{:?}", host.pins.pins());
    }
}
