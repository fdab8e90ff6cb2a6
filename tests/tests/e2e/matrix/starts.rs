//! Starts of a stand other than the usual.

use std::net::IpAddr;

use slipgate_testbed::{
    Guest, GuestConfig, OrdinaryUser, PinDir, Slipgate, World, clients::icmp, world::UPLINK,
};

use super::{Cell, Mode};
use crate::{Stand, WAIT};

impl Stand {
    /// The stand of a cell, once slipgate knows an address of the guest's, which forwards lead to.
    pub(crate) fn with_known_guest(cell: Cell, args: &[&str]) -> Stand {
        let stand = Stand::of(cell, args);
        // It shows itself by what it sends.
        let answered = stand.run(|| match cell.gateway() {
            IpAddr::V4(ip) => icmp::ping(ip, 1, 8, WAIT).map(|report| report.replies.len() == 1),
            IpAddr::V6(ip) => icmp::ping6(ip, 8, WAIT).map(|took| took.is_some()),
        });
        assert!(answered.unwrap(), "the gateway does not answer");
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
    let mut args = args.to_vec();
    if cell.is_ipv6() {
        world.give_ipv6().unwrap();
        args.extend(["--ipv6", "nat"]);
    }
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
