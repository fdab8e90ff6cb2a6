use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
};

use nix::{
    sys::{
        epoll::{EpollCreateFlags, EpollTimeout},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
    unistd::{read, write},
};
use proptest::prelude::*;
use slipgate_abi::{Ip4, Protocol};

use super::*;
use crate::{
    fake::packets,
    packet::Version,
    packet::ipv4,
    port::{L3_AT, MAX_FRAME},
    tcp::{Header, headers_len, write_headers},
};

const SERVER: Ip4 = Ip4 {
    octets: [203, 0, 113, 10],
};
const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const MACS: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
const KEY: u64 = 5;
const MSS: u16 = 1_460;

struct Rig {
    link: PacketLink,
    epoll: Epoll,
    vmm: OwnedFd,
    into: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (ours, vmm) = pair.unwrap();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let link = PacketLink::new(ours);
        link.watch(&epoll, KEY).unwrap();
        Self {
            link,
            epoll,
            vmm,
            into: vec![0; MAX_FRAME],
        }
    }

    fn next(&mut self) -> Packet {
        self.link.next(&mut self.into)
    }

    fn tell(&mut self, offloads: u32) {
        write(&self.vmm, &offloads.to_le_bytes()).unwrap();
        assert_eq!(self.next(), Packet::Nothing);
    }

    fn settle(&mut self) {
        self.link.settle(&self.epoll, KEY, 0).unwrap();
    }

    fn events(&self) -> EpollFlags {
        let mut events = [EpollEvent::empty()];
        match self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap() {
            0 => EpollFlags::empty(),
            _ => events[0].events(),
        }
    }

    /// The messages that the VMM gets, until there is none.
    fn received(&self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let mut message = vec![0; HEADER_LEN + MAX_FRAME];
        while let Ok(len) = read(self.vmm.as_fd(), &mut message) {
            all.push(message[..len].to_vec());
        }
        all
    }
}

/// A frame with its header, as the engine has it.
fn tcp(payload_len: usize) -> Vec<u8> {
    tcp_of(Version::V4, payload_len)
}

fn tcp_of(version: Version, payload_len: usize) -> Vec<u8> {
    let (server, guest): (IpAddr, IpAddr) = match version {
        Version::V4 => (SERVER.into(), GUEST.into()),
        Version::V6 => (
            Ipv4Addr::from(SERVER).to_ipv6_compatible().into(),
            Ipv6Addr::LOCALHOST.into(),
        ),
    };
    let l3_len = headers_len(version) + payload_len;
    let mut l3: Vec<u8> = (0..l3_len).map(|at| at as u8).collect();
    let header = Header {
        sequence: 1,
        acknowledgement: 7,
        flags: 0x10,
        window: 9,
        ..Header::default()
    };
    let vnet = write_headers(
        &mut l3,
        SocketAddr::new(server, 443),
        SocketAddr::new(guest, 50_000),
        &header,
        MSS,
    );
    [&vnet.encode()[..], &MACS, &l3].concat()
}

/// As the VMM sends and gets it.
fn message(frame: &[u8]) -> Vec<u8> {
    let (header, frame) = frame.split_at(VNET_LEN);
    [header, &[0, 0], frame].concat()
}

#[test]
fn a_frame_passes_whole_each_way_once_the_guest_accepts_it() {
    let mut rig = Rig::new();
    rig.tell(CSUM | TSO4 | USO4);
    let frame = tcp(60_000);
    assert_eq!(rig.link.send(&frame), None);
    assert_eq!(rig.received(), [message(&frame)]);
    write(&rig.vmm, &message(&frame)).unwrap();
    assert_eq!(rig.next(), Packet::Frame(frame.len()));
    assert_eq!(rig.into[..frame.len()], frame);
    assert_eq!(rig.next(), Packet::Nothing);
}

