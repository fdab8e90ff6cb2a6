//! Random tables and frames, from a tape of random bytes: shorter tapes and smaller bytes are
//! plainer.
use std::net::{Ipv4Addr, SocketAddrV4};

use slipgate_abi::{
    Command, NextHop, PortHeader, Protocol, Rate, Sequences, Verdict, Vm, VmRates, VmRef, checksum,
    maps::Owner,
    portframe::Order,
    sequence::SendSpace,
    slot::{OrderState, SlotFlags},
    tcp::{Flags, TcpBits},
    vm::VmFlags,
};
use slipgate_testbed::frame::{Checksum, FrameBuilder};

use crate::{both::*, choices6};

const ISN: u32 = 0x1234_5678;
const SENT: u32 = 600;
const SERVER_FIRST: u32 = 9_000;
const SERVER_NEXT: u32 = 9_400;
const ROUTER_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 9, 9, 9];
const UPLINK_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 1, 1, 1];
/// Loopback's own: a test run's frame to it is one for this host.
const HOST_MAC: [u8; 6] = [0; 6];
/// A test run takes no shorter one.
pub(crate) const SHORTEST: usize = 34;

/// A tape of choices; behind its end all are the plainest.
pub(crate) struct Choices<'t>(std::slice::Iter<'t, u8>);

impl<'t> Choices<'t> {
    pub(crate) fn new(tape: &'t [u8]) -> Self {
        Self(tape.iter())
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or_default()
    }

