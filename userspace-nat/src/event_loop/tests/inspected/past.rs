//! What else has room for a word to the server.
use slipgate_abi::{DropReason, tcp::Flags};

use super::{super::rig::*, ends::cut_all, scene::*};
use crate::packet::{Ipv4, checksum::Sum};

#[test]
fn no_payload_goes_before_the_handshake() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let guest = (GUEST, GUEST_PORT);
    let cookie = [2, 4, 0x23, 0, 34, 4, 1, 2];
    rig.guest(1, &tcp(guest, SERVER, Flags::SYN, ISN, 0, &cookie, b"GET"));
    assert_eq!(rig.at_world().len(), 0);
    rig.guest(1, &syn(guest, SERVER, ISN));
    rig.guest(
        1,
        &tcp(guest, SERVER, Flags::ACK, FIRST, 1, &[], &hello(NAME)),
    );
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert_eq!(&sent[0][33..34], &[Flags::SYN]);
}

/// Points behind the next byte.
fn urgent(mut packet: Vec<u8>) -> Vec<u8> {
    packet[33] |= 0x20;
    packet[39] = 1;
    with_checksum(packet)
}

fn with_checksum(mut packet: Vec<u8>) -> Vec<u8> {
    let parsed = Ipv4::parse(&packet).unwrap();
    let (source, destination) = (parsed.source, parsed.destination);
    packet[36..38].fill(0);
    let sum = Sum::default()
        .pseudo(source, destination, 6, packet.len() - 20)
        .bytes(&packet[20..])
        .finish();
    packet[36..38].copy_from_slice(&sum.to_be_bytes());
    packet
}

fn with_tos(mut packet: Vec<u8>, tos: u8) -> Vec<u8> {
    packet[1] = tos;
    crate::packet::ipv4::fill_checksum(&mut packet, 20);
    packet
}

#[test]
fn urgent_data_goes_nowhere_before_the_kernel_has_the_flow() {
    let mut scene = Scene::new();
    let good = hello(NAME);
    let only = urgent(scene.segment(0, b"", 0));
    scene.rig.guest(1, &only);
    let with = urgent(scene.segment(0, &good, 0));
    scene.rig.guest(1, &with);
    let again = urgent(syn((GUEST, GUEST_PORT), SERVER, ISN));
    scene.rig.guest(1, &again);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    scene.guest(0, &good, 0);
    scene.settle();
    let late = urgent(scene.segment(good.len(), b"", 0));
    scene.rig.guest(1, &late);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.received(), good);

    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &urgent(syn((GUEST, GUEST_PORT), SERVER, ISN)));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
}

#[test]
fn headers_say_no_more_than_a_connection_needs() {
    // MPTCP, an unknown option, and what lies behind the options' end.
    let odd = [
        30, 4, 0, 1, 254, 4, 0xbe, 0xef, 3, 3, 7, 0, 0xbe, 0xef, 0xbe, 0xef,
    ];
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let from = (GUEST, GUEST_PORT);
    for _ in 0..2 {
        rig.guest(1, &tcp(from, SERVER, Flags::SYN, ISN, 0, &odd, b""));
        let sent = rig.at_world().pop().expect("the SYN goes out");
        assert!(is_right(&sent));
        assert_eq!(sent[40..], [1, 3, 3, 7]);
    }

    let mut scene = Scene::new();
    let next = scene.server_next;
    scene.server(b"", 0);
    let with = tcp(from, SERVER, Flags::ACK, FIRST, next, &odd, b"");
    scene.rig.guest(1, &with);
    let sent = scene.rig.at_world().pop().expect("it is acknowledged");
    assert_eq!(
        (sent.len(), is_right(&sent)),
        (40, true),
        "none before a name"
    );
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    let at = FIRST.wrapping_add(good.len() as u32);
    let with = tcp(from, SERVER, Flags::ACK, at, next, &odd, b"");
    scene.rig.guest(1, &with);
    let sent = scene.rig.at_world().pop().expect("it is acknowledged");
    assert_eq!((&sent[40..], is_right(&sent)), (&[1; 16][..], true));
}

