//! Inspection of QUIC connections.
use slipgate_abi::{DropReason, Handover, VmId};

use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake::{hellos, initials},
    inspection::{RefusedCounts, quic::Version, tcp},
    port::VirtioNetHdr,
};

/// A QUIC client's Initial of this connection with a part of a hello.
fn initial(id: &[u8], number: u32, at: usize, part: &[u8]) -> Vec<u8> {
    let payload = initials::crypto(at, part);
    let datagram = initials::initial(Version::One, id, id, number, &payload);
    udp((GUEST, GUEST_PORT), SERVER, &datagram)
}

#[test]
fn quic_is_held_until_its_hello_is_whole_and_stays_in_the_engine() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let hello = hellos::client_hello(NAME);
    let (begin, end) = hello.split_at(40);
    rig.guest(1, &initial(b"one", 1, 40, end));
    assert!(rig.at_world().is_empty());
    rig.guest(1, &initial(b"one", 0, 0, begin));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 2, "in the order in which they came");
    assert!(sent.iter().all(|packet| is_right(packet)));
    assert_eq!(sent[0].len(), initial(b"one", 1, 40, end).len());
    let nat = (NAT, u16::from_be_bytes([sent[0][20], sent[0][21]]));
    let answer = udp(SERVER, nat, b"\xc0answer");
    assert_eq!(rig.world(&answer), Handling::Engine(Handover::Verdict));
    assert_eq!(rig.at_guest().len(), 1);
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40data"));
    assert_eq!(rig.at_world().len(), 1);

    // Another connection in the same flow.
    let evil = hellos::client_hello("evil.test");
    let way = rig.guest(1, &initial(b"two", 0, 0, &evil));
    assert_eq!(way, Handling::Engine(Handover::Verdict));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.at_guest()[0].1[20..22], [3, 13], "prohibited");
    assert_eq!(rig.engine.core.inspected.counts(VmId::new(101)).name, 1);
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40data"));
    assert!(rig.at_world().is_empty());
    rig.pass(SECOND_NS);
    rig.assert_empty();
    let record = rig.records().remove(0);
    assert_eq!(
        (&record["end"], &record["dns_name"]),
        (&"inspection".into(), &NAME.into())
    );
    assert_eq!(record["tx_packets"], 3);
}

#[test]
fn what_is_not_quic_does_not_go_out_over_udp() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    for (n, other) in [&b"\x16\xfe\xfd"[..], b"", b"\x40short", b"\xc0\0\0\0\x07"]
        .iter()
        .enumerate()
    {
        rig.guest(1, &udp((GUEST, GUEST_PORT + n as u16), SERVER, other));
        rig.guest(1, &udp((GUEST, GUEST_PORT + n as u16), SERVER, other));
    }
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(SECOND_NS);
    // One that was bad on the wire, or is half a hello, goes nowhere.
    let good = initial(b"one", 0, 0, &hellos::client_hello(NAME));
    let mut corrupt = good.clone();
    *corrupt.last_mut().unwrap() ^= 1;
    rig.guest(1, &corrupt);
    rig.guest(1, &initial(b"two", 0, 0, &hellos::client_hello(NAME)[..40]));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.counts(VmId::new(101)).slow, 1);
    rig.assert_empty();
    rig.guest(1, &good);
    assert_eq!(rig.at_world().len(), 1);
    let handed = rig
        .kernel
        .borrow()
        .stats(1)
        .snapshot()
        .0
        .engine_rx_from_guest;
    let (_, drops) = rig.kernel.borrow().stats(1).snapshot();
    let dropped: u64 = DropReason::ALL
        .iter()
        .map(|reason| drops.get(*reason).packets)
        .sum();
    assert_eq!(handed.packets, dropped + 1, "each is counted once");
}

#[test]
fn what_goes_at_once_takes_nothing_along_that_is_held() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &initial(b"one", 0, 0, &hellos::client_hello(NAME)));
    assert_eq!(rig.at_world().len(), 1);
    let evil = hellos::client_hello("evil.test");
    let half = initials::initial(
        Version::One,
        b"two",
        b"two",
        0,
        &initials::crypto(0, &evil[..40]),
    );
    // A frame of two datagrams: more of the open connection follows.
    let frame = udp(
        (GUEST, GUEST_PORT),
        SERVER,
        &[&half[..], b"\x40data"].concat(),
    );
    let vnet = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: half.len() as u16,
        hdr_len: 42,
        ..VirtioNetHdr::default()
    };
    rig.kernel.borrow_mut().guest_sends(1, vnet, &frame);
    rig.turn();
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40more"));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert!(sent[0].ends_with(b"more"));
    assert_eq!(
        rig.engine.core.inspected.counts(VmId::new(101)),
        RefusedCounts::default()
    );
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.counts(VmId::new(101)).slow, 1);
}

