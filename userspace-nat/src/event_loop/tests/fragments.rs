//! Fragments of guests and of the world.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, Handover, Refusal};
use slipgate_policy::Action;

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    packet::{Ipv4, ipv4},
    port::VirtioNetHdr,
};

/// Data of each fragment but the last, bytes.
const STEP: usize = 1_200;
const FROM: At = (GUEST, 5_000);
/// Every order of three fragments.
pub(super) const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];

/// The packet in fragments.
fn cut(packet: &[u8]) -> Vec<Vec<u8>> {
    let data = &packet[20..];
    let all = data.chunks(STEP).enumerate().map(|(number, chunk)| {
        let mut fragment = [&packet[..20], chunk].concat();
        let total = fragment.len() as u16;
        fragment[2..4].copy_from_slice(&total.to_be_bytes());
        let begin = number * STEP;
        let more = begin + chunk.len() < data.len();
        let field = (begin / 8) as u16 | if more { 0x2000 } else { 0 };
        fragment[6..8].copy_from_slice(&field.to_be_bytes());
        ipv4::fill_checksum(&mut fragment, 20);
        fragment
    });
    all.collect()
}

/// Joins fragments, in their order, to the packet that they come from.
fn joined(fragments: &[Vec<u8>]) -> Vec<u8> {
    let mut whole = fragments[0][..20].to_vec();
    for fragment in fragments {
        let ip = Ipv4::parse(fragment).unwrap();
        assert_eq!(ip.fragment_offset, whole.len() - 20);
        assert!(ip.checksum_is_right());
        whole.extend_from_slice(ip.payload());
    }
    let total = whole.len() as u16;
    whole[2..4].copy_from_slice(&total.to_be_bytes());
    whole[6..8].fill(0);
    ipv4::fill_checksum(&mut whole, 20);
    whole
}

/// Data that needs three fragments.
pub(super) fn data() -> Vec<u8> {
    (0..3_000_u32).map(|at| at as u8).collect()
}

/// Sends fragments from the guest; all are handed over.
pub(super) fn guest_sends(rig: &mut Rig, fragments: &[Vec<u8>]) {
    for fragment in fragments {
        let handled = rig.guest(1, fragment);
        assert_eq!(handled, Handling::Engine(Handover::Fragment));
    }
}

#[test]
fn rfc4787_req_14_a_guests_fragments_in_any_order_are_one_packet() {
    for order in ORDERS {
        let mut rig = Rig::new();
        let fragments = cut(&udp(FROM, SERVER, &data()));
        let last = &fragments[order[2]];
        let rest = order[..2].iter().map(|at| fragments[*at].clone());
        guest_sends(&mut rig, &rest.collect::<Vec<_>>());
        assert_eq!((rig.flows(), rig.at_world().len()), (0, 0), "{order:?}");
        guest_sends(&mut rig, std::slice::from_ref(last));
        let sent = rig.at_world();
        let sizes: Vec<_> = sent.iter().map(Vec::len).collect();
        let came: Vec<_> = fragments.iter().map(Vec::len).collect();
        assert_eq!(sizes, came, "in the size that they came in");
        let whole = joined(&sent);
        assert!(is_right(&whole));
        assert_eq!(
            (&whole[28..], &whole[12..16]),
            (&data()[..], &NAT.octets[..])
        );
        let kernel = rig.kernel.borrow();
        let live = kernel.slot(kernel.slots_in_use()[0]);
        let counted = (
            live.tx_packets().load(Relaxed),
            live.tx_bytes().load(Relaxed),
        );
        assert_eq!(counted, (1, 3_028));
    }
}

#[test]
fn rfc4787_req_14_the_worlds_fragments_reach_the_guest() {
    for order in [[0, 1, 2], [0, 2, 1]] {
        let mut rig = Rig::new();
        rig.guest(1, &udp(FROM, SERVER, b"x"));
        let sent = rig.at_world().pop().unwrap();
        let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
        let fragments = cut(&udp(SERVER, nat, &data()));
        for at in order {
            let handled = rig.world(&fragments[at]);
            assert_eq!(handled, Handling::Engine(Handover::Fragment));
        }
        let came: Vec<_> = rig.at_guest().into_iter().map(|(_, l3)| l3).collect();
        let whole = joined(&came);
        assert!(is_right(&whole));
        assert_eq!(
            (&whole[28..], &whole[16..20]),
            (&data()[..], &GUEST.octets[..])
        );
        let kernel = rig.kernel.borrow();
        let live = kernel.slot(kernel.slots_in_use()[0]);
        assert_eq!(live.rx_packets().load(Relaxed), 1);
    }
}

