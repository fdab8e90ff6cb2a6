//! Tests of the names that inspected connections may have, and may not.
use slipgate_abi::{DropReason, Handover, Refusal, Verdict};

use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake::hellos::{self, record, records},
    inspection::Refused,
};
use slipgate_policy::{Action, Rule};

#[test]
fn an_allowed_name_goes_on_and_then_the_kernel_takes_over() {
    let mut scene = Scene::new();
    assert_eq!(scene.verdict(), Some(Verdict::Engine));
    let hello = hello(NAME);
    assert_eq!(
        scene.guest(0, &hello, 0),
        Handling::Engine(Handover::Verdict)
    );
    scene.settle();
    assert_eq!(scene.received(), hello);
    assert_eq!(scene.acknowledged(), hello.len());
    assert_eq!(
        scene.verdict(),
        Some(Verdict::Engine),
        "the server may ask again"
    );
    // The SYN, the handshake's last acknowledgement, and the hello.
    assert_eq!(scene.rig.dropped(1, DropReason::Held), 3);

    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.heard, hellos::server_hello(false));
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
    assert_eq!(scene.guest(hello.len(), b"more", 0), Handling::Fast);
    // A late copy of other bytes goes by the kernel: the server has had them.
    assert_eq!(scene.rig.engine.core.inspected.sessions(), (0, 0, 0));
    scene.rig.assert_paired();
    scene.rig.pass(10 * 60 * SECOND_NS);
    assert_eq!(scene.rig.flows(), 1);
}

#[test]
fn what_is_not_let_in_is_reset_on_both_sides_and_none_of_it_goes_on() {
    for (why, said) in [
        (Refused::Name, hello("evil.test")),
        (Refused::Name, hello("other.ok.test")),
        (Refused::Name, hello("open.test")),
        (
            Refused::NoName,
            records(&hellos::client_hello_with(&[]), 100),
        ),
        (Refused::Malformed, record(22, &[2, 0, 0, 1, 0])),
        (
            Refused::Unknown,
            b"SSH-2.0-x\r\n".map(|b| b | 0x20).to_vec(),
        ),
        (
            Refused::Name,
            b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n".to_vec(),
        ),
        (
            Refused::NoName,
            b"GET / HTTP/1.1\r\nHost: 198.51.100.7\r\n\r\n".to_vec(),
        ),
    ] {
        let mut scene = Scene::new();
        scene.guest(0, &said, 0);
        assert_eq!(scene.received(), b"");
        scene.assert_refused(why);
        assert_eq!(scene.received(), b"");
    }
}

#[test]
fn a_name_that_shares_the_address_must_have_been_asked_for_too() {
    let mut scene = Scene::new();
    tell(&scene.rig, "open.test");
    let hello = hello("open.test");
    scene.guest(0, &hello, 0);
    scene.settle();
    assert_eq!(scene.received(), hello);
}

#[test]
fn a_second_hello_is_held_to_the_rules_too() {
    let mut scene = Scene::new();
    let first = hello(NAME);
    let second = hello("evil.test");
    // At once, before the server has answered.
    scene.guest(0, &[&first[..], &second].concat(), 0);
    scene.settle();
    assert_eq!(scene.received(), first);
    scene.server(&hellos::server_hello(true), 0);
    scene.assert_refused(Refused::Name);
    assert_eq!(scene.received(), first);

    let mut scene = Scene::new();
    scene.guest(0, &first, 0);
    scene.settle();
    scene.server(&hellos::server_hello(true), 0);
    let ccs = record(20, &[1]);
    scene.guest(first.len(), &[&ccs[..], &first].concat(), 0);
    scene.settle();
    assert_eq!(scene.received(), [&first[..], &ccs, &first].concat());
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn a_server_that_speaks_first_is_heard() {
    let mut scene = Scene::new();
    scene.server(b"220 mail.ok.test\r\n", 0);
    scene.settle();
    assert_eq!(scene.heard, b"220 mail.ok.test\r\n");
    scene.guest(0, b"", 0);
    scene.settle();
    scene.guest(0, b"ehlo x\r\n", 0);
    scene.assert_refused(Refused::Unknown);
}

#[test]
fn each_request_of_a_connection_is_held_to_the_rules() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let good = request(NAME);
    let mut at = 0;
    for _ in 0..3 {
        scene.guest(at, &good, 0);
        at += good.len();
        scene.settle();
        scene.server(b"HTTP/1.1 204 x\r\n\r\n", 0);
        scene.settle();
        assert_eq!(scene.verdict(), Some(Verdict::Engine));
        assert_eq!((scene.received().len(), scene.acknowledged()), (at, at));
        // Long after DNS told, too.
        scene.rig.pass(60 * SECOND_NS);
    }
    scene.guest(at, &[request(NAME), request("evil.test")].concat(), 0);
    scene.assert_refused(Refused::Name);
    assert_eq!(scene.received().len(), at);
}

#[test]
fn a_rule_by_address_lets_in_what_was_asked_for() {
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        rules: vec![
            Rule::parse(Action::Inspect, "0.0.0.0/0:80/tcp").unwrap(),
            Rule::parse(Action::Deny, "evil.test").unwrap(),
        ],
        ..Setup::default()
    });
    rig = {
        let mut scene = Scene::at(rig, (PEER, 80));
        let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
        let good = request(NAME);
        scene.guest(0, &good, 0);
        scene.settle();
        assert_eq!(scene.received(), good);
        scene.guest(good.len(), &request("never.asked.test"), 0);
        scene.assert_refused(Refused::Name);
        scene.rig
    };
    assert_eq!(rig.flows(), 0);
}

#[test]
fn ping_can_say_no_name() {
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        rules: vec![Rule::parse(Action::Inspect, "198.51.100.0/24").unwrap()],
        ..Setup::default()
    });
    rig.guest(1, &echo(GUEST, PEER, true, 7, b"x"));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
}

#[test]
fn a_server_that_does_not_answer_a_hello_by_tls_hears_no_more() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let hello = hello(NAME);
    scene.guest(0, &hello, 0);
    scene.settle();
    let evil = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    scene.guest(hello.len(), evil, 0);
    scene.server(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0);
    scene.assert_refused(Refused::Unanswered);
    assert_eq!(scene.received(), hello);
}
