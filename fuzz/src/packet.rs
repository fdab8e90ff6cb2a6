//! IPv4 and IPv6, TCP, UDP, ICMP and ICMPv6: views, rewrites and the answers built from them.
//!
//! Input: `bits (1) | virtio_net_hdr (10) | L3 …`, dressed by the bits.
use std::net::IpAddr;

use slipgate_abi::{Command, Direction, IfIndex, PortHeader};
use userspace_nat::{
    datagram::Datagram,
    fake::packets::is_right,
    icmp::{Quoted, translate},
    mss,
    packet::{
        Fragment, Ip, Ipv4, Ipv6, Packet, Transport, Version, build,
        checksum::Sum,
        fragment::Fragments,
        ip::{self, End},
        transport::{TCP_HEADER_LEN, Tcp, tcp_options},
    },
    port::{ETHERTYPE_IPV4, Exit, Frame, Outbox, Side, VirtioNetHdr},
    reply::{Answers, IcmpError},
    vm::VmNet,
};

use crate::{
    dress::dress,
    tape::Tape,
    vms::{GUEST, HOST, spec, with_vm},
};

/// Reads and rewrites one packet.
pub fn packet(input: &[u8]) {
    // As the port would take it, header and all: nothing but luck makes it one of ours.
    let _ = Frame::parse(input);
    let mut tape = Tape::new(input);
    let bits = tape.u8();
    let vnet = VirtioNetHdr::decode(&tape.array());
    let mut l3 = tape.rest().to_vec();
    dress(&mut l3, bits, GUEST);

    frame(vnet, &l3);
    if let Some(datagram) = Datagram::parse(&l3) {
        let again = datagram.emit();
        assert!(is_right(&again));
        assert_eq!(Datagram::parse(&again), Some(datagram));
    }
    let _ = (Ipv4::parse_truncated(&l3), Ipv6::parse_truncated(&l3));
    let Ok(ip) = Ip::parse(&l3) else { return };
    assert_eq!(ip.header_len + ip.payload().len(), ip.bytes.len());
    header_rewrites(ip);
    fragments(ip);
    error_through_translation(ip);
    let Ok(packet) = Packet::parse(ip) else {
        return;
    };
    let counted = packet.segments(vnet);
    assert!(counted.packets >= 1 && counted.bytes >= ip.bytes.len() as u64);
    let (tx, rx) = (
        packet.tuple(7, Direction::Tx),
        packet.tuple(7, Direction::Rx),
    );
    assert_eq!(tx.is_some(), rx.is_some());
    if let Transport::Tcp(tcp) = packet.transport {
        clamp(packet, tcp);
    }
    with_vm(spec(1, 101, 10), |vm| answers(&vm, packet));
}

/// Checks that a frame is read as it was written.
fn frame(vnet: VirtioNetHdr, l3: &[u8]) {
    let header = PortHeader {
        code: Command::Emit as u8,
        flags: 3,
        vm_row: 0x1234,
        id: 0x5678_9abc,
    };
    let mut out = Outbox::new(1 << 20);
    out.push(header, ETHERTYPE_IPV4, vnet, l3)
        .expect("there is room");
    let bytes = out.frames().next().expect("a frame");
    let frame = Frame::parse(bytes).expect("what we wrote");
    assert_eq!((frame.vnet, frame.header), (vnet, header));
    assert_eq!((frame.ethertype, frame.l3), (ETHERTYPE_IPV4, l3));
}

/// Checks that a correct header checksum remains correct.
fn header_rewrites(ip: Ip<'_>) {
    let is_right = |bytes: &[u8]| match ip.version() {
        Version::V4 => Ipv4::parse(bytes).is_ok_and(|ip| ip.checksum_is_right()),
        Version::V6 => true,
    };
    if !is_right(ip.bytes) {
        return;
    }
    let (host, guest) = hosts(ip.version());
    let mut bytes = ip.bytes.to_vec();
    ip::set_address(&mut bytes, End::Source, host);
    ip::set_address(&mut bytes, End::Destination, guest);
    ip::decrement_ttl(&mut bytes);
    let after = Ip::parse(&bytes).expect("the lengths are as before");
    assert!(is_right(&bytes));
    assert_eq!((after.source, after.destination), (host, guest));
    assert_eq!(after.ttl, ip.ttl.saturating_sub(1));
}

/// Checks that a packet is cut into fragments that are no larger than asked, and are the packet again.
fn fragments(ip: Ip<'_>) {
    if let Ok(fragment) = Fragment::parse(ip.bytes) {
        let _ = fragment.as_packet();
        return;
    }
    if ip.header_len != ip.version().header_len() || ip.payload().is_empty() {
        return;
    }
    let most = ip.version().least_mtu();
    let mut cut = Fragments::new(ip.bytes, most, 7);
    let mut data = Vec::new();
    while let Some(bytes) = cut.next_fragment() {
        assert!(bytes.len() <= most as usize);
        if ip.bytes.len() <= most as usize {
            assert_eq!(Ip::parse(bytes).expect("a packet").payload(), ip.payload());
            return;
        }
        let fragment = Fragment::parse(bytes).expect("a fragment");
        assert_eq!(
            (fragment.begin, fragment.protocol),
            (data.len(), ip.protocol)
        );
        assert_eq!(
            fragment.has_more,
            data.len() + fragment.data.len() < ip.payload().len()
        );
        data.extend_from_slice(fragment.data);
    }
    assert_eq!(data, ip.payload());
}