#[test]
fn errors_of_a_guest_carry_nothing_past_inspection() {
    let mut scene = Scene::new();
    let about = tcp(
        SERVER,
        (GUEST, GUEST_PORT),
        Flags::ACK,
        SERVER_ISN + 1,
        FIRST,
        &[],
        &[7; 900],
    );
    let error = icmp_error(GUEST, PEER, 3, 3, &about);
    scene.rig.guest(1, &error);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.dropped(1, DropReason::Refused), 1);
    scene.guest(0, &hello(NAME), 0);
    scene.settle();
    scene.rig.guest(1, &error);
    let sent = scene.rig.at_world().pop().expect("it goes on");
    assert_eq!((sent.len(), is_right(&sent)), (56, true));

    cut_all(&mut scene.rig);
    scene.rig.at_world();
    scene.rig.guest(1, &error);
    let inward = icmp_error(PEER, NAT, 3, 1, &tcp(scene.nat, SERVER, 0, 1, 1, &[], b""));
    scene.rig.at_guest();
    scene.rig.world(&inward);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.at_guest(), []);
    assert_eq!(scene.rig.dropped(1, DropReason::Denied), 2);
}

/// A SYN with everything that Linux puts there, at this time, with these flags and window.
fn offering(time: u8, flags: u8, window: u16) -> Vec<u8> {
    let options = [
        2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, time, 0, 0, 0, 0, 1, 3, 3, 7,
    ];
    let from = (GUEST, GUEST_PORT);
    let mut packet = tcp(from, SERVER, Flags::SYN | flags, ISN, 0, &options, b"");
    packet[34..36].copy_from_slice(&window.to_be_bytes());
    with_checksum(packet)
}

#[test]
fn a_syn_that_is_repeated_says_nothing_new() {
    const ECN: u8 = 0xc0;
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let mut first = with_tos(offering(1, ECN | 8, 1_000), 0xb8);
    first[28..32].fill(0xbe);
    rig.guest(1, &with_checksum(first));
    let first = rig.at_world().pop().expect("the SYN goes out");
    assert_eq!(first[28..32], [0; 4]);
    assert!(is_right(&first));
    assert_eq!((first[1], first[33]), (0, Flags::SYN | ECN));
    assert_eq!(first[34..36], [3, 0xe8]);
    // Another time is no matter; ECN is not tried twice.
    for time in [2, 3] {
        rig.guest(1, &offering(time, 0, 1_000));
        let again = rig.at_world().pop().expect("it goes out again");
        assert!(is_right(&again));
        assert_eq!(again[33], Flags::SYN);
        assert_eq!(
            (&again[24..33], &again[34..36]),
            (&first[24..33], &first[34..36])
        );
        assert_eq!(again[38..], first[38..]);
    }
    // Another window, other options, data.
    let before = rig.dropped(1, DropReason::Refused);
    rig.guest(1, &offering(4, 0, 1_001));
    rig.guest(1, &syn((GUEST, GUEST_PORT), SERVER, ISN));
    assert_eq!(rig.dropped(1, DropReason::Refused), before + 2);
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    // Nor does it say anything behind the handshake.
    let nat = (NAT, u16::from_be_bytes([first[20], first[21]]));
    rig.world(&syn_ack(SERVER, nat, SERVER_ISN, FIRST));
    rig.guest(1, &offering(5, 0, 1_001));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_reset_before_the_answer_is_about_an_answer_that_is_none() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &syn((GUEST, GUEST_PORT), SERVER, ISN));
    let sent = rig.at_world().pop().expect("the SYN goes out");
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    let reset = |at| tcp((GUEST, GUEST_PORT), SERVER, Flags::RST, at, 0, &[], b"");
    rig.guest(1, &reset(0xbeef));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    // Of an older connection (RFC 9293 section 3.5.2).
    rig.world(&syn_ack(SERVER, nat, SERVER_ISN, 0xbeef));
    rig.guest(1, &reset(0xbeee));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    for goes in [1, 0] {
        rig.guest(1, &reset(0xbeef));
        assert_eq!(rig.at_world().len(), goes, "once");
    }
    assert_eq!(rig.flows(), 1);
}

#[test]
fn acknowledgements_before_a_name_are_as_many_as_what_they_can_be_about() {
    let mut scene = Scene::new();
    let (from, next) = ((GUEST, GUEST_PORT), scene.server_next);
    let says = |scene: &mut Scene, ack: u32, window: u16, payload: &[u8]| {
        let mut packet = tcp(from, SERVER, Flags::ACK, FIRST, ack, &[], payload);
        packet[34..36].copy_from_slice(&window.to_be_bytes());
        scene.rig.guest(1, &with_checksum(packet));
        scene.rig.at_world().len()
    };
    for window in 1..20 {
        assert_eq!(says(&mut scene, next, window, b""), 0);
        assert_eq!(says(&mut scene, next, 100 + window, b"G"), 0);
    }
    scene.server(b"220 welcome", 0);
    assert_eq!(says(&mut scene, next + 11, 7, b""), 1);
    assert_eq!(says(&mut scene, next + 11, 8, b""), 0);
}