    /// Returns true roughly once in `times` calls.
    pub(crate) fn once_in(&mut self, times: u8) -> bool {
        self.byte() > u8::MAX - u8::MAX / times
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// The first, or once in eight another.
    pub(crate) fn mostly<T: Copy>(&mut self, all: &[T]) -> T {
        if self.once_in(8) {
            self.one_of(all)
        } else {
            all[0]
        }
    }
}

/// Fills the tables of both; `kind`: the protocol that packets are of.
pub(crate) fn fill(both: &Both, choices: &mut Choices<'_>) -> Protocol {
    let mut flags = 0;
    for (flag, times) in [
        (VmFlags::CHECK_MAC, 4),
        (VmFlags::FROZEN, 32),
        (VmFlags::LIMITED, 6),
        (VmFlags::ASLEEP, 12),
    ] {
        if choices.once_in(times) {
            flags |= flag;
        }
    }
    let vm = Vm {
        id: choices.mostly(&[VM, VM, VM, VM + 1, 0]),
        owner: 0,
        tap_ifindex: 0,
        port_ifindex: 0,
        guest: GUEST.into(),
        gateway: GATEWAY.into(),
        guest_mac: choices.mostly(&[GUEST_MAC, VmRef::UNKNOWN_MAC]),
        gateway_mac: GATEWAY_MAC,
        flags,
        mtu: choices.mostly(&[1_500, 200, 9_000]),
        credits: choices.mostly(&[64, 0, 1]),
        policy: 6,
        prefix_len: choices.mostly(&[24, 32, 31, 8, 0, 77]),
        world_credits: choices.mostly(&[64, 0, 1]),
        handed_over: 100,
        taken_in: choices.mostly(&[100, 99, 36, 101]),
        arp_answered: 0,
        guard_window_ns: 0,
        guard_passed: 0,
        world_handed_over: 200,
        world_taken_in: choices.mostly(&[200, 199, 168, 136, 201]),
        foreign_mac: [0; 6],
        pad: [0; 2],
        name: [0; 64],
    };
    let (has_tap, has_port) = (!choices.once_in(24), !choices.once_in(24));
    both.set_vm(vm, has_tap, has_port);
    both.set_owner(Owner {
        share: choices.mostly(&[64, 0, 1, 2]),
        common: choices.mostly(&[64, 0, 1, 101]),
        handed_over: 300,
        taken_in: choices.mostly(&[300, 299, 236, 301]),
        world_handed_over: 400,
        world_taken_in: choices.mostly(&[400, 399, 336, 401]),
        ring_open: choices.mostly(&[1, 0]),
        ring_tail: 5_000,
        ring_head: choices.mostly(&[5_000, 4_999, 4_489, 4_488]),
        port_handed: 600,
        port_taken: choices.mostly(&[600, 599]),
        ..Owner::default()
    });
    let tight = |units| Rate {
        packets_per_second: units as u64 & 1,
        bytes_per_second: units as u64 >> 1,
        ..Rate::default()
    };
    let (tx, rx) = (tight(choices.below(4)), tight(choices.below(4)));
    both.set_rates(VmRates {
        tx,
        rx,
        ..VmRates::default()
    });
    both.set_next_hop(NextHop {
        sequence: choices.mostly(&[1, 2]),
        ifindex: choices.mostly(&[DEVICE, 0]),
        mtu: choices.mostly(&[1_500, 200]),
        flags: 0,
        neighbour_mac: ROUTER_MAC,
        uplink_mac: UPLINK_MAC,
        neighbour: Ipv4Addr::new(192, 0, 2, 1).into(),
        owner: 1,
        route_mtu: choices.mostly(&[0, 200]),
        neighbour6: slipgate_abi::Ip6::UNSPECIFIED,
        pad: [0; 8],
    });
    for (slot, protocol) in FLOWS {
        both.set_flow(slot, protocol, &flow(protocol, choices));
    }
    both.set_vm6(choices6::row(choices));
    for (slot, protocol) in FLOWS6 {
        let mut state = flow(protocol, choices);
        state.flags |= choices.mostly(&[SlotFlags::IPV6, 0]);
        both.set_flow(slot, protocol, &state);
    }
    choices.one_of(&[Protocol::Tcp, Protocol::Udp, Protocol::Icmp, Protocol::Tcp])
}

fn flow(protocol: Protocol, choices: &mut Choices<'_>) -> FlowState {
    let is_tcp = protocol == Protocol::Tcp;
    let both_syns = TcpBits::SYN_TX | TcpBits::SYN_RX;
    let bits = [
        both_syns,
        0,
        TcpBits::SYN_TX,
        TcpBits::SYN_RX,
        both_syns | TcpBits::FIN_TX,
        both_syns | TcpBits::FIN_RX,
        both_syns | TcpBits::FIN_TX | TcpBits::FIN_RX,
        both_syns | TcpBits::RST,
    ];
    let tcp = if is_tcp {
        choices.one_of(&bits) | choices.one_of(&[0, TcpBits::QUIET])
    } else {
        0
    };
    let is_held = is_tcp && choices.once_in(3);
    FlowState {
        verdict: choices.mostly(&[
            Verdict::Fast as u32,
            Verdict::Engine as u32,
            Verdict::Closing as u32,
            Verdict::Drop as u32,
            Verdict::Free as u32,
            9,
        ]),
        generation_is_the_entrys: !choices.once_in(24),
        tcp,
        flags: choices.one_of(&[0, SlotFlags::INBOUND]),
        next_hop: choices.mostly(&[HOP, 0, u32::MAX]),
        isn: ISN,
        fin_ends: [
            choices.one_of(&[0, ISN + 1, ISN + SENT, ISN + SENT + 1]),
            choices.one_of(&[0, SERVER_NEXT, SERVER_NEXT + 1]),
        ],
        is_young: choices.once_in(2),
        order: choices.mostly(&[OrderState::NONE, OrderState::GIVEN, OrderState::FAILED]),
        held: is_held.then(|| held(choices)),
        is_by_another_uplink: choices.once_in(24),
    }
}

/// A connection that was inspected: so much is acknowledged each way.
fn held(choices: &mut Choices<'_>) -> Sequences {
    let space = |acknowledged: u32, scale| SendSpace {
        acknowledged,
        end: acknowledged,
        window: 70_000,
        window_scale: scale,
        ..SendSpace::default()
    };
    let seen_ns = if choices.once_in(2) {
        0
    } else {
        monotonic_ns()
    };
    let sent = space(ISN + SENT, choices.one_of(&[0, 7]));
    Sequences::released(sent, space(SERVER_NEXT, 0), SERVER_FIRST, seen_ns)
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
        let place = choices.below(90);
        let change = choices.byte();
        if let Some(byte) = frame.get_mut(place) {
            *byte ^= change;
        }
    }
    match choices.mostly(&[0, 1, 2]) {
        1 => frame.truncate(choices.below(200)),
        2 => frame.extend_from_slice(&[0; 70][..choices.below(70)]),
        _ => {}
    }
    if at == At::UplinkWithoutL2 {
        frame.drain(..frame.len().min(14));
        // A test run takes the EtherType from here.
        if let Some(ether_type) = frame.get_mut(12..14) {
            ether_type.copy_from_slice(&[8, 0]);
        }
    }
    frame.resize(frame.len().max(SHORTEST), 0);
    if frame[12..14] == [0x86, 0xdd] {
        frame.resize(frame.len().max(54), 0);
    }
    let gso_size = match choices.once_in(5) {
        true => choices.one_of(&[1_400, 1, 100, 300, 500]),
        false => 0,
    };
    (at, frame, gso_size)
}

