//! A second connection on the tuple of one that was inspected and that the kernel has: with SYN
//! cookies a server makes it from the first one's ACK alone.
use slipgate_abi::{DropReason, Handover, Verdict, tcp::Flags, timeout};

use super::{super::rig::*, scene::*};
use crate::{clock::SECOND_NS, fake::packets::may_fragment, port::VirtioNetHdr};

/// A connection that was let in and that the kernel has; and how long its hello was.
fn let_go() -> (Scene, usize) {
    let mut scene = Scene::new();
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    scene.server(&crate::fake::hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
    (scene, good.len())
}

/// The handshake's ACK again, and behind it a hello for another server, as to a server that has
/// forgotten the first connection.
fn try_again(scene: &mut Scene, what: &str) {
    scene.rig.at_world();
    let first = SERVER_ISN + 1;
    let evil = hello("evil.test");
    let before = scene.rig.dropped(1, DropReason::OutOfWindow);
    let (from, to) = ((GUEST, GUEST_PORT), scene.server);
    for payload in [&b""[..], &evil] {
        let segment = tcp(from, to, Flags::ACK, FIRST, first, &[], payload);
        scene.rig.guest(1, &segment);
    }
    // By way of the engine too: larger than the link that it would leave by.
    let large = [&evil[..], &[0; 9_000]].concat();
    let large = may_fragment(tcp(from, to, Flags::ACK, FIRST, first, &[], &large));
    scene.rig.guest(1, &large);
    let sent = scene.rig.at_world();
    assert!(sent.is_empty(), "{what}: {sent:02x?}");
    let dropped = scene.rig.dropped(1, DropReason::OutOfWindow) - before;
    assert_eq!(dropped, 3, "{what}");
}

/// Another pair of numbers of the same difference, which is a cookie as good, between what both sides
/// have said.
fn try_moved_on(scene: &mut Scene, what: &str) {
    scene.rig.at_world();
    let by = 2_000;
    let (from, to) = ((GUEST, GUEST_PORT), scene.server);
    let (sequence, ack) = (FIRST.wrapping_add(by), SERVER_ISN + 1 + by);
    let before = scene.rig.dropped(1, DropReason::OutOfWindow);
    for payload in [&b""[..], &hello("evil.test")] {
        let segment = tcp(from, to, Flags::ACK, sequence, ack, &[], payload);
        scene.rig.guest(1, &segment);
    }
    let sent = scene.rig.at_world();
    assert!(sent.is_empty(), "{what}: {sent:02x?}");
    let dropped = scene.rig.dropped(1, DropReason::OutOfWindow) - before;
    assert_eq!(dropped, 2, "{what}");
}

/// The guest's segment behind its hello, whole by way of the engine if it is `large`.
fn guest_says(scene: &mut Scene, at: usize, flags: u8, large: bool) {
    let payload = if large { vec![7; 3_000] } else { Vec::new() };
    let segment = may_fragment(scene.segment(at, &payload, flags));
    scene.rig.guest(1, &segment);
}

#[test]
fn the_handshakes_ack_opens_nothing_while_the_connection_lives() {
    let (mut scene, at) = let_go();
    try_again(&mut scene, "at once");
    scene.guest(at, b"more", 0);
    scene.settle();
    assert_eq!(&scene.received()[at..], b"more");
    try_again(&mut scene, "later");
}

/// How a connection ends, given where the guest's stream goes on.
type End = fn(&mut Scene, usize);

#[test]
fn nothing_opens_another_connection_after_the_end() {
    let ends: [(&str, End); 7] = [
        ("the guest's reset", |scene, at| {
            guest_says(scene, at, Flags::RST, false);
        }),
        ("the guest's reset in a large segment", |scene, at| {
            guest_says(scene, at, Flags::RST, true);
        }),
        ("the server's reset", |scene, _| {
            scene.server(b"", Flags::RST);
        }),
        ("the server's reset in a large segment", |scene, _| {
            scene.server(&[7; 9_000], Flags::RST);
        }),
        ("the server's FIN alone", |scene, _| {
            scene.server(b"", Flags::FIN);
        }),
        ("both FINs", |scene, at| {
            scene.server(b"", Flags::FIN);
            scene.guest(at, b"", Flags::FIN);
            scene.settle();
            scene.guest(at + 1, b"", 0);
        }),
        ("the guest's FIN in a large segment", |scene, at| {
            guest_says(scene, at, Flags::FIN, true);
        }),
    ];
    for (what, end) in ends {
        let (mut scene, at) = let_go();
        end(&mut scene, at);
        try_again(&mut scene, what);
        // Whoever speaks on does not take the end back.
        scene.server(b"late", 0);
        scene.guest(at, b"", 0);
        try_again(&mut scene, what);
        scene.rig.pass(timeout::TCP_ESTABLISHED_NS + 2 * SECOND_NS);
        scene.rig.assert_empty();
    }
}

#[test]
fn nothing_opens_another_connection_by_numbers_moved_on_from_the_handshakes() {
    let ends: [(&str, End); 5] = [
        ("the guest's reset", |scene, at| {
            guest_says(scene, at, Flags::RST, false);
        }),
        ("the server's reset", |scene, _| {
            scene.server(b"", Flags::RST);
        }),
        ("both FINs", |scene, at| {
            scene.server(b"", Flags::FIN);
            scene.guest(at, b"", Flags::FIN);
            scene.settle();
            scene.guest(at + 1, b"", 0);
        }),
        ("the server's FIN, and a while later", |scene, _| {
            scene.server(b"", Flags::FIN);
            scene.rig.pass(61 * SECOND_NS);
        }),
        ("silence", |scene, _| scene.rig.pass(21 * SECOND_NS)),
    ];
    for (what, end) in ends {
        let (mut scene, at) = let_go();
        scene.guest(at, &[7; 1_400], 0);
        scene.guest(at + 1_400, &[7; 1_400], 0);
        scene.settle();
        scene.server(&[7; 1_400], 0);
        scene.server(&[7; 1_400], 0);
        scene.settle();
        end(&mut scene, at + 2_800);
        try_moved_on(&mut scene, what);
    }
}

#[test]
fn a_reset_is_for_good() {
    for by_server in [false, true] {
        let (mut scene, at) = let_go();
        match by_server {
            false => guest_says(&mut scene, at, Flags::RST, false),
            true => scene.server(b"", Flags::RST),
        }
        scene.rig.at_world();
        assert_eq!(
            scene.guest(at, b"", 0),
            Handling::Fast,
            "what doubts the reset"
        );
        scene.rig.at_world();
        scene.guest(at, b"more", 0);
        scene.server(b"late", 0);
        scene.guest(at, b"more", 0);
        assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
        assert_eq!(scene.rig.dropped(1, DropReason::OutOfWindow), 2);
    }
}

/// Under `http = "each"`, the default: the session has held every request until then.
#[test]
fn after_both_fins_of_requests_that_were_each_held_nothing_opens_another() {
    let mut scene = Scene::new();
    let get = format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n");
    scene.guest(0, get.as_bytes(), Flags::FIN);
    scene.settle();
    scene.server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Flags::FIN);
    scene.settle();
    scene.guest(get.len() + 1, b"", 0);
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
    try_again(&mut scene, "both FINs");
}

