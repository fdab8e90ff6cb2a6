//! Reuse of a connection or an answer that was allowed once.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
};

use slipgate_testbed::frame::tcp_flags;

use super::{
    ALLOWED, Cell, INSPECT, Stage,
    by_hand::ByHand,
    hello::{ALLOWED_NAME, DENIED_NAME, READ, hello},
    holds, https, matrix,
};
use crate::eventually;

matrix! {
    a_tuple_used_again: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    the_handshakes_ack_after_the_end: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine ends the guest's connections, and none of its ACKs reaches a server";
    an_answer_of_ttl_0: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// A connection from this port that was let in and that the kernel carries.
fn let_in(stage: &Stage, port: u16) -> ByHand<'_> {
    let said = hello(ALLOWED_NAME);
    let mut connection = ByHand::connect_from(stage, port, FIRST, https(ALLOWED)).unwrap();
    connection.say(0, &said);
    connection.await_echo(said.len());
    eventually("a flow that the kernel carries", || {
        let flows = stage.stand.flows_to(stage.address(https(ALLOWED)));
        let mut flows = flows.into_iter();
        flows.find(|flow| flow.guest == connection.local.to_string() && flow.verdict == "fast")
    });
    connection
}

/// The first connection's sequence number.
const FIRST: u32 = 1000;
/// Distance in sequence numbers between two connections with the same tuple.
const AGAIN: u32 = 1_000_000;

fn a_tuple_used_again(cell: Cell) {
    const CLOSED: u16 = 20_900;
    const LIVE: u16 = 20_901;
    const SAME: u16 = 20_903;
    const RESET: u16 = 20_904;
    const LEGITIMATE: u16 = 20_902;
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            let_in(stage, CLOSED).close(hello(ALLOWED_NAME).len());
            let again = ByHand::connect_from(stage, CLOSED, AGAIN, https(ALLOWED));
            again.unwrap().say(0, &hello(DENIED_NAME));
            // With the same sequence number, too: after an end, and after one that the server believes.
            let_in(stage, SAME).close(hello(ALLOWED_NAME).len());
            let again = ByHand::connect_from(stage, SAME, FIRST, https(ALLOWED));
            again.unwrap().say(0, &hello(DENIED_NAME));
            let connection = let_in(stage, RESET);
            let reset = connection.segment(hello(ALLOWED_NAME).len(), b"");
            connection.send(&reset.clone().flags(tcp_flags::RST));
            connection.send(&reset);
            let again = ByHand::connect_from(stage, RESET, FIRST, https(ALLOWED));
            again.unwrap().say(0, &hello(DENIED_NAME));
            // On a live one; whatever the server makes of it.
            let connection = let_in(stage, LIVE);
            connection.send(&connection.syn(AGAIN));
            connection.send(&connection.first_after(AGAIN, &hello(DENIED_NAME)));
        },
        &[READ],
        |stage| {
            let_in(stage, LEGITIMATE).close(hello(ALLOWED_NAME).len());
            let mut again = ByHand::connect_from(stage, LEGITIMATE, AGAIN, https(ALLOWED)).unwrap();
            let said = hello(ALLOWED_NAME);
            again.say(0, &said);
            again.await_echo(said.len());
        },
    );
}

/// A server with SYN cookies makes a connection from the ACK alone, once it has forgotten the one
/// that it was the first ACK of. No SYN is seen, by which anybody would know.
fn the_handshakes_ack_after_the_end(cell: Cell) {
    const CLOSED: u16 = 20_910;
    const RESET: u16 = 20_911;
    const LEGITIMATE: u16 = 20_912;
    let said = hello(ALLOWED_NAME).len();
    let again = |connection: &ByHand<'_>| {
        connection.send(&connection.handshake_again(b""));
        connection.send(&connection.handshake_again(&hello(DENIED_NAME)));
    };
    holds(
        cell,
        INSPECT,
        |stage| {
            let world = &stage.stand.world.net;
            world.sysctl("net.ipv4.tcp_syncookies", "2").unwrap();
            stage.ask(ALLOWED_NAME);
            let connection = let_in(stage, RESET);
            let reset = connection.segment(said, b"");
            connection.send(&reset.flags(tcp_flags::RST | tcp_flags::ACK));
            again(&connection);
            let mut connection = let_in(stage, CLOSED);
            connection.close(said);
            again(&connection);
        },
        &[
            ("the denied name", |seen| {
                seen.has_segment_with(https(ALLOWED), DENIED_NAME)
            }),
            ("an answer to the denied name", |seen| {
                seen.has_echo_of(https(ALLOWED), DENIED_NAME)
            }),
        ],
        |stage| {
            let mut connection = let_in(stage, LEGITIMATE);
            connection.say(said, b"and more");
            connection.await_echo(said + b"and more".len());
        },
    );
}

fn an_answer_of_ttl_0(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    let policy =
        "default = \"deny\"\nrules = [{ allow = \"*.example.test\" }]\n[dns]\nttl_floor_s = 2\n";
    fs::write(&file, policy).unwrap();
    // As a user without privileges, too.
    for path in [scratch.path(), &file] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    holds(
        cell,
        &["--policy", file.to_str().unwrap()],
        |stage| {
            stage.dns.set("zero.example.test", stage.answer(ALLOWED, 0));
            stage.resolves_and_reaches("zero.example.test", https(ALLOWED));
            // It is over when the floor is: what was told is a pinned address again.
            eventually("the end of what the name opened", || {
                let to = stage.address(https(ALLOWED)).to_string();
                let told = stage.stand.slipgate.why("tap0", &to, "tcp");
                (!told.unwrap().1.contains("zero.example.test")).then_some(())
            });
            stage.says(https(ALLOWED), b"long after");
        },
        &[("a pinned address", |seen| {
            seen.could_read(https(ALLOWED), "long after")
        })],
        |stage| {
            stage.ask("zero.example.test");
            stage.reaches(https(ALLOWED), b"asked again");
        },
    );
}
