//! Tests of what a server receives before a name is admitted: nothing that its guest could choose.
use slipgate_abi::{VmRow, tcp::Flags};

use super::{super::rig::*, scene::*};
use slipgate_model::Subject;

/// The option of this length.
fn time(value: u32, echo: u32) -> Vec<u8> {
    let mut option = vec![8, 10];
    option.extend(value.to_be_bytes());
    option.extend(echo.to_be_bytes());
    option
}

fn acknowledgement(window: u16, sequence: u32, acknowledgement: u32, options: &[u8]) -> Vec<u8> {
    let from = (GUEST, GUEST_PORT);
    let flags = Flags::ACK;
    let packet = tcp(from, SERVER, flags, sequence, acknowledgement, options, b"");
    with_window(packet, window)
}

#[test]
fn a_syn_has_its_options_once_and_in_one_order() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let sent = |rig: &mut Rig, port: u16, options: &[u8]| {
        let from = (GUEST, port);
        rig.guest(1, &tcp(from, SERVER, Flags::SYN, ISN, 0, options, b""));
        let packet = rig.at_world().pop().expect("the SYN goes out");
        assert!(is_right(&packet));
        packet[40..].to_vec()
    };
    let options = [
        &[1, 3, 3, 200][..],
        &time(1, 2),
        &time(3, 4),
        &time(5, 6),
        &[4, 2, 2, 4, 5, 0],
    ]
    .concat();
    assert_eq!(options.len(), 40);
    let expected = [&[2, 4, 5, 0, 4, 2][..], &time(5, 0), &[1, 3, 3, 14]].concat();
    assert_eq!(sent(&mut rig, 1_000, &options), expected);
    let options = [3, 3, 7, 4, 2, 1, 1, 1];
    assert_eq!(sent(&mut rig, 1_001, &options), [4, 2, 1, 1, 1, 3, 3, 7]);
    assert_eq!(sent(&mut rig, 1_002, &[1; 8]), Vec::<u8>::new());
}

#[test]
fn acknowledgements_before_a_name_say_nothing_of_the_guests() {
    let syn = [&[1, 1][..], &time(700, 0)].concat();
    let syn_ack = [&[1, 1][..], &time(5_000, 700)].concat();
    let said = |window, ack, at| {
        let rig = Rig::with(setup());
        let mut scene = Scene::with_options(rig, SERVER, [&syn, &syn_ack]);
        scene.server(b"hello", 0);
        let options = [&[1, 1][..], &time(at, 5_000)].concat();
        let next = scene.server_next;
        let packet = acknowledgement(window, FIRST, next - ack, &options);
        scene.rig.guest(1, &packet);
        let sent = scene.rig.at_world();
        let sent = sent.into_iter();
        sent.map(|packet| [&packet[24..36], &packet[38..]].concat())
            .collect::<Vec<_>>()
    };
    let plain = said(0x7210, 0, 701);
    assert_eq!(plain.len(), 1);
    assert_eq!(plain[0][18..22], 700u32.to_be_bytes());
    assert_eq!(said(0x1234, 0, 70_000), plain);
    assert!(said(0x7210, 2, 701).is_empty(), "a part of it");
}

#[test]
fn a_hello_longer_than_the_servers_window_gets_whole() {
    let rig = Rig::with(setup());
    tell(&rig, NAME);
    let mut scene = Scene::at_with_window(rig, (PEER, 80), 100);
    assert!(scene.guest_window > 1_000);
    let head = format!(
        "GET / HTTP/1.1\r\nHost: {NAME}\r\nX: {}\r\n\r\n",
        "y".repeat(500)
    );
    scene.server_window = 1_000;
    scene.guest(0, &head.as_bytes()[..200], 0);
    scene.settle();
    // A probe is answered.
    let probe = scene.segment(199, b"", 0);
    scene.rig.guest(1, &probe);
    assert_eq!(scene.rig.at_guest().len(), 1);
    scene.guest(200, &head.as_bytes()[200..], 0);
    for _ in 0..4 {
        scene.rig.pass(crate::clock::SECOND_NS);
        scene.settle();
    }
    assert_eq!(scene.received(), head.as_bytes());
}

#[test]
fn a_cut_says_nothing_of_the_guests_numbers_to_the_server() {
    let mut scene = Scene::new();
    let what = Subject::Vm { row: VmRow::new(1) };
    scene.rig.tell(move |engine| engine.cut(what));
    scene.rig.at_world();
    scene.guest(123_456, b"", 0);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
}