#[test]
fn a_restart_holds_it_still() {
    let (mut scene, at) = let_go();
    let (rig, adoption) = scene.rig.restart(&setup());
    assert_eq!((adoption.live, adoption.uninspected), (1, 0));
    scene.rig = rig;
    try_again(&mut scene, "after a restart");
    assert_eq!(scene.guest(at, b"more", 0), Handling::Fast);
}

#[test]
fn flags_that_contradict_each_other_open_nothing() {
    let (from, to) = ((GUEST, GUEST_PORT), SERVER);
    for more in [Flags::FIN, Flags::RST] {
        let (mut scene, _) = let_go();
        for sequence in [ISN, ISN.wrapping_add(1_000_000)] {
            let both = tcp(from, to, Flags::SYN | more, sequence, 0, &[], b"");
            let dropped = Handling::Dropped(DropReason::BadTcpFlags);
            assert_eq!(scene.rig.guest(1, &both), dropped);
            // Whatever the programs let by.
            let handover = Handover::Syn;
            let mut kernel = scene.rig.kernel.borrow_mut();
            kernel.hand_over(1, handover, 0, VirtioNetHdr::default(), &both);
            drop(kernel);
            scene.rig.turn();
        }
        assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
        assert_eq!(scene.rig.dropped(1, DropReason::BadTcpFlags), 4);
        assert_eq!(scene.rig.flows(), 1);
    }
}
