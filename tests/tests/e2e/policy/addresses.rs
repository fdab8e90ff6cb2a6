//! Addresses that no name has opened, or not for this guest.

use slipgate_testbed::{Guest, clients::tcp};

use super::{
    ALLOW, ALLOWED, Cell, DENIED, OFF, SHARED, Service, Stage, at, holds, https, matrix,
    stage::DISCARD,
};
use crate::{BRIEFLY, WAIT};

matrix! {
    a_pinned_address: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    an_address_shared_by_an_allowed_and_a_denied_name: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_second_vm_on_the_first_ones_answer: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own, which has no other's answers";
}

const DISCARD_AT_ALLOWED: Service = at(ALLOWED, DISCARD);

fn a_pinned_address(cell: Cell) {
    holds(
        cell,
        ALLOW,
        |stage| {
            stage.says(https(ALLOWED), b"pinned");
            stage.sends(DISCARD_AT_ALLOWED, b"pinned");
            stage.pings(ALLOWED, BRIEFLY);
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

fn an_address_shared_by_an_allowed_and_a_denied_name(cell: Cell) {
    holds(
        cell,
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

fn a_second_vm_on_the_first_ones_answer(cell: Cell) {
    for (args, on) in [(OFF, false), (ALLOW, true)] {
        let stage = Stage::of_two(cell, args);
        let neighbour = &stage.stand.neighbours[0];
        stage.resolves_and_reaches("api.example.test", https(ALLOWED));
        let before = stage.arrivals().opened(https(ALLOWED));
        let says = |guest: &Guest| {
            let server = stage.address(https(ALLOWED));
            let connected = guest.run(|| tcp::connect_outcome(server, WAIT));
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
