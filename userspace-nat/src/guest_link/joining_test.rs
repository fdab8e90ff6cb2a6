use proptest::prelude::*;
use slipgate_abi::{Ip4, tcp::Flags};

use super::*;
use crate::{
    fake::{packets, segmentation},
    guest_link::framing::{FrameQueue, MOST_FRAME},
    packet::ipv4,
};

const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const SERVER: Ip4 = Ip4 {
    octets: [203, 0, 113, 10],
};
const PSH: u8 = 0x08;
const MSS: usize = 1_460;

fn framed(l3: &[u8]) -> Vec<u8> {
    [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], l3].concat()
}

/// A segment of a stream at this place.
fn segment(at: usize, len: usize, more: u8) -> Vec<u8> {
    let data: Vec<u8> = (at..at + len).map(|byte| byte as u8).collect();
    let sequence = (u32::MAX - 9_000).wrapping_add(at as u32);
    packets::tcp(
        (GUEST, 5_000),
        (SERVER, 443),
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
    let many: Vec<_> = (0..60).map(|nth| segment(nth * MSS, MSS, 0)).collect();
    let frames: Vec<_> = many.iter().map(|l3| framed(l3)).collect();
    let made = joined(&frames);
    assert_eq!(made.len(), 2);
    assert_eq!(made[0].0.gso_size, MSS as u16);
    assert_eq!(made[0].1.len(), 54 + 44 * MSS);
    assert_eq!(apart(&made), many);
}

#[test]
fn the_last_one_may_be_shorter_and_push_or_end() {
    for last in [PSH, Flags::FIN | PSH] {
        let some = [
            segment(0, MSS, 0),
            segment(MSS, 700, last),
            segment(MSS + 700, MSS, 0),
        ];
        let made = joined(&some.each_ref().map(|l3| framed(l3)));
        assert_eq!(made.len(), 2);
        assert_eq!(apart(&made), some);
    }
}

#[test]
fn identifications_count_up_in_atomic_datagrams_only() {
    let with_ids = |flags: u8| {
        let mut some = [segment(0, MSS, 0), segment(MSS, MSS, 0)];
        for (nth, packet) in some.iter_mut().enumerate() {
            packet[4..8].copy_from_slice(&[9, nth as u8, flags, 0]);
            ipv4::fill_checksum(packet, 20);
        }
        joined(&some.each_ref().map(|l3| framed(l3))).len()
    };
    assert_eq!((with_ids(0x40), with_ids(0)), (1, 2));
}

#[test]
fn what_does_not_continue_it_comes_by_itself() {
    let first = framed(&segment(0, MSS, 0));
    let next = framed(&segment(MSS, MSS, 0));
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut next = next.clone();
        change(&mut next);
        next
    };
    assert_eq!(joined(&[first.clone(), next.clone()]).len(), 1);
    for other in [
        framed(&segment(MSS + 1, MSS, 0)),
        framed(&segment(MSS, MSS + 1, 0)),
        framed(&segment(MSS, 0, 0)),
        framed(&segment(MSS, MSS, Flags::SYN)),
        changed(&|next| next[3] ^= 1),
        changed(&|next| next[6] ^= 1),
        // Another EtherType, and bytes after the packet.
        changed(&|next| next[12..14].copy_from_slice(&[0x81, 0])),
        changed(&|next| next.push(0)),
        changed(&|next| next.truncate(60)),
        // Addresses, ports, TTL, a fragment, options, acknowledgement, window.
        changed(&|next| next[29] ^= 1),
        changed(&|next| next[35] ^= 1),
        changed(&|next| next[22] ^= 1),
        changed(&|next| next[20] ^= 0x20),
        changed(&|next| next[46] = 0x60),
        changed(&|next| next[45] ^= 1),
        changed(&|next| next[49] ^= 1),
    ] {
        let made = joined(&[first.clone(), other.clone()]);
        assert_eq!(made.len(), 2, "{:02x?}", &other[..54.min(other.len())]);
        assert!(
            made.iter()
                .all(|(vnet, _)| *vnet == VirtioNetHdr::default())
        );
        assert_eq!((&made[0].1, &made[1].1), (&first, &other));
    }
    // So small that together they would be a bomb; and what is no TCP.
    let small = [segment(0, 495, 0), segment(495, 495, 0)];
    assert_eq!(joined(&small.each_ref().map(|l3| framed(l3))).len(), 2);
    let datagram = framed(&packets::udp((GUEST, 1), (SERVER, 2), &[0; 1_000]));
    assert_eq!(joined(&[datagram.clone(), datagram]).len(), 2);
}

proptest! {
    #[test]
    fn whatever_comes_the_packets_are_the_same(
        choices in prop::collection::vec((0..8u8, 0..6u8), 1..40),
    ) {
        let mut at = 0;
        let mut sent = Vec::new();
        for (len, kind) in choices {
            let len = [0, 1, 495, 496, 1_000, MSS, MSS, MSS][usize::from(len)];
            let flags = [0, 0, 0, 0, PSH, Flags::FIN][usize::from(kind)];
            sent.push(segment(at, len, flags));
            at += len;
        }
        let frames: Vec<_> = sent.iter().map(|l3| framed(l3)).collect();
        prop_assert_eq!(apart(&joined(&frames)), sent);
    }
}
