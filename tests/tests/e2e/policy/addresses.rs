//! Addresses that no name has opened, or not for this guest.

use std::net::SocketAddrV4;

use slipgate_testbed::{
    Guest,
    clients::{icmp, tcp},
    require_root_and_tun,
};

use super::{ALLOW, ALLOWED, DENIED, OFF, SHARED, Stage, holds, https, stage::DISCARD};
use crate::{BRIEFLY, WAIT};

const DISCARD_AT_ALLOWED: SocketAddrV4 = SocketAddrV4::new(ALLOWED, DISCARD);

#[test]
fn a_pinned_address() {
    require_root_and_tun!();
    holds(
        ALLOW,
        |stage| {
            stage.says(https(ALLOWED), b"pinned");
            stage.sends(DISCARD_AT_ALLOWED, b"pinned");
            let _ = stage.stand.run(|| icmp::ping(ALLOWED, 1, 8, BRIEFLY));
        },
        &[
            ("a connection", |seen| seen.opened(https(ALLOWED)) > 0),
            ("a datagram", |seen| {
                !seen.datagrams(DISCARD_AT_ALLOWED).is_empty()
            }),
            ("a ping", |seen| seen.pings(ALLOWED) > 0),
        ],
        |stage| {
            stage.resolves_and_reaches("api.example.test", https(ALLOWED));
            // What was opened, and not its neighbours.
            assert!(!stage.says(https(DENIED), b"pinned"));
            stage.settle();
            assert_eq!(stage.arrivals().at(DENIED), 0);
        },
    );
}

#[test]
fn an_address_shared_by_an_allowed_and_a_denied_name() {
    require_root_and_tun!();
    holds(
        ALLOW,
        |stage| {
            stage.ask("shared.evil.test");
            stage.says(https(SHARED), b"for shared.evil.test");
        },
        &[
            ("the question", |seen| seen.ask_for("shared.evil.test")),
            ("the connection", |seen| seen.at(SHARED) > 0),
        ],
        |stage| stage.resolves_and_reaches("shared.example.test", https(SHARED)),
    );
}

#[test]
fn a_second_vm_on_the_first_ones_answer() {
    require_root_and_tun!();
    for (args, on) in [(OFF, false), (ALLOW, true)] {
        let stage = Stage::of_two(args);
        let neighbour = &stage.stand.neighbours[0];
        stage.resolves_and_reaches("api.example.test", https(ALLOWED));
        let before = stage.arrivals().opened(https(ALLOWED));
        let says = |guest: &Guest| {
            let connected = guest.run(|| tcp::connect_outcome(https(ALLOWED), WAIT));
            matches!(connected, Ok(tcp::ConnectOutcome::Connected(_)))
        };
        assert_eq!(says(neighbour), !on);
        stage.settle_for(neighbour);
        let after = stage.arrivals().opened(https(ALLOWED));
        assert_eq!(after - before, usize::from(!on));
        // It may ask for itself; that costs no second question upstream.
        stage.ask_for(neighbour, "api.example.test");
        assert!(says(neighbour));
        assert_eq!(stage.dns.udp_queries("api.example.test"), 1);
    }
}
