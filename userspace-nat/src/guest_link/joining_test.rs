use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use slipgate_abi::tcp::Flags;

use super::*;
use crate::{
    fake::{packets, segmentation},
    guest_link::framing::{FrameQueue, MOST_FRAME},
    packet::ipv4,
};

/// Guest and server, of either family.
const ENDS: [[IpAddr; 2]; 2] = [
    [
        IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15)),
        IpAddr::V4(Ipv4Addr::new(203, 0, 113, 10)),
    ],
    [
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x15)),
        IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x10)),
    ],
];
const IPV4: [IpAddr; 2] = ENDS[0];
const IPV6: [IpAddr; 2] = ENDS[1];
const PSH: u8 = 0x08;
const MSS: usize = 1_440;

fn framed(l3: &[u8]) -> Vec<u8> {
    let ethertype = match l3[0] >> 4 {
        6 => ETHERTYPE_IPV6,
        _ => ETHERTYPE_IPV4,
    };
    let addresses = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    [&addresses, &ethertype.to_be_bytes()[..], l3].concat()
}

/// A segment of a stream at this place.
fn segment([guest, server]: [IpAddr; 2], at: usize, len: usize, more: u8) -> Vec<u8> {
    let data: Vec<u8> = (at..at + len).map(|byte| byte as u8).collect();
    let sequence = (u32::MAX - 9_000).wrapping_add(at as u32);
    packets::tcp(
        (guest, 5_000),
        (server, 443),
        Flags::ACK | more,
        sequence,
        7,
        &[],
        &data,
    )
}

/// Passes frames on that are read together; returns what comes out, each with its offload header.
fn joined(frames: &[Vec<u8>]) -> Vec<(VirtioNetHdr, Vec<u8>)> {
    let mut queue = FrameQueue::default();
    for frame in frames {
        queue.push(frame, &[]);
    }
    let mut reader = FrameReader::default();
    let mut into = vec![0xee; VNET_LEN + MOST_FRAME];
    let mut all = Vec::new();
    while !queue.unsent().is_empty() {
        let room = reader.room();
        let len = room.len().min(queue.unsent().len());
        room[..len].copy_from_slice(&queue.unsent()[..len]);
        queue.sent(len);
        reader.filled(len);
        while let Some(frame) = reader.next_frame().unwrap() {
            let len = VNET_LEN + frame.len();
            into[VNET_LEN..len].copy_from_slice(frame);
            let end = join(&mut reader, &mut into, len);
            let vnet = VirtioNetHdr::decode(into.first_chunk().unwrap());
            all.push((vnet, into[VNET_LEN..end].to_vec()));
        }
    }
    all
}

/// L3 packets of frames, segmented as the kernel does it.
fn apart(frames: &[(VirtioNetHdr, Vec<u8>)]) -> Vec<Vec<u8>> {
    let segments = |(vnet, frame): &(VirtioNetHdr, Vec<u8>)| match vnet.gso_type {
        VirtioNetHdr::GSO_NONE => vec![frame[ETHERNET_LEN..].to_vec()],
        _ => segmentation::segments(*vnet, &frame[ETHERNET_LEN..]),
    };
    frames.iter().flat_map(segments).collect()
}

#[test]
fn segments_of_a_stream_become_one_frame_of_at_most_64_kib() {
    for ends in ENDS {
        let many: Vec<_> = (0..60)
            .map(|nth| segment(ends, nth * MSS, MSS, 0))
            .collect();
        let frames: Vec<_> = many.iter().map(|l3| framed(l3)).collect();
        let made = joined(&frames);
        assert_eq!(made.len(), 2);
        assert_eq!(made[0].0.gso_size, MSS as u16);
        let headers_len = ETHERNET_LEN + Version::of(ends[0]).header_len() + 20;
        assert_eq!(made[0].1.len(), headers_len + 45 * MSS);
        assert_eq!(apart(&made), many);
    }
}

#[test]
fn the_last_one_may_be_shorter_and_push_or_end() {
    for (ends, last) in ENDS
        .into_iter()
        .flat_map(|ends| [(ends, PSH), (ends, Flags::FIN | PSH)])
    {
        let some = [
            segment(ends, 0, MSS, 0),
            segment(ends, MSS, 700, last),
            segment(ends, MSS + 700, MSS, 0),
        ];
        let made = joined(&some.each_ref().map(|l3| framed(l3)));
        assert_eq!(made.len(), 2);
        assert_eq!(apart(&made), some);
    }
}

#[test]
fn identifications_count_up_in_atomic_datagrams_only() {
    let with_ids = |flags: u8| {
        let mut some = [segment(IPV4, 0, MSS, 0), segment(IPV4, MSS, MSS, 0)];
        for (nth, packet) in some.iter_mut().enumerate() {
            packet[4..8].copy_from_slice(&[9, nth as u8, flags, 0]);
            ipv4::fill_checksum(packet, 20);
        }
        joined(&some.each_ref().map(|l3| framed(l3))).len()
    };
    assert_eq!((with_ids(0x40), with_ids(0)), (1, 2));
}

