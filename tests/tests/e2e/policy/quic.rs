//! QUIC: what its first packets say of their server.

use slipgate_testbed::{quic::Initial, tls::ClientHello};

use super::{
    ALLOWED, Arrivals, Cell, DENIED, INSPECT, Stage,
    hello::{ALLOWED_NAME, DENIED_NAME},
    holds, https, matrix,
};
use crate::eventually;

matrix! {
    quic: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// A hello for a server, in so many datagrams of one connection.
fn datagrams(connection: u8, name: &str, count: usize) -> Vec<Vec<u8>> {
    let hello = ClientHello::to(name).handshake();
    let pieces = hello.chunks(hello.len().div_ceil(count)).zip(0u32..);
    let mut place = 0;
    let made = pieces.map(|(piece, number)| {
        let crypto = vec![(place, piece.to_vec())];
        place += piece.len() as u16;
        let connection = [connection; 8];
        Initial {
            connection,
            number,
            crypto,
        }
        .datagram()
    });
    made.collect()
}

/// One connection says two things at the same place.
fn contradicting() -> Vec<Vec<u8>> {
    let initial = |number, name| Initial {
        connection: [6; 8],
        number,
        crypto: vec![(0, ClientHello::to(name).handshake())],
    };
    let both = [initial(0, ALLOWED_NAME), initial(1, DENIED_NAME)];
    both.iter().map(Initial::datagram).collect()
}

fn arrived(seen: &Arrivals, datagram: &[u8]) -> bool {
    seen.datagrams(https(ALLOWED))
        .iter()
        .any(|got| got == datagram)
}

fn quic(cell: Cell) {
    let arrive = |stage: &Stage, wanted: &[Vec<u8>]| {
        eventually("the allowed datagrams", || {
            let seen = stage.arrivals();
            wanted.iter().all(|one| arrived(&seen, one)).then_some(())
        });
    };
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            let send = |datagrams: Vec<Vec<u8>>| stage.sends_all(https(ALLOWED), &datagrams);
            send(datagrams(1, DENIED_NAME, 1));
            send(datagrams(2, DENIED_NAME, 3));
            // In a flow whose first connection is for an allowed server.
            send([datagrams(4, ALLOWED_NAME, 1), datagrams(5, DENIED_NAME, 1)].concat());
            send(contradicting());
            // What is none, and an allowed name at a denied address.
            stage.sends(https(ALLOWED), b"not QUIC");
            stage.sends(https(DENIED), &datagrams(7, ALLOWED_NAME, 1)[0]);
        },
        &[
            ("another name", |seen| {
                arrived(seen, &datagrams(1, DENIED_NAME, 1)[0])
            }),
            ("a part of another name", |seen| {
                datagrams(2, DENIED_NAME, 3)
                    .iter()
                    .any(|part| arrived(seen, part))
            }),
            ("another name in a flow that is let in", |seen| {
                arrived(seen, &datagrams(5, DENIED_NAME, 1)[0])
            }),
            ("another name in the place of an allowed one", |seen| {
                arrived(seen, &contradicting()[1])
            }),
            ("what is not QUIC", |seen| arrived(seen, b"not QUIC")),
            ("an allowed name at a denied address", |seen| {
                seen.at(DENIED) > 0
            }),
        ],
        |stage| {
            for count in [1, 3] {
                let all = datagrams(8, ALLOWED_NAME, count);
                stage.sends_all(https(ALLOWED), &all);
                arrive(stage, &all);
            }
        },
    );
}
