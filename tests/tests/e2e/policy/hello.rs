//! Hellos of inspected connections, cut in every way that TCP permits.

use std::ops::Range;

use slipgate_testbed::tls::ClientHello;

use super::{
    ALLOWED, Cell, DENIED, INSPECT, SHARED, Stage, by_hand::ByHand, holds, https, matrix,
    stage::Mark,
};

matrix! {
    a_forged_sni: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_shared_address_and_the_denied_name_said: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_hello_of_several_segments: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_forged_host: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_hello_split_in_the_name: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_hello_by_octets: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_hello_out_of_order: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_hello_in_overlapping_pieces: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// The allowed name. It has the length of the other name, so that one can replace the other.
pub(super) const ALLOWED_NAME: &str = "api.example.test";
pub(super) const DENIED_NAME: &str = "www.evil-01.test";

pub(super) fn hello(name: &str) -> Vec<u8> {
    ClientHello::to(name).record()
}

/// Mark of success: a server that is permitted could read a ClientHello with a denied name.
pub(super) const READ: Mark = ("the denied name", |seen| {
    seen.could_read(https(ALLOWED), DENIED_NAME)
});

fn a_forged_sni(cell: Cell) {
    let says = |stage: &Stage, server, name: &str| stage.says(https(server), &hello(name));
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            stage.ask("shared.example.test");
            says(stage, ALLOWED, DENIED_NAME);
            // A name that may be asked for, at an address that is another's.
            says(stage, DENIED, ALLOWED_NAME);
            says(stage, SHARED, ALLOWED_NAME);
            // None at all, and one that hides another (ECH).
            stage.says(https(ALLOWED), &ClientHello::default().record());
            let hidden = ClientHello::to(ALLOWED_NAME).extension(0xfe0d, b"hidden hello");
            stage.says(https(ALLOWED), &hidden.record());
        },
        &[
            READ,
            ("a hidden name", |seen| {
                seen.could_read(https(ALLOWED), "hidden hello")
            }),
            ("any byte", |seen| seen.tcp_bytes(https(ALLOWED)) > 0),
            ("an allowed name at a denied address", |seen| {
                seen.at(DENIED) > 0
            }),
            ("an allowed name at another's address", |seen| {
                seen.could_read(https(SHARED), ALLOWED_NAME)
            }),
        ],
        |stage| {
            stage.reaches(https(ALLOWED), &hello(ALLOWED_NAME));
            stage.reaches(https(SHARED), &hello("shared.example.test"));
            stage.goes_on(https(ALLOWED), &hello(ALLOWED_NAME));
        },
    );
}

fn a_shared_address_and_the_denied_name_said(cell: Cell) {
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask("shared.evil.test");
            stage.ask("shared.example.test");
            stage.says(https(SHARED), &hello("shared.evil.test"));
        },
        &[("the denied name", |seen| {
            seen.could_read(https(SHARED), "shared.evil.test")
        })],
        |stage| stage.reaches(https(SHARED), &hello("shared.example.test")),
    );
}

fn a_hello_of_several_segments(cell: Cell) {
    // As with post-quantum keys; the guest's stack hands it over as one frame.
    let long = |name| ClientHello::to(name).extension(21, &[0; 6000]).record();
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            stage.says(https(ALLOWED), &long(DENIED_NAME));
        },
        &[READ],
        |stage| stage.reaches(https(ALLOWED), &long(ALLOWED_NAME)),
    );
}

fn a_forged_host(cell: Cell) {
    let get = |host| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            stage.says(https(ALLOWED), &get(DENIED_NAME));
            // Behind a request that is allowed, on the same connection.
            let both = [get(ALLOWED_NAME), get(DENIED_NAME)].concat();
            stage.says(https(ALLOWED), &both);
        },
        &[READ],
        |stage| {
            let twice = [get(ALLOWED_NAME), get(ALLOWED_NAME)].concat();
            stage.reaches(https(ALLOWED), &twice);
        },
    );
}

/// Sends the hello in such pieces, in that order: refused if it is for another server, else whole
/// and once.
fn holds_in_pieces(cell: Cell, cut: impl Fn(usize) -> Vec<Range<usize>> + Sync) {
    let send = |connection: &ByHand<'_>, name: &str| {
        let hello = hello(name);
        for piece in cut(hello.len()) {
            connection.say(piece.start, &hello[piece]);
        }
    };
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            send(&ByHand::connect(stage, https(ALLOWED)), DENIED_NAME);
        },
        &[
            READ,
            ("any byte", |seen| seen.tcp_bytes(https(ALLOWED)) > 0),
        ],
        |stage| {
            let said = hello(ALLOWED_NAME);
            let mut connection = ByHand::connect(stage, https(ALLOWED));
            send(&connection, ALLOWED_NAME);
            connection.await_echo(said.len());
            // What comes after goes on.
            connection.say(said.len(), b"and more");
            connection.await_echo(said.len() + b"and more".len());
            stage.await_stream(https(ALLOWED), &[&said[..], b"and more"].concat());
        },
    );
}

/// Where the name is in a hello.
pub(super) fn name_in(hello: &[u8], name: &str) -> Range<usize> {
    let same = |part: &[u8]| part == name.as_bytes();
    let begin = hello.windows(name.len()).position(same).unwrap();
    begin..begin + name.len()
}

/// Returns the ranges of pieces of this length, from the first byte on.
fn pieces(len: usize, of: usize) -> Vec<Range<usize>> {
    let begins = (0..len).step_by(of);
    begins.map(|begin| begin..len.min(begin + of)).collect()
}

fn a_hello_split_in_the_name(cell: Cell) {
    let middle = name_in(&hello(ALLOWED_NAME), ALLOWED_NAME).start + 6;
    holds_in_pieces(cell, |len| vec![0..middle, middle..len]);
}

fn a_hello_by_octets(cell: Cell) {
    holds_in_pieces(cell, |len| pieces(len, 1));
}

fn a_hello_out_of_order(cell: Cell) {
    holds_in_pieces(cell, |len| pieces(len, 20).into_iter().rev().collect());
}

fn a_hello_in_overlapping_pieces(cell: Cell) {
    holds_in_pieces(cell, |len| {
        let longer = |piece: Range<usize>| piece.start..len.min(piece.end + 25);
        let mut all: Vec<_> = pieces(len, 20).into_iter().map(longer).collect();
        all.swap(2, 4);
        all.swap(0, 5);
        all
    });
}
