//! Random IPv6 frames, and rows of `VMS6`.
use std::net::Ipv6Addr;

use slipgate_abi::{Command, Ip6, PortHeader, Protocol, Vm6, portframe::Order, vm6::Vm6Flags};

use crate::{
    both::*,
    choices::{Choices, SHORTEST},
};

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const UNBOUND: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 9, 9, 9, 9);
const ROUTER_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 9, 9, 9];
const HOST_MAC: [u8; 6] = [0; 6];
const GROUP_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// Length of the headers of Ethernet and IPv6, bytes.
const HEADERS: usize = 54;

/// A row with two addresses bound, or with few things else.
pub(crate) fn row(choices: &mut Choices<'_>) -> Vm6 {
    let mut row = Vm6 {
        flags: choices.mostly(&[Vm6Flags::ON, 0]),
        prefix: PREFIX.into(),
        gateway: GATEWAY6.into(),
        gateway_local: GATEWAY_LOCAL.into(),
        proxy_ifindex: choices.mostly(&[DEVICE, 0, DEVICE + 1]),
        proxy_mac: [1, 2, 3],
        ..Vm6::OFF
    };
    row.guests[0] = Ip6::from(choices.mostly(&[GUEST_LOCAL, Ipv6Addr::UNSPECIFIED]));
    row.guests[choices.below(9)] = GUEST6.into();
    row
}

struct Packet {
    macs: ([u8; 6], [u8; 6]),
    source: Ipv6Addr,
    destination: Ipv6Addr,
    next_header: u8,
    hop_limit: u8,
    l4: Vec<u8>,
}

impl Packet {
    fn build(self, choices: &mut Choices<'_>) -> Vec<u8> {
        let mut frame = [self.macs.1, self.macs.0].concat();
        let ether_type: u16 = choices.mostly(&[0x86dd, 0x86dd, 0x0800, 0x8100]);
        frame.extend(ether_type.to_be_bytes());
        frame.extend([0x60, 0, 0, 0]);
        frame.extend((self.l4.len() as u16).to_be_bytes());
        frame.extend([self.next_header, self.hop_limit]);
        frame.extend(self.source.octets());
        frame.extend(self.destination.octets());
        frame.extend(&self.l4);
        let place = match self.next_header {
            6 => 16,
            17 => 6,
            58 => 2,
            _ => return frame,
        };
        let Some(field) = frame.get_mut(HEADERS + place..HEADERS + place + 2) else {
            return frame;
        };
        field.fill(0);
        // Right, wrong, or none.
        let sum = match choices.mostly(&[0, 1, 2]) {
            0 => checksum(&frame, self.next_header),
            1 => [0, 0],
            _ => [choices.byte(), choices.byte()],
        };
        frame[HEADERS + place..HEADERS + place + 2].copy_from_slice(&sum);
        frame
    }
}