/// An address of the host and the guest's, of a family.
fn hosts(version: Version) -> (IpAddr, IpAddr) {
    match version {
        Version::V4 => (HOST.into(), GUEST.into()),
        Version::V6 => ([0x20; 16].into(), [0xfd; 16].into()),
    }
}

/// Checks that options lie within the header, the MSS is never raised, and a correct checksum
/// remains correct.
fn clamp(packet: Packet<'_>, tcp: Tcp) {
    let mut segment = packet.ip.payload().to_vec();
    for (_, at, len) in tcp_options(&segment[..tcp.header_len]) {
        assert!(at >= TCP_HEADER_LEN && at + len <= tcp.header_len);
    }
    let (from, to) = (packet.ip.source, packet.ip.destination);
    let sum = |segment: &[u8]| {
        Sum::default()
            .pseudo(from, to, 6, segment.len())
            .bytes(segment)
            .finish()
    };
    segment[16..18].fill(0);
    let right = sum(&segment);
    segment[16..18].copy_from_slice(&right.to_be_bytes());
    let most = mss::for_mtu(packet.ip.version(), u32::from(tcp.source));
    let changed = mss::clamp(&mut segment[..tcp.header_len], most, false);
    assert_eq!(sum(&segment), 0);
    // A second option is nobody's; the first one is low enough now.
    assert!(!(changed && mss::clamp(&mut segment[..tcp.header_len], most, false)));
}

/// Translates an ICMP error at both ends, and back.
fn error_through_translation(ip: Ip<'_>) {
    let (host, _) = hosts(ip.version());
    let _ = Quoted::parse(&ip, true);
    let Ok(quoted) = Quoted::parse(&ip, false) else {
        return;
    };
    for end in [End::Source, End::Destination] {
        let (old, old_port) = match end {
            End::Source => (quoted.source, quoted.source_port),
            End::Destination => (quoted.destination, quoted.destination_port),
        };
        let mut bytes = ip.bytes.to_vec();
        translate(&mut bytes, end, host, 61_234);
        let (outer, after) = translated(&bytes);
        let (inner, port, outer_end) = match end {
            End::Source => (after.source, after.source_port, outer.destination),
            End::Destination => (after.destination, after.destination_port, outer.source),
        };
        assert_eq!((inner, port, outer_end), (host, 61_234, host));
        assert_eq!(quote_is_right(&outer), quote_is_right(&ip));
        translate(&mut bytes, end, old, old_port);
        assert_eq!(
            translated(&bytes).1.tuple_as_sent(0),
            quoted.tuple_as_sent(0)
        );
    }
}

fn translated(bytes: &[u8]) -> (Ip<'_>, Quoted) {
    let outer = Ip::parse(bytes).expect("the lengths are as before");
    let sum = build::icmp_checksum(outer.source, outer.destination, outer.payload());
    assert_eq!(sum, 0);
    let quoted = Quoted::parse(&outer, true).expect("it quotes what it quoted");
    (outer, quoted)
}

fn quote_is_right(outer: &Ip<'_>) -> bool {
    let quote = &outer.payload()[8..];
    outer.version() == Version::V6
        || Ipv4::parse_truncated(quote).is_ok_and(|inner| inner.checksum_is_right())
}

/// Checks that answers to the packet are correct and short.
fn answers(vm: &VmNet, packet: Packet<'_>) {
    let mut out = Outbox::new(1 << 20);
    let mut answers = Answers::new();
    answers.reset(vm, &packet, &mut out, 0);
    let (guest, world) = (Side::Guest, Side::World(Exit::Uplink(IfIndex::new(1))));
    answers.icmp(vm, guest, &packet, IcmpError::TtlExceeded, &mut out, 0);
    answers.icmp(vm, world, &packet, IcmpError::TooBig(1_400), &mut out, 0);
    for bytes in out.frames() {
        let frame = Frame::parse(bytes).expect("what we wrote");
        let most = packet.ip.version().least_mtu() as usize;
        assert!(is_right(frame.l3) && frame.l3.len() <= most);
        let to = Ip::parse(frame.l3).expect("a packet").destination;
        assert_eq!(to, packet.ip.source);
    }
    if matches!(packet.transport, Transport::Icmp(icmp) if icmp.is_echo()) {
        out.clear();
        assert!(answers.echo(vm, &packet, &mut out, 0));
        let bytes = out.frames().next().expect("an answer");
        let frame = Frame::parse(bytes).expect("what we wrote");
        assert!(is_right(frame.l3));
    }
}