pub(crate) fn tcp_flags(choices: &mut Choices<'_>) -> u8 {
    choices.one_of(&[
        Flags::ACK,
        Flags::SYN,
        Flags::SYN | Flags::ACK,
        Flags::FIN | Flags::ACK,
        Flags::RST,
        Flags::RST | Flags::ACK,
        Flags::SYN | Flags::FIN,
        0,
    ])
}

/// Sequence and acknowledgement numbers, of either side.
pub(crate) fn tcp_numbers(choices: &mut Choices<'_>) -> [u8; 8] {
    let all = [
        ISN,
        ISN + 1,
        ISN + SENT,
        ISN + SENT + 1,
        SERVER_NEXT,
        SERVER_NEXT + 1,
        SERVER_FIRST,
        0x7000_0000,
    ];
    let numbers = [choices.one_of(&all), choices.one_of(&all)];
    numbers
        .map(u32::to_be_bytes)
        .concat()
        .try_into()
        .expect("eight bytes")
}

fn dressed(packet: FrameBuilder, choices: &mut Choices<'_>) -> FrameBuilder {
    let payload = choices.one_of(&[21, 0, 2, 160, 300, 1_480, 3_000]);
    let flags = tcp_flags(choices);
    let mut packet = packet
        .payload(&vec![7; payload])
        .flags(flags)
        .window(choices.one_of(&[4_096, 0, 65_535]))
        .ttl(choices.mostly(&[64, 1, 0, 2]))
        .ident(choices.one_of(&[7, 8]))
        .checksum(choices.mostly(&[Checksum::Full, Checksum::Zero, Checksum::Wrong]));
    if choices.once_in(16) {
        packet = packet.fragment(choices.one_of(&[0, 1, 100]), choices.once_in(2));
    }
    if choices.once_in(16) {
        packet = packet.ip_options(&[1; 4]);
    }
    packet
}

fn from_guest(protocol: Protocol, choices: &mut Choices<'_>) -> Vec<u8> {
    if choices.once_in(12) {
        return arp(choices);
    }
    if choices.once_in(16) {
        let asking = FrameBuilder::udp(
            SocketAddrV4::new(choices.one_of(&[Ipv4Addr::UNSPECIFIED, GUEST]), 68),
            SocketAddrV4::new(choices.one_of(&[Ipv4Addr::BROADCAST, GATEWAY]), 67),
        );
        let to = choices.one_of(&[[0xff; 6], GATEWAY_MAC]);
        return typed(asking.payload(&[1; 40]).macs(GUEST_MAC, to), choices);
    }
    let port = choices.mostly(&[GUEST_PORT, GUEST_PORT + 1, 68]);
    let remote = choices.mostly(&[remote_port(protocol), 53, 67, 444]);
    let source = SocketAddrV4::new(
        choices.mostly(&[GUEST, Ipv4Addr::UNSPECIFIED, REMOTE]),
        port,
    );
    let destination = SocketAddrV4::new(
        choices.mostly(&[REMOTE, GATEWAY, NAT, Ipv4Addr::BROADCAST]),
        remote,
    );
    let sequence =
        ISN.wrapping_add(choices.one_of(&[SENT, 0, 1, SENT - 1, SENT - 2, 70_600, 0x7000_0000]));
    let acknowledgement = choices.one_of(&[SERVER_NEXT, SERVER_NEXT + 1, SERVER_FIRST, 0]);
    let packet = of(protocol, source, destination, 8, choices).numbers(sequence, acknowledgement);
    let macs = (
        choices.mostly(&[GUEST_MAC, ROUTER_MAC, [0xff; 6]]),
        choices.mostly(&[GATEWAY_MAC, [0xff; 6]]),
    );
    let frame = typed(dressed(packet, choices).macs(macs.0, macs.1), choices);
    let translated = ((GUEST, GUEST_PORT), (NAT, NAT_PORT));
    with_checksum_that_becomes_zero(frame, protocol, translated, choices)
}

