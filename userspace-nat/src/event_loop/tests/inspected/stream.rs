//! A guest's stream, and the one copy of it that the server gets.
use proptest::prelude::*;
use slipgate_abi::{DropReason, Verdict, VmId, tcp::Flags};

use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake::hellos::{self, records},
    inspection::Refused,
    port::VirtioNetHdr,
};

#[test]
fn a_byte_at_a_time_does_not_stall() {
    let mut scene = Scene::new();
    let hello = records(&hellos::client_hello(NAME), 3);
    for (at, byte) in hello.iter().enumerate() {
        scene.guest(at, &[*byte], 0);
        scene.settle();
        assert_eq!(scene.acknowledged(), at + 1);
    }
    assert_eq!(scene.received(), hello);
}

#[test]
fn the_first_copy_is_the_one_that_is_inspected_and_sent() {
    let (good, bad) = (hello(NAME), hello("api.no.test"));
    assert_eq!(good.len(), bad.len());
    let mut scene = Scene::new();
    scene.guest(50, &good[50..], 0);
    scene.guest(0, &bad[..60], 0);
    scene.guest(50, &bad[50..], 0);
    scene.settle();
    let mixed = [&bad[..50], &good[50..]].concat();
    match hellos_name(&mixed) {
        Some(name) if name == NAME => assert_eq!(scene.received(), mixed),
        _ => scene.assert_refused(Refused::Name),
    }

    // Bad ones that never arrive do not come first.
    let mut scene = Scene::new();
    let mut corrupt = scene.segment(0, &bad, 0);
    *corrupt.last_mut().unwrap() ^= 1;
    scene.rig.guest(1, &corrupt);
    let dying = with_ttl(scene.segment(0, &bad, 0), 1);
    scene.rig.guest(1, &dying);
    let mut partial = scene.segment(0, &bad, 0);
    partial[36..38].fill(0);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..VirtioNetHdr::default()
    };
    scene.rig.kernel.borrow_mut().guest_sends(1, vnet, &partial);
    scene.rig.turn();
    assert_eq!(scene.rig.dropped(1, DropReason::Malformed), 2);
    scene.guest(0, &good, 0);
    scene.settle();
    assert_eq!(scene.received(), good);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Any cuts, order and overlaps with other bytes: the decision is about what reaches the server.
    #[test]
    fn what_reaches_the_server_is_what_was_decided_about(
        good in any::<bool>(),
        pieces in prop::collection::vec((0usize..130, 1usize..60, any::<bool>()), 1..40),
    ) {
        let (name, other) = if good { (NAME, "api.no.test") } else { ("api.no.test", NAME) };
        let (stream, other) = (hello(name), hello(other));
        let mut scene = Scene::new();
        let mut first = vec![None; stream.len()];
        let all = [(0, stream.len(), false)];
        for (at, len, is_other) in pieces.into_iter().chain(all) {
            let at = at.min(stream.len() - 1);
            let end = (at + len).min(stream.len());
            let piece = if is_other { &other } else { &stream };
            scene.guest(at, &piece[at..end], 0);
            for place in at..end {
                first[place].get_or_insert(piece[place]);
            }
        }
        scene.settle();
        let first: Vec<u8> = first.into_iter().flatten().collect();
        let allowed = hellos_name(&first).is_some_and(|name| name == NAME);
        let expected: &[u8] = if allowed { &first } else { b"" };
        prop_assert_eq!(scene.received(), expected);
        prop_assert_eq!(scene.guest_reset.is_some(), !allowed);
    }
}

#[test]
fn what_the_server_does_not_get_is_sent_again() {
    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    let hello = hello(NAME);
    scene.guest(0, &hello, 0);
    scene.settle();
    scene.rig.pass(SECOND_NS / 2);
    assert!(!scene.rig.at_world().is_empty());
    scene.server_is_deaf = false;
    scene.rig.pass(SECOND_NS);
    scene.settle();
    assert_eq!(scene.received(), hello);
    let sent = |scene: &mut Scene| scene.rig.at_world().len();
    scene.rig.pass(60 * SECOND_NS);
    assert_eq!(sent(&mut scene), 0, "it has it");

    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    scene.guest(0, &hello, 0);
    scene.rig.pass(120 * SECOND_NS);
    assert_eq!(
        scene
            .rig
            .engine
            .core
            .inspected
            .counts(VmId::new(101))
            .untaken,
        1
    );
}