#[test]
fn a_guest_gets_segments_and_checksums_as_it_accepts_them() {
    use Version::{V4, V6};
    for (version, offloads, messages) in [
        (V4, 0, 10),
        (V4, CSUM, 10),
        (V4, CSUM | USO4 | TSO6, 10),
        (V4, CSUM | TSO4, 1),
        (V6, 0, 10),
        (V6, CSUM | TSO4, 10),
        (V6, CSUM | TSO6, 1),
    ] {
        let mut rig = Rig::new();
        rig.tell(offloads);
        let frame = tcp_of(version, 10 * usize::from(MSS));
        assert_eq!(rig.link.send(&frame), None);
        let received = rig.received();
        assert_eq!(received.len(), messages, "{offloads:#x}");
        for segment in received.iter().filter(|_| messages > 1) {
            assert_eq!(segment[..HEADER_LEN], [0; HEADER_LEN]);
            assert!(packets::is_right(&segment[HEADER_LEN + MACS.len()..]));
        }
        // A plain frame with a partial checksum.
        assert_eq!(rig.link.send(&tcp(100)), None);
        let plain = rig.received().pop().unwrap();
        let is_partial = offloads & CSUM != 0;
        assert_eq!(plain[0] & VirtioNetHdr::NEEDS_CSUM != 0, is_partial);
        assert!(is_partial || packets::is_right(&plain[HEADER_LEN + MACS.len()..]));
    }
}

#[test]
fn before_it_was_told_nothing_is_accepted() {
    let mut rig = Rig::new();
    assert_eq!(rig.link.send(&tcp(10 * usize::from(MSS))), None);
    assert_eq!(rig.received().len(), 10);
}

#[test]
fn what_the_vmm_does_not_read_waits_in_order_and_is_bounded() {
    let mut rig = Rig::new();
    rig.tell(CSUM | TSO4);
    let frames: Vec<_> = (0..64).map(|nth| tcp(40_000 + nth)).collect();
    let mut sent = 0;
    while rig
        .link
        .queued()
        .is_some_and(|queued| queued < ENOUGH_QUEUED)
    {
        assert_eq!(rig.link.send(&frames[sent]), None);
        sent += 1;
    }
    while rig.link.send(&frames[sent]).is_none() {
        sent += 1;
    }
    let refused = VirtioNetHdr::decode(frames[sent].first_chunk().unwrap());
    assert_eq!(
        rig.link.refusal(refused, frames[sent].len()),
        Some(DropReason::EngineBusy)
    );
    assert!(rig.link.queued <= MOST_QUEUED);
    rig.settle();
    assert_eq!(rig.events(), EpollFlags::empty(), "it waits for room");
    let mut received = rig.received();
    while received.len() < sent {
        assert!(rig.events().contains(EpollFlags::EPOLLOUT));
        rig.settle();
        received.extend(rig.received());
    }
    let wanted: Vec<_> = frames[..sent].iter().map(|frame| message(frame)).collect();
    assert!(received == wanted, "in order, and each once");
    rig.settle();
    assert_eq!(rig.events(), EpollFlags::empty(), "nothing is left");
    assert!(
        rig.link
            .queued()
            .is_some_and(|queued| queued < ENOUGH_QUEUED)
    );
}

#[test]
fn an_end_of_the_vmm_is_the_links_end() {
    let mut rig = Rig::new();
    let frame = tcp(100);
    write(&rig.vmm, &message(&frame)).unwrap();
    rig.vmm = std::fs::File::open("/dev/null").unwrap().into();
    assert_eq!(rig.next(), Packet::Frame(frame.len()), "what it sent last");
    assert_eq!(rig.next(), Packet::Nothing);
    rig.settle();
    assert_eq!(rig.events(), EpollFlags::empty(), "nobody turns for it");
    assert!(
        rig.link
            .queued()
            .is_none_or(|queued| queued >= ENOUGH_QUEUED)
    );
    assert_eq!(rig.link.send(&frame), Some(DropReason::StaleVm));
}

#[test]
fn a_message_that_is_no_frame_is_counted() {
    for len in [1, 3, 5, HEADER_LEN - 1] {
        let mut rig = Rig::new();
        write(&rig.vmm, &vec![0; len]).unwrap();
        assert_eq!(rig.next(), Packet::Malformed(len));
    }
    let mut rig = Rig::new();
    write(&rig.vmm, &vec![0; HEADER_LEN - VNET_LEN + MAX_FRAME + 1]).unwrap();
    assert!(matches!(rig.next(), Packet::Malformed(_)), "it is too long");
    assert_eq!(rig.next(), Packet::Nothing);
}