/// Asserts that the second frame is passed on by itself after the first.
fn assert_not_joined(first: &[u8], other: &[u8]) {
    let made = joined(&[first.to_vec(), other.to_vec()]);
    assert_eq!(made.len(), 2, "{:02x?}", &other[..74.min(other.len())]);
    assert!(
        made.iter()
            .all(|(vnet, _)| *vnet == VirtioNetHdr::default())
    );
    assert_eq!((&made[0].1[..], &made[1].1[..]), (first, other));
}

#[test]
fn what_does_not_continue_it_comes_by_itself() {
    for ends in ENDS {
        let first = framed(&segment(ends, 0, MSS, 0));
        let next = framed(&segment(ends, MSS, MSS, 0));
        assert_eq!(joined(&[first.clone(), next.clone()]).len(), 1);
        for other in [
            segment(ends, MSS + 1, MSS, 0),
            segment(ends, MSS, MSS + 1, 0),
            segment(ends, MSS, 0, 0),
            segment(ends, MSS, MSS, Flags::SYN),
        ] {
            assert_not_joined(&first, &framed(&other));
        }
        let tcp = ETHERNET_LEN + Version::of(ends[0]).header_len();
        let ip_fields = match ends {
            // Service, a fragment, TTL, protocol, an address.
            IPV4 => vec![(15, 1), (20, 0x20), (22, 1), (23, 1), (29, 1)],
            // Traffic class, flow label, next header, hop limit, both addresses.
            _ => vec![(15, 0x10), (17, 1), (20, 1), (21, 1), (37, 1), (53, 1)],
        };
        // Ethernet addresses, port, acknowledgement, data offset, window.
        let others = [
            (3, 1),
            (6, 1),
            (tcp + 1, 1),
            (tcp + 11, 1),
            (tcp + 12, 0x30),
            (tcp + 15, 1),
        ];
        for (at, bits) in ip_fields.into_iter().chain(others) {
            let mut other = next.clone();
            other[at] ^= bits;
            assert_not_joined(&first, &other);
        }
        // Another EtherType, bytes after the packet, and a packet that is cut off.
        let mut other = next.clone();
        other[12..14].copy_from_slice(&[0x81, 0]);
        assert_not_joined(&first, &other);
        assert_not_joined(&first, &[&next[..], &[0]].concat());
        for len in [tcp - 1, tcp, tcp + 12, tcp + 13, tcp + 19, tcp + 20] {
            assert_not_joined(&first, &next[..len]);
        }
        // So small that together they would be a bomb; and what is no TCP.
        let small = [segment(ends, 0, 495, 0), segment(ends, 495, 495, 0)];
        assert_eq!(joined(&small.each_ref().map(|l3| framed(l3))).len(), 2);
        let datagram = framed(&packets::udp((ends[0], 1), (ends[1], 2), &[0; 1_000]));
        assert_eq!(joined(&[datagram.clone(), datagram]).len(), 2);
    }
    let of_the_other_family = framed(&segment(IPV6, MSS, MSS, 0));
    assert_not_joined(&framed(&segment(IPV4, 0, MSS, 0)), &of_the_other_family);
}

#[test]
fn an_extension_header_is_passed_on_as_it_came() {
    let with_header = |at: usize| {
        let mut packet = segment(IPV6, at, MSS, 0);
        packet[4..6].copy_from_slice(&((MSS + 28) as u16).to_be_bytes());
        let tcp = std::mem::replace(&mut packet[6], 60);
        // Destination options: padding (RFC 8200 section 4.2).
        packet.splice(40..40, [tcp, 0, 1, 4, 0, 0, 0, 0]);
        framed(&packet)
    };
    assert_not_joined(&with_header(0), &with_header(MSS));
}

proptest! {
    #[test]
    fn whatever_comes_the_packets_are_the_same(
        ends in prop::sample::select(&ENDS[..]),
        choices in prop::collection::vec((0..8u8, 0..6u8), 1..40),
    ) {
        let mut at = 0;
        let mut sent = Vec::new();
        for (len, kind) in choices {
            let len = [0, 1, 495, 496, 1_000, MSS, MSS, MSS][usize::from(len)];
            let flags = [0, 0, 0, 0, PSH, Flags::FIN][usize::from(kind)];
            sent.push(segment(ends, at, len, flags));
            at += len;
        }
        let frames: Vec<_> = sent.iter().map(|l3| framed(l3)).collect();
        prop_assert_eq!(apart(&joined(&frames)), sent);
    }
}