#[test]
fn a_long_body_is_sent_on_as_the_server_takes_it() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let body: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let head = format!(
        "POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let stream = [head.as_bytes(), &body].concat();
    let mut at = 0;
    let mut rounds = 0;
    while at < stream.len() {
        let window = usize::from(scene.guest_window).min(stream.len() - at);
        for (n, piece) in stream[at..at + window].chunks(1_400).enumerate() {
            // Some are lost on the way.
            if (rounds + n) % 7 != 3 {
                scene.guest(at + n * 1_400, piece, 0);
            }
        }
        scene.settle();
        at = scene.acknowledged();
        rounds += 1;
        assert!(rounds < 2_000, "{at}");
    }
    scene.guest(at, b"", Flags::FIN);
    scene.settle();
    assert!(scene.received() == stream && scene.server_fin);
    assert_eq!(scene.acknowledged(), stream.len() + 1);
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn a_shut_window_is_asked_about_until_it_opens() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let body = vec![7; 5_000];
    let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 5000\r\n\r\n");
    scene.server_window = 0;
    scene.guest(0, head.as_bytes(), 0);
    scene.settle();
    scene.guest(head.len(), &body, 0);
    scene.settle();
    assert_eq!(scene.received().len(), head.len());
    scene.rig.pass(5 * SECOND_NS);
    assert!(!scene.rig.at_world().is_empty(), "probes");
    scene.server_window = 1_000;
    for _ in 0..40 {
        scene.rig.pass(SECOND_NS);
        scene.settle();
    }
    assert_eq!(scene.received().len(), head.len() + body.len());
}

#[test]
fn a_path_that_carries_less_is_sent_less_for_good() {
    let longest = |rig: &mut Rig| {
        let lens = rig.at_world().into_iter().map(|packet| packet.len());
        lens.max().unwrap_or_default()
    };
    let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 9000\r\n\r\n");
    let begin = || {
        let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
        scene.server_is_deaf = true;
        let body = [head.as_bytes(), &[7; 1_400]].concat();
        scene.guest(0, &body[..1_400], 0);
        scene.guest(1_400, &body[1_400..], 0);
        (scene, body.len())
    };
    // It is silent about it.
    let (mut scene, len) = begin();
    assert!(longest(&mut scene.rig) > 700);
    scene.rig.pass(8 * SECOND_NS);
    scene.rig.at_world();
    let all = FIRST.wrapping_add(len as u32);
    let next = scene.server_next;
    let has_some = ack(scene.server, scene.nat, 0, next, all.wrapping_sub(1_000));
    scene.rig.world(&has_some);
    scene.guest(len, &[7; 1_400], 0);
    let sent = longest(&mut scene.rig);
    assert!(sent > 40 && sent <= 40 + 536, "{sent}");

    // A router tells.
    let (mut scene, _) = begin();
    let sent = scene.rig.at_world().pop().unwrap();
    let mut error = icmp_error(PEER, NAT, 3, 4, &sent);
    error[26..28].copy_from_slice(&700u16.to_be_bytes());
    crate::packet::build::fill_icmp_checksum(PEER, NAT, &mut error[20..]);
    scene.rig.world(&error);
    scene.rig.pass(2 * SECOND_NS);
    let sent = longest(&mut scene.rig);
    assert!(sent > 40 && sent <= 700, "{sent}");
}

#[test]
fn an_answer_from_far_away_is_no_matter() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME), 0);
    scene.settle();
    for far in [0, 1, u32::MAX] {
        let sequence = scene.server_next.wrapping_add(1 << 31).wrapping_add(far);
        let ack = scene.server_ack();
        let packet = tcp(SERVER, scene.nat, Flags::ACK, sequence, ack, &[], b"far");
        scene.rig.world(&packet);
    }
    assert_eq!(scene.verdict(), Some(Verdict::Engine));
}
