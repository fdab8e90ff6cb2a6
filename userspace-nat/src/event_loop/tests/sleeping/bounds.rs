//! What is held for a VM that sleeps is bounded, by its policy, and what is beyond that is counted.
use slipgate_abi::{DropReason, Handover};
use slipgate_policy::Sleep;

use super::{super::rig::*, sequences_at_guest, sleep, wake};
use crate::{
    clock::SECOND_NS,
    packet::{Ipv4, checksum::Sum},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

#[test]
fn a_repeated_segment_is_held_once_and_the_rest_is_bounded() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    for _ in 0..3 {
        rig.world(&ack(SERVER, nat, 0, 10, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::Held), 2);
    let most = Sleep::default().packets;
    for sequence in 0..most {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig).len(), most as usize);
}

#[test]
fn what_is_held_longer_than_the_policys_patience_is_dropped() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    rig.pass(40 * SECOND_NS);
    rig.world(&ack(SERVER, nat, 0, 20, 8));
    rig.pass(30 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [20]);
}

/// A rig whose policy says this of `[sleep]`, and the port of a live connection on the uplink.
fn bounded(sleep: Sleep) -> (Rig, At) {
    let mut rig = Rig::with(Setup {
        sleep,
        ..Setup::default()
    });
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    (rig, nat)
}

#[test]
fn the_bounds_are_those_of_the_vms_policy() {
    let (mut rig, nat) = bounded(Sleep {
        packets: 4,
        patience_s: 5,
        ..Sleep::default()
    });
    sleep(&mut rig);
    for sequence in 0..10 {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 6);
    rig.pass(4 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 6);
    rig.pass(SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 10);
    // What has expired leaves room.
    for sequence in 10..13 {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [1_010, 1_011, 1_012]);
}

#[test]
fn bytes_are_bounded_too_and_counted_from_the_ip_header_on() {
    let segment = ack(SERVER, (NAT, 1), 0, 1, 8).len() as u32;
    let (mut rig, nat) = bounded(Sleep {
        bytes: 3 * segment,
        ..Sleep::default()
    });
    sleep(&mut rig);
    for sequence in [10, 20, 30, 40] {
        rig.world(&ack(SERVER, nat, 0, sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
    // All of it is free again.
    sleep(&mut rig);
    for sequence in [50, 60, 70] {
        rig.world(&ack(SERVER, nat, 0, sequence, 8));
    }
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [50, 60, 70]);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
}

/// A train of segments from the server, as a card with receive offload brings it: with the
/// pseudo-header's sum in its checksum.
fn train(nat: At, sequence: u32, payload: &[u8]) -> (VirtioNetHdr, Vec<u8>) {
    const MSS: u16 = 1_000;
    let mut packet = tcp(SERVER, nat, 0x10, sequence, 8, &[], payload);
    let ip = Ipv4::parse(&packet).unwrap();
    let sum = Sum::default().pseudo(ip.source, ip.destination, 6, packet.len() - 20);
    let partial = sum.folded().to_be_bytes();
    packet[36..38].copy_from_slice(&partial);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: VirtioNetHdr::GSO_TCPV4,
        hdr_len: (ETHERNET_LEN + 40) as u16,
        gso_size: MSS,
        csum_start: (ETHERNET_LEN + 20) as u16,
        csum_offset: 16,
    };
    (vnet, packet)
}

#[test]
fn a_train_of_segments_is_held_as_one_packet_and_delivered_whole() {
    let (mut rig, nat) = bounded(Sleep {
        packets: 2,
        ..Sleep::default()
    });
    sleep(&mut rig);
    let payload: Vec<u8> = (0..4_000_u32).map(|n| n as u8).collect();
    // The first, itself again, a plain segment behind it, and one that finds no room.
    let (vnet, first) = train(nat, 9_001, &payload);
    let (_, last) = train(nat, 14_001, &payload);
    let plain = ack(SERVER, nat, 0, 13_001, 8);
    let frames = [
        (vnet, &first),
        (vnet, &first),
        (VirtioNetHdr::default(), &plain),
        (vnet, &last),
    ];
    for (vnet, packet) in frames {
        let held = Handling::Engine(Handover::Asleep);
        assert_eq!(rig.kernel.borrow_mut().world_sends(vnet, packet), held);
        rig.turn();
    }
    // What is dropped is counted as its segments.
    assert_eq!(rig.dropped(1, DropReason::Held), 4);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 4);
    assert!(rig.at_guest().is_empty());
    assert!(wake(&mut rig));
    let got = rig.at_guest();
    assert_eq!(got.len(), 2, "the train is one frame still");
    assert_eq!(got[0].1[40..], payload);
    let sequences = got.iter().map(|(_, l3)| l3[24..28].try_into().unwrap());
    let sequences: Vec<_> = sequences.map(u32::from_be_bytes).collect();
    assert_eq!(sequences, [9_001, 13_001]);
}