#[test]
fn a_header_has_a_meaning_or_the_frame_is_dropped() {
    let frame = tcp(10 * usize::from(MSS));
    let (header, bytes) = frame.split_at(VNET_LEN);
    let right = VirtioNetHdr::decode(header.first_chunk().unwrap());
    assert_eq!(sound(right, bytes), Some(right));
    // The host's own parser is believed, not the guest.
    let lied = VirtioNetHdr {
        hdr_len: 9,
        ..right
    };
    assert_eq!(sound(lied, bytes), Some(right));
    let wrong = [
        VirtioNetHdr { flags: 0, ..right },
        VirtioNetHdr {
            gso_size: 0,
            ..right
        },
        VirtioNetHdr {
            gso_type: VirtioNetHdr::GSO_UDP_L4,
            ..right
        },
        VirtioNetHdr {
            gso_type: 4,
            ..right
        },
        VirtioNetHdr {
            gso_type: 0x81,
            ..right
        },
        VirtioNetHdr {
            csum_start: right.csum_start + 1,
            ..right
        },
        VirtioNetHdr {
            csum_start: 13,
            ..right
        },
        VirtioNetHdr {
            csum_offset: u16::MAX,
            ..right
        },
    ];
    for vnet in wrong {
        assert_eq!(sound(vnet, bytes), None, "{vnet:?}");
    }
    // A frame of one segment is none of several.
    let one = VirtioNetHdr {
        gso_size: u16::MAX,
        ..right
    };
    let plain = sound(one, bytes).unwrap();
    assert_eq!(
        (plain.gso_type, plain.gso_size),
        (VirtioNetHdr::GSO_NONE, 0)
    );
    assert!(plain.needs_csum());
}

#[test]
fn a_frame_of_more_datagrams_than_a_tap_takes_is_dropped() {
    let udp = |len: usize| {
        let mut frame = vec![0_u8; 14 + 20 + 8 + len];
        let (total, udp_len) = ((28 + len) as u16, (8 + len) as u16);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame[22..24].copy_from_slice(&[64, Protocol::Udp as u8]);
        frame[26..30].copy_from_slice(&GUEST.octets);
        frame[30..34].copy_from_slice(&SERVER.octets);
        frame[38..40].copy_from_slice(&udp_len.to_be_bytes());
        frame
    };
    for (gso_size, most) in [(1, MOST_DATAGRAMS), (400, 400 * MOST_DATAGRAMS)] {
        let vnet = VirtioNetHdr {
            flags: VirtioNetHdr::NEEDS_CSUM,
            gso_type: VirtioNetHdr::GSO_UDP_L4,
            hdr_len: 42,
            gso_size,
            csum_start: 34,
            csum_offset: 6,
        };
        assert_eq!(sound(vnet, &udp(most)), Some(vnet));
        assert_eq!(sound(vnet, &udp(most + 1)), None);
    }
}

proptest! {
    /// Frames that are passed on have offsets within the frame, and the offload of their protocol.
    #[test]
    fn what_passes_is_sound(
        // Of the header behind it, or of the frame's own headers.
        flips in prop::collection::vec((0..VNET_LEN + 54, any::<u8>()), 0..4),
        len in prop_oneof![0..100_usize, Just(3_054), 54..3_054_usize],
    ) {
        let mut bytes = tcp(3_000);
        for (at, flip) in flips {
            bytes[at] ^= flip;
        }
        bytes.truncate(VNET_LEN + len);
        let (header, frame) = bytes.split_at(VNET_LEN);
        let given = VirtioNetHdr::decode(header.first_chunk().unwrap());
        let Some(vnet) = sound(given, frame) else {
            return Ok(());
        };
        if vnet.needs_csum() {
            let end = usize::from(vnet.csum_start) + usize::from(vnet.csum_offset) + 2;
            prop_assert!(end <= frame.len());
        }
        if vnet.gso_type != VirtioNetHdr::GSO_NONE {
            let ip = ipv4::Ipv4::parse_truncated(&frame[L3_AT - VNET_LEN..]).unwrap();
            let protocol = match vnet.gso_type {
                VirtioNetHdr::GSO_TCPV4 => Protocol::Tcp,
                _ => Protocol::Udp,
            };
            prop_assert_eq!(ip.protocol, protocol as u8);
            prop_assert!(vnet.gso_size > 0);
            let payload = frame.len() - usize::from(vnet.hdr_len);
            prop_assert!(payload > usize::from(vnet.gso_size));
        }
    }
}