/// Behind one address they would be one datagram's (RFC 6864 section 5.3).
#[test]
fn rfc7857_section_10_two_guests_fragments_of_one_identification_leave_with_two() {
    let mut rig = Rig::new();
    let fragments = cut(&udp(FROM, SERVER, &data()));
    let identification = |packet: &[u8]| u16::from_be_bytes([packet[4], packet[5]]);
    let sent = [1, 2].map(|row| {
        for fragment in &fragments {
            rig.guest(row, fragment);
        }
        let sent = rig.at_world();
        assert_eq!((sent.len(), &sent[0][12..16]), (3, &NAT.octets[..]));
        let of_first = identification(&sent[0]);
        assert!(sent.iter().all(|it| identification(it) == of_first));
        of_first
    });
    assert_ne!(sent[0], sent[1]);
    // A whole packet keeps its guest's.
    let mut whole = udp(FROM, SERVER, b"whole");
    whole[4..6].copy_from_slice(&[7, 7]);
    ipv4::fill_checksum(&mut whole, 20);
    assert_eq!(rig.guest(1, &whole), Handling::Fast);
    assert_eq!(rig.at_world()[0][4..6], [7, 7]);
}

#[test]
fn fragments_to_where_a_rule_denies_go_nowhere() {
    let mut rig = Rig::with(Setup {
        default: Action::Deny,
        ..Setup::default()
    });
    guest_sends(&mut rig, &cut(&udp(FROM, SERVER, &data())));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Default), 1);
    assert_eq!(rig.dropped(1, DropReason::Refused), 1);
}

#[test]
fn fragments_of_a_datagram_that_does_not_become_whole_are_counted() {
    let mut rig = Rig::new();
    let fragments = cut(&udp(FROM, SERVER, &data()));
    guest_sends(&mut rig, &fragments[..2]);
    rig.pass(29 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::Fragment), 0);
    rig.pass(2 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::Fragment), 2);
    guest_sends(&mut rig, &fragments[2..]);
    assert!(rig.at_world().is_empty());
}

#[test]
fn a_fragment_with_offload_metadata_is_malformed() {
    let mut rig = Rig::new();
    let fragments = cut(&udp(FROM, SERVER, &data()));
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..VirtioNetHdr::default()
    };
    rig.kernel.borrow_mut().guest_sends(1, vnet, &fragments[0]);
    rig.turn();
    assert_eq!(rig.dropped(1, DropReason::Malformed), 1);
}

#[test]
fn a_ping_in_fragments_is_answered_and_one_to_the_gateway_is_not() {
    let mut rig = Rig::new();
    guest_sends(&mut rig, &cut(&echo(GUEST, PEER, true, 7, &data())));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 3);
    let whole = joined(&sent);
    assert!(is_right(&whole));
    let id = u16::from_be_bytes([whole[24], whole[25]]);
    for fragment in cut(&echo(PEER, NAT, false, id, &data())) {
        rig.world(&fragment);
    }
    assert_eq!(rig.at_guest().len(), 3);
    guest_sends(&mut rig, &cut(&echo(GUEST, GATEWAY, true, 8, &data())));
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.dropped(1, DropReason::TooBig), 1);
}

#[test]
fn fragments_whose_ttl_is_used_up_are_answered_once() {
    let mut rig = Rig::new();
    let packet = with_ttl(udp(FROM, SERVER, &data()), 1);
    guest_sends(&mut rig, &cut(&packet));
    assert!(rig.at_world().is_empty());
    let answers = rig.at_guest();
    assert_eq!((answers.len(), answers[0].1[20]), (1, 11));
    assert_eq!(rig.dropped(1, DropReason::TtlExpired), 1);
}

/// RFC 1858 section 3: the first fragment would end before the flags.
#[test]
fn tiny_fragments_leave_as_one_packet() {
    let mut rig = Rig::new();
    let packet = may_fragment(syn(FROM, SERVER, 7));
    let head = |data: &[u8], field: u16| {
        let mut fragment = [&packet[..20], data].concat();
        fragment[2..4].copy_from_slice(&(20 + data.len() as u16).to_be_bytes());
        fragment[6..8].copy_from_slice(&field.to_be_bytes());
        ipv4::fill_checksum(&mut fragment, 20);
        fragment
    };
    let fragments = [head(&packet[20..28], 0x2000), head(&packet[28..], 1)];
    guest_sends(&mut rig, &fragments);
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert!(is_right(&sent[0]) && !Ipv4::parse(&sent[0]).unwrap().is_fragment());
}
