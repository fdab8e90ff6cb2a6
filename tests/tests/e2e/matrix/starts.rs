//! Starts of a stand other than the usual.

use std::{net::IpAddr, time::Duration};

use slipgate_testbed::{
    Guest, GuestConfig, OrdinaryUser, PinDir, Slipgate, World, WorldConfig,
    clients::icmp,
    world::{UPLINK, Uplink},
};

use super::{Cell, Mode};
use crate::{Stand, WAIT, stand::give_ipv6};

impl Cell {
    /// Gives the world the cell's family. Returns slipgate's flags for it.
    pub(crate) fn give(self, world: &World) -> &'static [&'static str] {
        if self.is_ipv6() {
            world.give_ipv6().unwrap();
        }
        self.flags()
    }

    /// slipgate's flags for the cell's family.
    pub(crate) fn flags(self) -> &'static [&'static str] {
        match self.is_ipv6() {
            false => &[],
            true => &["--ipv6", "nat"],
        }
    }

    /// A world whose uplink has no L2, with a second one that has. Returns slipgate's flags for it, too.
    pub(crate) fn world_without_l2(self) -> (World, &'static [&'static str]) {
        let world = World::with(WorldConfig {
            uplink: Uplink::Tun,
            ..WorldConfig::default()
        })
        .unwrap();
        let flags = self.give(&world);
        self.add_second_uplink(&world);
        (world, flags)
    }

    /// A guest behind a TAP, which has its address of the cell's family at once.
    pub(crate) fn guest_at(self, world: &World, tap: &str) -> Guest {
        let guest = Guest::new(world, GuestConfig::new(tap)).unwrap();
        if self.is_ipv6() {
            give_ipv6(&guest);
        }
        guest
    }
}

/// Whether a ping of the guest's is answered in time.
pub(crate) fn pings(guest: &Guest, ip: IpAddr, patience: Duration) -> bool {
    let answered = guest.run(|| match ip {
        IpAddr::V4(ip) => icmp::ping(ip, 1, 56, patience).map(|report| report.replies.len() == 1),
        IpAddr::V6(ip) => icmp::ping6(ip, 56, patience).map(|took| took.is_some()),
    });
    answered.unwrap()
}

impl Stand {
    /// The stand of a cell, once slipgate knows an address of the guest's, which forwards lead to.
    pub(crate) fn with_known_guest(cell: Cell, args: &[&str]) -> Stand {
        let stand = Stand::of(cell, args);
        // It shows itself by what it sends.
        let answered = pings(&stand.guest, cell.gateway(), WAIT);
        assert!(answered, "the gateway does not answer");
        stand
    }
}

/// What slipgate says where it does not start with these arguments, in a world that was prepared so.
/// What `prepare` returns is kept meanwhile. `None`: it started.
pub(crate) fn refused_start<T>(
    cell: Cell,
    prepare: impl FnOnce(&World) -> T,
    args: &[&str],
) -> Option<String> {
    let world = World::new().unwrap();
    let args = [args, cell.give(&world)].concat();
    let _kept = prepare(&world);
    let started = match cell.mode {
        Mode::Hybrid => {
            let _guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
            let all = [&["--tap", "tap0", "--uplink", UPLINK], &args[..]].concat();
            Slipgate::attach(&world.host, &PinDir::new().unwrap(), &all).map(drop)
        }
        Mode::User => {
            let user = OrdinaryUser::new().unwrap();
            let socket = user.file("run/tap0.sock");
            let started = Slipgate::attach_socket(&world.host, &user, &socket, &args).map(drop);
            if started.is_err() {
                assert!(!socket.exists() && user.has_nothing_left());
            }
            started
        }
    };
    started.err().map(|error| error.to_string())
}
