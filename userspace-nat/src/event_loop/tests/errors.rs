use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, Handover};

use super::rig::*;
use crate::{
    packet::{Ipv4, Packet},
    port::VirtioNetHdr,
};

fn ports(l4: &[u8]) -> (u16, u16) {
    (
        u16::from_be_bytes([l4[0], l4[1]]),
        u16::from_be_bytes([l4[2], l4[3]]),
    )
}

/// The quoted packet of an error.
fn quote(error: &[u8]) -> &[u8] {
    &error[28..]
}

#[test]
fn rfc5508_req_4_an_error_from_the_world_is_translated_inward() {
    let mut rig = Rig::new();
    let original = udp((GUEST, 5_000), SERVER, b"payload");
    rig.guest(1, &original);
    let sent = rig.at_world().pop().unwrap();
    let router = slipgate_abi::Ip4 {
        octets: [203, 0, 113, 9],
    };
    let error = icmp_error(router, NAT, 3, 1, &sent);
    assert_eq!(rig.world(&error), Handling::Engine(Handover::Icmp));
    let (vm, got) = rig.at_guest().pop().expect("the error arrives");
    assert_eq!(vm, 101);
    assert!(is_right(&got), "outer checksums");
    assert_eq!((got[20], got[21]), (3, 1), "type and code stay");
    // RFC 4787 REQ-12a: whoever sent it.
    assert_eq!(
        (&got[12..16], &got[16..20]),
        (&router.octets[..], &GUEST.octets[..])
    );
    // What is quoted is what the guest sent, but for the TTL that it had on its way.
    let mut quoted = quote(&got).to_vec();
    assert!(is_right(&quoted), "inner checksums");
    quoted[8] = original[8];
    crate::packet::ipv4::fill_checksum(&mut quoted, 20);
    assert_eq!(quoted, original);
}

#[test]
fn rfc5508_req_4_tcp_and_echo_quotes_of_eight_bytes() {
    let mut rig = Rig::new();
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    rig.guest(1, &echo(GUEST, PEER, true, 77, b"abcd"));
    for sent in rig.at_world() {
        rig.world(&icmp_error(PEER, NAT, 11, 0, &sent[..28]));
        let (_, got) = rig.at_guest().pop().expect("the error arrives");
        assert!(is_right(&got));
        let inner = Ipv4::parse_truncated(quote(&got)).unwrap();
        assert!(inner.checksum_is_right());
        assert_eq!(inner.source, GUEST);
        match inner.protocol {
            6 => assert_eq!(ports(inner.payload()), (40_000, 443)),
            _ => assert_eq!(inner.payload()[4..6], 77u16.to_be_bytes()),
        }
    }
}

#[test]
fn rfc5508_req_5_an_error_from_the_guest_is_translated_outward() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, ports(&sent[20..]).0);
    let reply = udp(SERVER, nat, b"y");
    rig.world(&reply);
    let (_, delivered) = rig.at_guest().pop().unwrap();
    let error = icmp_error(GUEST, PEER, 3, 3, &delivered);
    assert_eq!(rig.guest(1, &error), Handling::Engine(Handover::Icmp));
    let out = rig.at_world().pop().expect("the error goes out");
    assert!(is_right(&out));
    assert_eq!(
        (&out[12..16], &out[16..20]),
        (&NAT.octets[..], &PEER.octets[..])
    );
    let quoted = quote(&out);
    assert!(is_right(quoted));
    assert_eq!(ports(&quoted[20..]), (443, nat.1));
    assert_eq!(&quoted[16..20], &NAT.octets);
}

#[test]
fn rfc1812_an_error_of_the_guest_goes_on_with_576_bytes_at_most() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, ports(&sent[20..]).0);
    rig.world(&udp(SERVER, nat, &[7; 1_300]));
    let (_, delivered) = rig.at_guest().pop().unwrap();
    for (quoted, expected) in [(548, 576), (549, 576), (1_328, 576), (100, 128)] {
        let error = icmp_error(GUEST, PEER, 3, 3, &delivered[..quoted]);
        rig.guest(1, &error);
        let out = rig.at_world().pop().expect("the error goes out");
        assert_eq!((out.len(), is_right(&out)), (expected, true), "{quoted}");
    }
}

#[test]
fn an_error_about_no_flow_goes_nowhere() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.at_world();
    // About another port, to another address than the quoted source, and a redirect.
    let never = udp((PEER, 443), (GUEST, 5_001), b"y");
    rig.guest(1, &icmp_error(GUEST, PEER, 3, 3, &never));
    let known = udp((PEER, 443), (GUEST, 5_000), b"y");
    let elsewhere = slipgate_abi::Ip4 {
        octets: [203, 0, 113, 9],
    };
    rig.guest(1, &icmp_error(GUEST, elsewhere, 3, 3, &known));
    assert_eq!(rig.dropped(1, DropReason::NoFlow), 2);
    rig.guest(1, &icmp_error(GUEST, PEER, 5, 1, &known));
    assert_eq!(rig.dropped(1, DropReason::IcmpType), 1);
    assert!(rig.at_world().is_empty());
}

#[test]
fn rfc5508_req_3_a_wrong_outer_checksum_is_dropped_a_wrong_inner_one_is_not() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"payload"));
    let mut sent = rig.at_world().pop().unwrap();
    let mut error = icmp_error(PEER, NAT, 3, 1, &sent);
    error[22] ^= 1;
    rig.world(&error);
    assert_eq!(rig.dropped(1, DropReason::Malformed), 1);
    sent[26] ^= 0x55;
    rig.world(&icmp_error(PEER, NAT, 3, 1, &sent));
    assert_eq!(rig.at_guest().len(), 1);
}

