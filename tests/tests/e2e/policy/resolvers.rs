//! Ways to ask for a name past slipgate's DNS.

use std::{io::Write, net::SocketAddr};

use slipgate_testbed::{
    clients::{dns, tcp},
    dns_wire::Record,
    tls::ClientHello,
};

use super::{
    ALLOW, ALLOWED, Cell, SECOND_RESOLVER, Service, Stage, at, holds, https, matrix,
    stage::{DOT, HIDDEN_DNS},
};
use crate::WAIT;

matrix! {
    a_second_resolver: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    dns_over_tcp: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    dns_over_tls_and_quic: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const HIDDEN: Service = at(SECOND_RESOLVER, HIDDEN_DNS);
const TLS_ELSEWHERE: Service = at(SECOND_RESOLVER, DOT);
const TLS_AT_ALLOWED: Service = at(ALLOWED, DOT);

fn a_second_resolver(cell: Cell) {
    holds(
        cell,
        ALLOW,
        |stage| {
            for resolver in [at(SECOND_RESOLVER, 53), HIDDEN] {
                stage.ask_at(stage.address(resolver), &stage.question("evil.test"));
            }
        },
        &[
            ("the question", |seen| seen.ask_for("evil.test")),
            ("one to a hidden port", |seen| {
                !seen.datagrams(HIDDEN).is_empty()
            }),
        ],
        |stage| {
            // Who asks another resolver for what he may have gets it, from ours.
            let resolver = stage.address(at(SECOND_RESOLVER, 53));
            let found = stage.ask_at(resolver, &stage.question("api.example.test"));
            let addresses: Vec<_> = found
                .unwrap()
                .records
                .iter()
                .filter_map(Record::ip)
                .collect();
            assert_eq!(addresses, [stage.ip(ALLOWED)]);
            stage.reaches(https(ALLOWED), b"asked elsewhere");
            assert_eq!(stage.arrivals().at(SECOND_RESOLVER), 0);
        },
    );
}

/// Asks over TCP, one octet a segment.
fn ask_by_octets(stage: &Stage, resolver: SocketAddr, name: &str) -> Option<u8> {
    let query = stage.question(name).to_bytes();
    let framed = [&(query.len() as u16).to_be_bytes()[..], &query].concat();
    stage.stand.run(|| {
        let mut stream = tcp::connect(resolver, WAIT).ok()?;
        for octet in framed {
            stream.write_all(&[octet]).ok()?;
        }
        dns::read_reply(&mut stream).ok().map(|reply| reply.code)
    })
}

fn dns_over_tcp(cell: Cell) {
    const REFUSED: Option<u8> = Some(5);
    holds(
        cell,
        ALLOW,
        |stage| {
            let resolver = stage.address(at(SECOND_RESOLVER, 53));
            let whole = stage
                .stand
                .run(|| dns::ask_tcp(resolver, &stage.question("whole.evil.test"), WAIT));
            let cut = ask_by_octets(stage, resolver, "cut.evil.test");
            assert_eq!(whole.ok().map(|found| found.reply.code), cut);
            assert!(cut.is_some());
        },
        &[
            ("a whole question", |seen| seen.ask_for("whole.evil.test")),
            ("one by octets", |seen| seen.ask_for("cut.evil.test")),
        ],
        |stage| {
            let resolver = stage.address(at(SECOND_RESOLVER, 53));
            assert_eq!(ask_by_octets(stage, resolver, "evil.test"), REFUSED);
            assert_eq!(ask_by_octets(stage, resolver, "api.example.test"), Some(0));
            stage.reaches(https(ALLOWED), b"asked over TCP");
            assert_eq!(stage.arrivals().at(SECOND_RESOLVER), 0);
        },
    );
}

fn dns_over_tls_and_quic(cell: Cell) {
    let hello = ClientHello::to("dns.example.test").record();
    holds(
        cell,
        ALLOW,
        |stage| {
            // Nobody has told the address; and at one that was told, the port is no other's.
            stage.ask("api.example.test");
            for resolver in [TLS_ELSEWHERE, TLS_AT_ALLOWED] {
                stage.says(resolver, &hello);
                stage.sends(resolver, b"a QUIC packet");
            }
        },
        &[
            ("TLS", |seen| seen.opened(TLS_ELSEWHERE) > 0),
            ("QUIC", |seen| !seen.datagrams(TLS_ELSEWHERE).is_empty()),
            ("TLS at an open address", |seen| {
                seen.opened(TLS_AT_ALLOWED) > 0
            }),
            ("QUIC at an open address", |seen| {
                !seen.datagrams(TLS_AT_ALLOWED).is_empty()
            }),
        ],
        |stage| stage.reaches(https(ALLOWED), &hello),
    );
}
