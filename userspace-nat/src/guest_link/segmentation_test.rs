use slipgate_abi::Ip4;

use super::*;
use crate::{
    fake::{packets, segmentation},
    guest_link::framing::{FrameReader, MOST_QUEUED},
    tcp::{HEADERS_LEN, Header, write_headers},
};

const SERVER: Ip4 = Ip4 {
    octets: [203, 0, 113, 10],
};
const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const MACS: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];

/// L3 packets that a frame becomes.
fn segments(vnet: VirtioNetHdr, l3: &[u8]) -> Vec<Vec<u8>> {
    let mut queue = FrameQueue::default();
    let frame = [&MACS, l3].concat();
    assert!(push(&mut queue, vnet, &frame));
    let mut reader = FrameReader::default();
    let mut packets = Vec::new();
    while !queue.unsent().is_empty() {
        let room = reader.room();
        let len = queue.unsent().len().min(room.len());
        room[..len].copy_from_slice(&queue.unsent()[..len]);
        queue.sent(len);
        reader.filled(len);
        while let Some(frame) = reader.next_frame().unwrap() {
            let (macs, packet) = frame.split_at(MACS.len());
            assert_eq!(macs, MACS);
            packets.push(packet.to_vec());
        }
    }
    packets
}

fn tcp(payload_len: usize, mss: u16, flags: u8) -> (VirtioNetHdr, Vec<u8>) {
    let mut l3: Vec<u8> = (0..HEADERS_LEN + payload_len).map(|at| at as u8).collect();
    let header = Header {
        sequence: u32::MAX - 2_000,
        acknowledgement: 7,
        flags,
        window: 9,
        window_scale: None,
    };
    let vnet = write_headers(&mut l3, (SERVER, 443), (GUEST, 50_000), &header, mss);
    (vnet, l3)
}

#[test]
fn tcp_frames_become_the_segments_that_the_kernel_makes() {
    let flags = Flags::ACK | Flags::FIN | PSH;
    for (payload, mss) in [(1, 1_460), (1_460, 1_460), (1_461, 1_460), (65_000, 536)] {
        let (vnet, l3) = tcp(payload, mss, flags);
        let mut made = segments(vnet, &l3);
        assert!(made.iter().all(|packet| packets::is_right(packet)));
        assert_eq!(made.len(), payload.div_ceil(mss.into()));
        if made.len() == 1 {
            continue;
        }
        // The other segmentation leaves the identification.
        for packet in &mut made {
            packet[4..6].fill(0);
            ipv4::fill_checksum(packet, 20);
        }
        assert_eq!(made, segmentation::segments(vnet, &l3));
    }
}

#[test]
fn joined_datagrams_come_apart() {
    let (each, all) = (500, 1_234);
    let payload: Vec<u8> = (0..all).map(|at| at as u8).collect();
    let l3 = packets::udp((SERVER, 53), (GUEST, 4_000), &payload);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        hdr_len: 42,
        gso_size: each,
        csum_start: 34,
        csum_offset: 6,
    };
    let made = segments(vnet, &l3);
    assert_eq!(made.len(), 3);
    let ids: Vec<_> = made.iter().map(|packet| packet[5]).collect();
    assert_eq!(ids, [ids[0], ids[0] + 1, ids[0] + 2]);
    let mut joined = Vec::new();
    for packet in &made {
        assert!(packets::is_right(packet));
        let ip = ipv4::Ipv4::parse(packet).unwrap();
        let len = u16::from_be_bytes([ip.payload()[4], ip.payload()[5]]);
        assert_eq!(usize::from(len), ip.payload().len());
        joined.extend_from_slice(&ip.payload()[UDP_HEADER_LEN..]);
    }
    assert_eq!(joined, payload);
}

#[test]
fn a_sum_of_zero_is_not_no_sum() {
    // A datagram whose sum folds to all ones, by its last two bytes.
    let at = |port| (SERVER, port);
    let mut l3 = packets::udp(at(1), (GUEST, 2), &[0, 0]);
    let sum = u16::from_be_bytes([l3[26], l3[27]]);
    l3[28..30].copy_from_slice(&sum.to_be_bytes());
    let pseudo = Sum::default().pseudo(SERVER, GUEST, 17, 10).folded();
    l3[26..28].copy_from_slice(&pseudo.to_be_bytes());
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..VirtioNetHdr::default()
    };
    assert_eq!(segments(vnet, &l3)[0][26..28], [0xff, 0xff]);
}

#[test]
fn a_frame_without_room_for_all_its_segments_leaves_none() {
    let mut queue = FrameQueue::default();
    let filler = [0; 1_514];
    while queue.has_room(1, 60_000) {
        queue.push(&filler, &[]);
    }
    let before = queue.unsent().len();
    let (vnet, l3) = tcp(60_000, 1_460, Flags::ACK);
    let frame = [&MACS, &l3[..]].concat();
    assert!(!push(&mut queue, vnet, &frame));
    // The guest chose an MSS of one byte: headers count, too.
    let (vnet, l3) = tcp(60_000, 1, Flags::ACK);
    queue.clear();
    const { assert!(60_000 * (4 + 54) > MOST_QUEUED) };
    assert!(!push(&mut queue, vnet, &[&MACS, &l3[..]].concat()));
    assert!(before > 0 && queue.unsent().is_empty());
}

#[test]
fn headers_that_lie_are_not_segmented_and_hurt_nobody() {
    let (vnet, l3) = tcp(4_000, 1_460, Flags::ACK);
    let whole = [&MACS, &l3[..]].concat();
    let mut queue = FrameQueue::default();
    for len in 0..whole.len().min(80) {
        for lie in [
            vnet,
            VirtioNetHdr {
                gso_size: 0,
                ..vnet
            },
            VirtioNetHdr {
                csum_start: u16::MAX,
                csum_offset: u16::MAX,
                gso_type: 0,
                ..vnet
            },
            VirtioNetHdr {
                gso_type: VirtioNetHdr::GSO_UDP_L4,
                hdr_len: 0,
                ..vnet
            },
            VirtioNetHdr {
                gso_type: 77,
                ..vnet
            },
        ] {
            queue.clear();
            push(&mut queue, lie, &whole[..len]);
        }
    }
}