#[test]
fn quic_holds_no_more_of_a_vm_than_its_bound() {
    use crate::inspection::sessions::MAX_HELD;
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 8_000,
        ..setup()
    });
    tell(&rig, NAME);
    let far = |id: u8| {
        let payload = initials::crypto(32_000, b"x");
        initials::initial(Version::One, &[id; 8], &[id; 8], 0, &payload)
    };
    for n in 0..400 {
        rig.guest(1, &udp((GUEST, 1_024 + n), SERVER, &far(1)));
        if n < 4 {
            rig.guest(1, &udp((GUEST, 1_024 + n), SERVER, &far(2)));
        }
    }
    let (sessions, _, held) = rig.engine.core.inspected.sessions();
    assert!(sessions > 200);
    assert!(held > MAX_HELD / 2 && held <= MAX_HELD + 65_536, "{held}");
    assert!(rig.dropped(1, DropReason::EngineBusy) > 0);
    assert!(rig.at_world().is_empty());
    // What can't be kept for good is let go of.
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.sessions().2, 0);
}

#[test]
fn a_server_is_called_as_it_answered() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &initial(b"one", 0, 0, &hellos::client_hello(NAME)));
    let sent = rig.at_world().pop().expect("the hello goes out");
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    let acknowledges = initials::initial(Version::One, b"one", b"server", 1, &[2, 0, 0, 0, 0]);
    let acknowledges = udp((GUEST, GUEST_PORT), SERVER, &acknowledges);
    rig.guest(1, &acknowledges);
    assert_eq!(rig.at_world().len(), 0);
    let answer = initials::answer(Version::One, b"one", b"server");
    rig.world(&udp(SERVER, nat, &answer));
    assert_eq!(rig.at_guest().len(), 1);
    rig.guest(1, &acknowledges);
    assert_eq!(rig.at_world().len(), 1);
}

#[test]
fn an_initial_in_a_small_datagram_is_dropped_and_counted() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    for name in [NAME, "evil.test"] {
        let payload = initials::crypto(0, &hellos::client_hello(name));
        let small = initials::short_initial(b"one", &payload);
        rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, &small));
    }
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(rig.dropped(1, DropReason::Malformed), 2);
    assert_eq!(
        rig.engine.core.inspected.counts(VmId::new(101)),
        RefusedCounts::default()
    );
    rig.guest(1, &initial(b"one", 0, 0, &hellos::client_hello(NAME)));
    assert_eq!(rig.at_world().len(), 1);
}

#[test]
fn no_form_of_dtls_goes_along_with_a_connection() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &initial(b"one", 0, 0, &hellos::client_hello(NAME)));
    assert_eq!(rig.at_world().len(), 1);
    let record = |kind: u8, version: [u8; 2], content: &[u8]| {
        let len = (content.len() as u16).to_be_bytes();
        let header = [&[kind][..], &version, &[0; 8], &len].concat();
        [&header[..], content].concat()
    };
    let hello = [&[1, 0, 0, 48, 0, 0, 0, 0, 0, 0, 0, 48][..], &[0xab; 48]].concat();
    let hello = record(22, [0xfe, 0xfd], &hello);
    let before = [
        record(20, [0xfe, 0xfd], &[1]),
        record(21, [0xfe, 0xff], &[1, 0]),
        record(23, [0x01, 0x00], &[7; 20]),
        record(26, [0xfe, 0xfd], &[]),
        // Passed over by who reads DTLS, as what it is not.
        record(21, [0x03, 0x03], &[]),
        vec![0x40; 13],
        vec![0x24, 7, 0, 1, 9],
    ];
    for before in &before {
        let datagram = [&before[..], &hello].concat();
        rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, &datagram));
        assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new(), "{before:02x?}");
    }
    assert_eq!(
        rig.dropped(1, DropReason::Malformed),
        before.len() as u64,
        "each is counted"
    );
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40data"));
    assert_eq!(rig.at_world().len(), 1);
}
