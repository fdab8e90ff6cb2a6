use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::*;
use crate::{
    fake::{packets, segmentation},
    guest_link::framing::{FrameReader, MOST_QUEUED},
    packet::Ipv6,
    tcp::{Header, headers_len, write_headers},
};

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 10));
const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15));
/// Server and guest of each family.
const ENDS: [(IpAddr, IpAddr); 2] = [
    (SERVER, GUEST),
    (
        IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 10)),
        IpAddr::V6(Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 2)),
    ),
];
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
    tcp_between(ENDS[0], payload_len, mss, flags)
}

fn tcp_between(
    (server, guest): (IpAddr, IpAddr),
    payload_len: usize,
    mss: u16,
    flags: u8,
) -> (VirtioNetHdr, Vec<u8>) {
    let headers_len = headers_len(Version::of(server));
    let mut l3: Vec<u8> = (0..headers_len + payload_len).map(|at| at as u8).collect();
    let header = Header {
        sequence: u32::MAX - 2_000,
        acknowledgement: 7,
        flags,
        window: 9,
        ..Header::default()
    };
    let (from, to) = (SocketAddr::new(server, 443), SocketAddr::new(guest, 50_000));
    let vnet = write_headers(&mut l3, from, to, &header, mss);
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
fn ipv6_tcp_frames_become_segments_that_follow_each_other() {
    let flags = Flags::ACK | Flags::FIN | PSH;
    for (payload, mss) in [(1, 1_440), (1_441, 1_440), (65_000, 1_220)] {
        let (vnet, l3) = tcp_between(ENDS[1], payload, mss, flags);
        let made = segments(vnet, &l3);
        assert_eq!(made.len(), payload.div_ceil(mss.into()));
        let last = made.len() - 1;
        let mut joined = Vec::new();
        for (nth, packet) in made.iter().enumerate() {
            assert!(packets::is_right(packet) || vnet.gso_size == 0, "{nth}");
            let ip = Ipv6::parse(packet).unwrap();
            assert_eq!(
                ip.bytes.len(),
                packet.len(),
                "the length that the header says"
            );
            let l4 = ip.payload();
            let sequence = u32::from_be_bytes([l4[4], l4[5], l4[6], l4[7]]);
            let expected = (u32::MAX - 2_000).wrapping_add(joined.len() as u32);
            assert_eq!(sequence, expected);
            let ends = if nth == last { flags } else { Flags::ACK };
            assert_eq!(l4[TCP_FLAGS], ends);
            joined.extend_from_slice(&l4[TCP_HEADER_LEN..]);
        }
        assert_eq!(joined, l3[60..]);
    }
}

#[test]
fn joined_datagrams_come_apart() {
    let (each, all) = (500, 1_234);
    let payload: Vec<u8> = (0..all).map(|at| at as u8).collect();
    for (server, guest) in ENDS {
        let version = Version::of(server);
        let l3 = packets::udp((server, 53), (guest, 4_000), &payload);
        let l4 = ETHERNET_LEN + version.header_len();
        let vnet = VirtioNetHdr {
            flags: VirtioNetHdr::NEEDS_CSUM,
            gso_type: VirtioNetHdr::GSO_UDP_L4,
            hdr_len: (l4 + UDP_HEADER_LEN) as u16,
            gso_size: each,
            csum_start: l4 as u16,
            csum_offset: 6,
        };
        let made = segments(vnet, &l3);
        assert_eq!(made.len(), 3);
        if version == Version::V4 {
            let ids: Vec<_> = made.iter().map(|packet| packet[5]).collect();
            assert_eq!(ids, [ids[0], ids[0] + 1, ids[0] + 2]);
        }
        let mut joined = Vec::new();
        for packet in &made {
            assert!(packets::is_right(packet));
            let l4 = Ip::parse(packet).unwrap().payload();
            let len = u16::from_be_bytes([l4[4], l4[5]]);
            assert_eq!(usize::from(len), l4.len());
            joined.extend_from_slice(&l4[UDP_HEADER_LEN..]);
        }
        assert_eq!(joined, payload);
    }
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