fn checksum(frame: &[u8], next_header: u8) -> [u8; 2] {
    let len = (frame.len() - HEADERS) as u32;
    let parts = [&frame[22..], &len.to_be_bytes(), &[0, 0, 0, next_header]];
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// A frame, mostly of a flow, with the program that gets it and its GSO size.
pub(crate) fn frame(protocol: Protocol, choices: &mut Choices<'_>) -> (At, Vec<u8>, u32) {
    let at = choices.one_of(&[
        At::Guest,
        At::Uplink,
        At::EnginePort,
        At::UplinkWithoutL2,
        At::Guest,
        At::Uplink,
    ]);
    let mut frame = match at {
        At::Guest => from_guest(protocol, choices),
        At::Uplink | At::UplinkWithoutL2 => from_world(protocol, choices),
        At::EnginePort => from_engine(protocol, choices),
    };
    for _ in 0..choices.mostly(&[0, 1, 2, 3]) {
        let place = choices.below(110);
        let change = choices.byte();
        if let Some(byte) = frame.get_mut(place) {
            *byte ^= change;
        }
    }
    match choices.mostly(&[0, 1, 2]) {
        1 => frame.truncate(choices.below(220)),
        2 => frame.extend_from_slice(&[0; 70][..choices.below(70)]),
        _ => {}
    }
    if at == At::UplinkWithoutL2 {
        frame.drain(..frame.len().min(14));
        // A test run takes the EtherType from here.
        if let Some(ether_type) = frame.get_mut(12..14) {
            ether_type.copy_from_slice(&[0x86, 0xdd]);
        }
    }
    frame.resize(frame.len().max(SHORTEST), 0);
    if frame[12..14] == [0x86, 0xdd] {
        frame.resize(frame.len().max(HEADERS), 0);
    }
    let gso_size = match choices.once_in(5) {
        true => choices.one_of(&[1_400, 1, 100, 300, 500]),
        false => 0,
    };
    (at, frame, gso_size)
}

/// Header and payload; the query id of an echo is the port that is ours.
fn l4_of(
    protocol: Protocol,
    kind: u8,
    ours: u16,
    ports: [u16; 2],
    choices: &mut Choices<'_>,
) -> Vec<u8> {
    let payload = vec![7; choices.one_of(&[21, 0, 2, 160, 300, 1_480, 3_000])];
    let [from, to] = ports.map(u16::to_be_bytes);
    let mut l4 = match protocol {
        Protocol::Tcp => {
            let numbers = crate::choices::tcp_numbers(choices);
            let flags = crate::choices::tcp_flags(choices);
            [
                &from[..],
                &to,
                &numbers,
                &[0x50, flags, 0x10, 0, 0, 0, 0, 0],
            ]
            .concat()
        }
        Protocol::Udp => {
            let len = (payload.len() as u16 + 8).to_be_bytes();
            [&from[..], &to, &len, &[0, 0]].concat()
        }
        Protocol::Icmp | Protocol::Icmpv6 => {
            let kind = choices.mostly(&[kind, 128, 129, 200]);
            [&[kind, 0, 0, 0][..], &ours.to_be_bytes(), &[0, 1]].concat()
        }
    };
    l4.extend(payload);
    l4
}

/// Puts the rest of a packet behind a fragment header, now and then.
fn in_fragments(mut packet: Packet, choices: &mut Choices<'_>) -> Packet {
    if !choices.once_in(8) {
        return packet;
    }
    let field: u16 = choices.one_of(&[1, 8, 9, 800, 0]);
    let mut l4 = vec![choices.mostly(&[packet.next_header, 0, 44]), 0];
    l4.extend(field.to_be_bytes());
    l4.extend(choices.one_of(&[[0, 0, 0, 7], [0, 0, 0, 8]]));
    l4.append(&mut packet.l4);
    Packet {
        next_header: 44,
        l4,
        ..packet
    }
}

fn from_guest(protocol: Protocol, choices: &mut Choices<'_>) -> Vec<u8> {
    let macs = (
        choices.mostly(&[GUEST_MAC, ROUTER_MAC, [0xff; 6]]),
        choices.mostly(&[GATEWAY_MAC, GROUP_MAC]),
    );
    let sources = [
        GUEST6,
        UNBOUND,
        GUEST_LOCAL,
        Ipv6Addr::UNSPECIFIED,
        GATEWAY6,
        REMOTE6,
    ];
    if choices.once_in(6) {
        let packet = of_the_link(macs, choices);
        return packet.build(choices);
    }
    let port = choices.mostly(&[GUEST_PORT, GUEST_PORT + 1, 546]);
    let remote = choices.mostly(&[remote_port(protocol), 53, 547, 444]);
    let l4 = l4_of(protocol, 128, port, [port, remote], choices);
    let packet = Packet {
        macs,
        source: choices.mostly(&sources),
        destination: choices.mostly(&[REMOTE6, GATEWAY6, GATEWAY_LOCAL, NAT6, ALL_NODES]),
        next_header: choices.mostly(&[protocol as u8, 0, 43, 44, 59, 60, 1]),
        hop_limit: choices.mostly(&[64, 1, 0, 2]),
        l4,
    };
    in_fragments(packet, choices).build(choices)
}

/// Neighbour discovery, DHCPv6, or a report of a listener.
fn of_the_link(macs: ([u8; 6], [u8; 6]), choices: &mut Choices<'_>) -> Packet {
    let source = choices.mostly(&[GUEST6, GUEST_LOCAL, UNBOUND, Ipv6Addr::UNSPECIFIED, REMOTE6]);
    let target = choices.mostly(&[GATEWAY6, GATEWAY_LOCAL, UNBOUND]);
    let kind = choices.one_of(&[135, 135, 135, 133, 134, 136, 137]);
    let option = [
        &[choices.mostly(&[1, 2]), choices.mostly(&[1, 2])][..],
        &GUEST_MAC,
    ]
    .concat();
    let neighbour = [
        &[kind, choices.mostly(&[0, 1]), 0, 0, 0, 0, 0, 0][..],
        &target.octets(),
        &option,
    ];
    let report = [
        &[58, choices.mostly(&[0, 1]), 5, 2, 0, 0, 1, 0][..],
        &[choices.one_of(&[143, 131, 132, 130]), 0, 0, 0, 0, 0, 0, 0],
    ];
    let dhcp = [
        &546_u16.to_be_bytes()[..],
        &547_u16.to_be_bytes(),
        &[0, 20, 0, 0],
        &[11; 12],
    ];
    let (next_header, l4) = match choices.below(4) {
        0 => (0, report.concat()),
        1 => (17, dhcp.concat()),
        _ => (58, neighbour.concat()),
    };
    Packet {
        macs,
        source,
        destination: choices.one_of(&[ALL_NODES, target]),
        next_header,
        hop_limit: choices.mostly(&[255, 64]),
        l4,
    }
}

fn from_world(protocol: Protocol, choices: &mut Choices<'_>) -> Vec<u8> {
    let remote = choices.mostly(&[remote_port(protocol), 444]);
    let port = choices.mostly(&[NAT_PORT, FORWARDED_PORT, FORWARDED_PORT + 1, 9]);
    let macs = (
        ROUTER_MAC,
        choices.mostly(&[HOST_MAC, ROUTER_MAC, GROUP_MAC]),
    );
    if choices.once_in(8) {
        return neighbour_of_uplink(macs, choices).build(choices);
    }
    let l4 = if choices.once_in(8) {
        let quoted = Packet {
            macs,
            source: NAT6,
            destination: choices.mostly(&[REMOTE6, GUEST6]),
            next_header: choices.mostly(&[protocol as u8, 44, 1]),
            hop_limit: 60,
            l4: l4_of(protocol, 128, NAT_PORT, [NAT_PORT, remote], choices),
        };
        let quote = quoted.build(choices)[14..].to_vec();
        let kind = choices.one_of(&[1, 2, 3, 4, 5, 135]);
        let mut l4 = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &quote].concat();
        l4.truncate(choices.mostly(&[200, 56, 55, 20]));
        (58, l4)
    } else {
        (
            protocol as u8,
            l4_of(protocol, 129, port, [remote, port], choices),
        )
    };
    let packet = Packet {
        macs,
        source: choices.mostly(&[REMOTE6, GUEST6]),
        destination: choices.mostly(&[NAT6, GUEST6, ALL_NODES, Ipv6Addr::LOCALHOST]),
        next_header: choices.mostly(&[l4.0, 0, 44, 1]),
        hop_limit: choices.mostly(&[64, 1, 0, 2]),
        l4: l4.1,
    };
    in_fragments(packet, choices).build(choices)
}