#[test]
fn rfc5508_req_6_rfc4787_req_12_rfc5382_req_10_an_error_refreshes_and_ends_nothing() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let seen = rig.kernel.borrow().slot(slot).rx_last_ns().load(Relaxed);
    rig.pass(200_000_000_000);
    rig.world(&icmp_error(PEER, NAT, 3, 1, &sent));
    assert_eq!(
        rig.kernel.borrow().slot(slot).rx_last_ns().load(Relaxed),
        seen
    );
    assert_eq!(rig.flows(), 1);
    rig.pass(105_000_000_000);
    rig.assert_empty();
}

#[test]
fn rfc4787_req_13_with_df_the_mtu_is_told() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, &[7; 1_400]));
    let (_, error) = rig.at_guest().pop().expect("an ICMP error");
    assert!(is_right(&error));
    assert_eq!((error[20], error[21]), (3, 4));
    assert_eq!(error[26..28], 1_400u16.to_be_bytes());
    assert!(error.len() <= 576);
    assert_eq!(rig.dropped(1, DropReason::TooBig), 1);
    assert!(rig.at_world().is_empty());
}

#[test]
fn rfc4787_req_13a_without_df_the_packet_is_fragmented() {
    let mut rig = Rig::new();
    let data: Vec<u8> = (0..1_450u32).map(|i| i as u8).collect();
    rig.guest(1, &may_fragment(udp((GUEST, 5_000), SERVER, &data)));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 2);
    let mut whole = Vec::new();
    for (packet, more) in sent.iter().zip([true, false]) {
        let ip = Ipv4::parse(packet).unwrap();
        assert!(ip.checksum_is_right());
        assert!(packet.len() <= 1_400);
        assert_eq!((ip.more_fragments, ip.fragment_offset), (more, whole.len()));
        assert_eq!(ip.source, NAT);
        whole.extend_from_slice(ip.payload());
    }
    assert_eq!(&whole[8..], &data[..]);
    // Together they have the right UDP checksum.
    let mut joined = sent[0][..20].to_vec();
    joined[6..8].fill(0);
    joined.extend_from_slice(&whole);
    let total = joined.len() as u16;
    joined[2..4].copy_from_slice(&total.to_be_bytes());
    crate::packet::ipv4::fill_checksum(&mut joined, 20);
    assert!(is_right(&joined));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let kernel = rig.kernel.borrow();
    let live = kernel.slot(slot);
    assert_eq!(live.tx_packets().load(Relaxed), 1);
    assert_eq!(live.tx_bytes().load(Relaxed), 1_478);
}

#[test]
fn a_partial_checksum_is_completed_before_fragmenting() {
    let mut rig = Rig::new();
    let mut packet = may_fragment(udp((GUEST, 5_000), SERVER, &[9; 1_450]));
    let len = packet.len() - 20;
    let pseudo = crate::packet::checksum::Sum::default()
        .pseudo(GUEST, PEER, 17, len)
        .folded();
    packet[26..28].copy_from_slice(&pseudo.to_be_bytes());
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..VirtioNetHdr::default()
    };
    rig.kernel.borrow_mut().guest_sends(1, vnet, &packet);
    rig.turn();
    let sent = rig.at_world();
    let whole: Vec<u8> = sent.iter().flat_map(|p| p[20..].to_vec()).collect();
    let sum = crate::packet::checksum::Sum::default().pseudo(NAT, PEER, 17, whole.len());
    assert_eq!(sum.bytes(&whole).finish(), 0);
}

#[test]
fn too_large_for_the_guest_s_link_is_told_to_the_world() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, ports(&sent[20..]).0);
    let large = udp(SERVER, nat, &[1; 1_500]);
    assert_eq!(rig.world(&large), Handling::Engine(Handover::TooBig));
    let error = rig.at_world().pop().expect("an error goes out");
    assert!(is_right(&error));
    assert_eq!(
        (error[20], error[21], &error[26..28]),
        (3, 4, &1_500u16.to_be_bytes()[..])
    );
    assert_eq!(
        (&error[12..16], &error[16..20]),
        (&NAT.octets[..], &PEER.octets[..])
    );
    // Without DF it comes in parts.
    rig.world(&may_fragment(large));
    let parts = rig.at_guest();
    assert_eq!(parts.len(), 2);
    assert!(
        parts
            .iter()
            .all(|(_, p)| Ipv4::parse(p).unwrap().destination == GUEST)
    );
}

#[test]
fn no_error_is_sent_about_an_error_or_to_nobody() {
    let mut rig = Rig::new();
    let about = udp((PEER, 443), (GUEST, 5_000), b"y");
    rig.guest(1, &with_ttl(icmp_error(GUEST, PEER, 3, 3, &about), 1));
    rig.kernel.borrow_mut().hand_over(
        1,
        Handover::TtlExpired,
        0,
        VirtioNetHdr::default(),
        &udp(
            (GUEST, 5_000),
            (
                slipgate_abi::Ip4 {
                    octets: [224, 0, 0, 1],
                },
                9,
            ),
            b"x",
        ),
    );
    rig.turn();
    assert!(rig.at_guest().is_empty());
}

#[test]
fn packets_are_counted_as_segments() {
    let packet = udp((GUEST, 5_000), SERVER, &[0; 3_000]);
    let parsed = Packet::parse(Ipv4::parse(&packet).unwrap()).unwrap();
    let vnet = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: 1_200,
        ..VirtioNetHdr::default()
    };
    let segments = parsed.segments(vnet);
    assert_eq!((segments.packets, segments.bytes), (3, 3_028 + 2 * 28));
}