fn from_world(protocol: Protocol, choices: &mut Choices<'_>) -> Vec<u8> {
    let remote = choices.mostly(&[remote_port(protocol), 444]);
    let port = choices.mostly(&[
        NAT_PORT,
        FORWARDED_PORT,
        FORWARDED_PORT + 1,
        FORWARDED_PORT,
        9,
    ]);
    let source = SocketAddrV4::new(choices.mostly(&[REMOTE, GUEST]), remote);
    let to = choices.mostly(&[NAT, GUEST, Ipv4Addr::LOCALHOST]);
    let destination = SocketAddrV4::new(to, port);
    let sequence = choices.one_of(&[SERVER_NEXT, SERVER_FIRST, SERVER_NEXT + 21, 0x7000_0000]);
    let acknowledgement = ISN.wrapping_add(choices.one_of(&[SENT, 1, SENT + 1, SENT + 2, 80_000]));
    let macs = (
        ROUTER_MAC,
        choices.mostly(&[HOST_MAC, ROUTER_MAC, [0xff; 6]]),
    );
    if choices.once_in(10) {
        let quoted = of(
            protocol,
            SocketAddrV4::new(NAT, NAT_PORT),
            SocketAddrV4::new(REMOTE, remote),
            8,
            choices,
        );
        let mut quoted = quoted.payload(&[1; 30]).build_ip();
        quoted.truncate(choices.mostly(&[28, 60, 27]));
        let kind = choices.one_of(&[3, 11, 12, 4, 5]);
        let hop = Ipv4Addr::new(8, 0, 1, 1);
        let error = FrameBuilder::icmp(hop, NAT, kind, 1, [0; 4]).payload(&quoted);
        return typed(error.macs(macs.0, macs.1), choices);
    }
    let packet = of(protocol, source, destination, 0, choices).numbers(sequence, acknowledgement);
    let frame = typed(dressed(packet, choices).macs(macs.0, macs.1), choices);
    let translated = ((NAT, NAT_PORT), (GUEST, GUEST_PORT));
    with_checksum_that_becomes_zero(frame, protocol, translated, choices)
}

type Address = (Ipv4Addr, u16);

/// A UDP checksum now and then, right or not, that is zero when the packet was translated from the
/// one address to the other: zero means that there is none, so it is never sent as such.
fn with_checksum_that_becomes_zero(
    mut frame: Vec<u8>,
    protocol: Protocol,
    (from, to): (Address, Address),
    choices: &mut Choices<'_>,
) -> Vec<u8> {
    if protocol == Protocol::Udp && choices.once_in(16) {
        let word = |address: Ipv4Addr| u32::from_ne_bytes(address.octets());
        let sum = checksum::update16(0, to.1.to_be(), from.1.to_be());
        let sum = checksum::update32(sum, word(to.0), word(from.0));
        if let Some(field) = frame.get_mut(40..42) {
            field.copy_from_slice(&sum.to_ne_bytes());
        }
    }
    frame
}

/// A packet between two addresses; the ICMP query id is the port that is ours.
fn of(
    protocol: Protocol,
    source: SocketAddrV4,
    destination: SocketAddrV4,
    echo: u8,
    choices: &mut Choices<'_>,
) -> FrameBuilder {
    if choices.once_in(24) {
        return FrameBuilder::ip(*source.ip(), *destination.ip(), choices.one_of(&[47, 132]));
    }
    match protocol {
        Protocol::Tcp => FrameBuilder::tcp(source, destination),
        Protocol::Udp => FrameBuilder::udp(source, destination),
        Protocol::Icmp | Protocol::Icmpv6 => {
            let ours = if echo == 8 { source } else { destination };
            let id = ours.port().to_be_bytes();
            let kind = choices.mostly(&[echo, 8, 0, 13]);
            let rest = [id[0], id[1], 0, 1];
            FrameBuilder::icmp(*source.ip(), *destination.ip(), kind, 0, rest)
        }
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
        4 => choices.mostly(&[HOP, 0, HOP + 1, u32::MAX]),
        5 => choices.mostly(&[DEVICE, 0]),
        6 => {
            let (slot, _) = choices.one_of(&FLOWS);
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

/// Builds the frame, with another EtherType in some cases.
fn typed(frame: FrameBuilder, choices: &mut Choices<'_>) -> Vec<u8> {
    let (_, mut bytes) = frame.build();
    let ether_type: u16 = choices.mostly(&[0x0800, 0x0800, 0x86dd, 0x8100, 0x88a8, 0x88cc, 0x0806]);
    bytes[12..14].copy_from_slice(&ether_type.to_be_bytes());
    bytes
}

fn arp(choices: &mut Choices<'_>) -> Vec<u8> {
    let mac = choices.mostly(&[GUEST_MAC, ROUTER_MAC]);
    let sender = choices.mostly(&[GUEST, Ipv4Addr::UNSPECIFIED, REMOTE]);
    let target = choices.mostly(&[GATEWAY, REMOTE]);
    let mut frame = choices.mostly(&[[0xff; 6], GATEWAY_MAC]).to_vec();
    frame.extend(mac);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0]);
    frame.push(choices.mostly(&[1, 2]));
    frame.extend(mac);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}