/// A neighbour on the uplink asks, mostly for the guest's address.
fn neighbour_of_uplink(macs: ([u8; 6], [u8; 6]), choices: &mut Choices<'_>) -> Packet {
    let target = choices.mostly(&[GUEST6, UNBOUND, NAT6]);
    let l4 = [
        &[
            choices.mostly(&[135, 136]),
            choices.mostly(&[0, 1]),
            0,
            0,
            0,
            0,
            0,
            0,
        ][..],
        &target.octets(),
        &[choices.mostly(&[1, 2]), choices.mostly(&[1, 2])],
        &ROUTER_MAC,
    ];
    Packet {
        macs: (macs.0, choices.one_of(&[HOST_MAC, GROUP_MAC, ROUTER_MAC])),
        source: choices.mostly(&[REMOTE6, Ipv6Addr::UNSPECIFIED]),
        destination: choices.one_of(&[ALL_NODES, target]),
        next_header: 58,
        hop_limit: choices.mostly(&[255, 64]),
        l4: l4.concat(),
    }
}

fn from_engine(protocol: Protocol, choices: &mut Choices<'_>) -> Vec<u8> {
    let is_from_world = choices.once_in(2);
    let mut frame = match is_from_world {
        true => from_world(protocol, choices),
        false => from_guest(protocol, choices),
    };
    let usual = match is_from_world {
        true => Command::Deliver,
        false => Command::Forward,
    } as u8;
    let code = choices.mostly(&[usual, 6, 1, 2, 3, 4, 5, 0, 7]);
    let id = match code {
        4 => choices.mostly(&[HOP, 0, u32::MAX]),
        5 => choices.mostly(&[DEVICE, 0]),
        6 => {
            let (slot, _) = choices.one_of(&FLOWS6);
            choices.mostly(&[Order::new(slot, GENERATION).encode(), VM, u32::MAX])
        }
        _ => choices.mostly(&[VM, VM + 1]),
    };
    let header = PortHeader {
        code,
        flags: 0,
        vm_row: choices.mostly(&[ROW, 0, ROW + 1, u16::MAX]),
        id,
    };
    frame[..PortHeader::LEN].copy_from_slice(&header.encode());
    frame
}
