//! The steps of a run.
use slipgate_abi::{Handover, Ip4, Protocol, RuleIndex, VmId, VmRow};
use slipgate_policy::Destination;
use userspace_nat::{
    control::Forward,
    fake::{Faults, packets},
    packet::{Ipv4, Packet, Transport},
    port::VirtioNetHdr,
};

use super::{
    inspected,
    rig::{ROWS, Rig, VMS, network},
};
use crate::{
    dress::dress,
    tape::Tape,
    vms::{GATEWAY, GUEST, HOST, PEER, RESOLVER, ip},
};

/// Kinds of steps: the number on the tape modulo [`what::COUNT`]. Bit 7 suppresses the engine's
/// turn.
pub(crate) mod what {
    pub(crate) const HAND_OVER: u8 = 0;
    pub(crate) const PORT_FRAME: u8 = 1;
    pub(crate) const TCP: u8 = 2;
    pub(crate) const UDP: u8 = 3;
    pub(crate) const ECHO: u8 = 4;
    pub(crate) const ARP: u8 = 5;
    pub(crate) const REPLY: u8 = 6;
    pub(crate) const WORLD: u8 = 7;
    pub(crate) const ERROR_FROM_WORLD: u8 = 8;
    pub(crate) const ERROR_FROM_GUEST: u8 = 9;
    pub(crate) const TIME: u8 = 10;
    pub(crate) const FAULTS: u8 = 11;
    pub(crate) const BROKER: u8 = 12;
    pub(crate) const RESTART: u8 = 13;
    pub(crate) const GUEST: u8 = 14;
    pub(crate) const DNS_STREAM: u8 = 15;
    pub(crate) const SEGMENT: u8 = 16;
    pub(crate) const SERVER: u8 = 17;
    pub(crate) const COUNT: u8 = 18;
    pub(crate) const LATER: u8 = 0x80;
}

const MILLISECOND_NS: u64 = 1_000_000;
/// Destinations of a guest, by number.
const SERVERS: [(Ip4, u16); 8] = [
    (PEER, 443),
    (PEER, 80),
    (PEER, 53),
    (GATEWAY, 67),
    (RESOLVER, 53),
    (ip(203, 0, 113, 5), 80),
    (ip(255, 255, 255, 255), 67),
    (GATEWAY, 9_000),
];

/// Reads one step and performs it.
pub(super) fn perform(rig: &mut Rig, tape: &mut Tape<'_>) {
    let what = tape.u8();
    match what % what::LATER % what::COUNT {
        what::HAND_OVER => hand_over(rig, tape),
        what::PORT_FRAME => rig.port_frame(tape.bytes().to_vec()),
        what::TCP => {
            let (row, port, to) = from_guest(tape);
            let (flags, sequence) = (tape.u8(), u32::from(tape.u8()));
            let packet = packets::tcp((GUEST, port), to, flags, sequence, 5, &[2, 4, 0x23, 0], &[]);
            guest(rig, row, &packet);
        }
        what::UDP => {
            let (row, port, to) = from_guest(tape);
            let data = tape.bytes();
            guest(rig, row, &packets::udp((GUEST, port), to, data));
        }
        what::ECHO => {
            let (row, id, to) = from_guest(tape);
            guest(rig, row, &packets::echo(GUEST, to.0, true, id, b"data"));
        }
        what::ARP => {
            let row = vm_row(tape);
            let message = tape.bytes();
            rig.kernel.borrow_mut().guest_sends_arp(row, message);
        }
        what::REPLY => reply(rig, tape),
        what::WORLD => {
            let (bits, vnet) = (tape.u8(), vnet(rig, tape));
            let mut packet = tape.bytes().to_vec();
            dress(&mut packet, bits, PEER);
            rig.kernel.borrow_mut().world_sends(vnet, &packet);
        }
        what::ERROR_FROM_WORLD => {
            let (kind, code, which) = (tape.u8(), tape.u8(), usize::from(tape.u8()));
            if let Some(about) = rig.sent.get(which % rig.sent.len().max(1)) {
                let error = packets::icmp_error(PEER, HOST, kind, code, about);
                let mut kernel = rig.kernel.borrow_mut();
                kernel.world_sends(VirtioNetHdr::default(), &error);
            }
        }
        what::ERROR_FROM_GUEST => {
            let row = vm_row(tape);
            let (kind, code, which) = (tape.u8(), tape.u8(), usize::from(tape.u8()));
            if let Some((_, about)) = rig.delivered.get(which % rig.delivered.len().max(1)) {
                let error = packets::icmp_error(GUEST, PEER, kind, code, about);
                guest(rig, row, &error);
            }
        }
        what::TIME => {
            let (scale, ms) = (tape.u8() % 4, u64::from(tape.u16()));
            rig.pass(ms * MILLISECOND_NS * [1, 10, 100, 1_000][usize::from(scale)]);
        }
        what::FAULTS => {
            let mut some = || u32::from(tape.u8() % 4);
            let faults = Faults {
                get_fails: 0,
                insert_exists: some(),
                insert_fails: some(),
                open_port_full: 0,
                order_fails: some().into(),
                orders_lost: 0,
                remove_fails: some(),
                map_capacity: 6 * some() as usize,
                names_capacity: 0,
                port_refuses: some(),
                port_ignores: false,
                sleeps_meanwhile: Default::default(),
                unpublished_looks: Default::default(),
                unseen_fragments: Default::default(),
                takes_early: Default::default(),
                claims_early: Default::default(),
                queue_len: 0,
            };
            rig.failed_removals += faults.remove_fails as usize;
            rig.kernel.borrow_mut().faults = faults;
        }
        what::BROKER => broker(rig, tape),
        what::RESTART => rig.start(),
        what::GUEST => {
            let (row, bits, vnet) = (vm_row(tape), tape.u8(), vnet(rig, tape));
            let mut packet = tape.bytes().to_vec();
            dress(&mut packet, bits, GUEST);
            rig.kernel.borrow_mut().guest_sends(row, vnet, &packet);
        }
        what::SEGMENT => inspected::segment(rig, tape),
        what::SERVER => inspected::server_says(rig, tape),
        _ => dns_stream(rig, tape),
    }
    if what & what::LATER == 0 {
        rig.turn();
    }
}

fn guest(rig: &mut Rig, row: u16, packet: &[u8]) {
    let mut kernel = rig.kernel.borrow_mut();
    kernel.guest_sends(row, VirtioNetHdr::default(), packet);
}

fn vm_row(tape: &mut Tape<'_>) -> u16 {
    1 + u16::from(tape.u8()) % VMS
}

/// Reads the row, the port and the destination of a guest's packet: `row and port (1) | destination
/// (1)`.
fn from_guest(tape: &mut Tape<'_>) -> (u16, u16, (Ip4, u16)) {
    let (from, to) = (u16::from(tape.u8()), usize::from(tape.u8()));
    (
        1 + from % VMS,
        1_000 + from / 32,
        SERVERS[to % SERVERS.len()],
    )
}

/// Reads an offload header: `has one (1) [| header (10)]`.
fn vnet(rig: &mut Rig, tape: &mut Tape<'_>) -> VirtioNetHdr {
    if tape.u8() & 1 == 0 {
        return VirtioNetHdr::default();
    }
    let vnet = VirtioNetHdr::decode(&tape.array());
    rig.has_gso |= vnet.gso_type != VirtioNetHdr::GSO_NONE;
    vnet
}

/// Hands a frame with this packet over, without running the programs.
fn hand_over(rig: &mut Rig, tape: &mut Tape<'_>) {
    let row = u16::from(tape.u8()) % ROWS;
    let why = Handover::from_u8(tape.u8() % 12).unwrap_or(Handover::Miss);
    let (flags, bits, vnet) = (tape.u8() & 3, tape.u8(), vnet(rig, tape));
    let mut packet = tape.bytes().to_vec();
    dress(&mut packet, bits, if flags & 1 == 0 { GUEST } else { PEER });
    let mut kernel = rig.kernel.borrow_mut();
    kernel.hand_over(row, why, flags, vnet, &packet);
}

/// Sends the peer's reply to a packet that reached it: `which (1) | flags (1) | length of the
/// payload (2)`.
fn reply(rig: &mut Rig, tape: &mut Tape<'_>) {
    let (which, flags, len) = (usize::from(tape.u8()), tape.u8(), usize::from(tape.u16()));
    let Some(sent) = rig.sent.get(which % rig.sent.len().max(1)) else {
        return;
    };
    let Ok(packet) = Ipv4::parse(sent).and_then(Packet::parse) else {
        return;
    };
    let (us, them) = (packet.ip.source, packet.ip.destination);
    let data = vec![0; len % 4_096];
    let answer = match packet.transport {
        Transport::Tcp(h) => {
            let ack = h.sequence.wrapping_add(h.sequence_len());
            let (from, to) = ((them, h.destination), (us, h.source));
            packets::tcp(from, to, flags, 9, ack, &[], &data)
        }
        Transport::Udp(h) => packets::udp((them, h.destination), (us, h.source), &data),
        Transport::Icmp(h) => packets::echo(them, us, false, h.id, &data),
        Transport::Other => return,
    };
    let answer = match flags & 0x80 {
        0 => answer,
        _ => packets::may_fragment(answer),
    };
    let mut kernel = rig.kernel.borrow_mut();
    kernel.world_sends(VirtioNetHdr::default(), &answer);
}

/// Continues the guest's last TCP connection, after the last segment that reached it: `row (1) |
/// flags (1) | payload`.
fn dns_stream(rig: &mut Rig, tape: &mut Tape<'_>) {
    let (row, flags, data) = (vm_row(tape), tape.u8(), tape.bytes());
    let id = rig.ids[usize::from(row)];
    let segment = rig.delivered.iter().rev().find_map(|(to, bytes)| {
        let packet = Ipv4::parse(bytes).and_then(Packet::parse).ok()?;
        match packet.transport {
            Transport::Tcp(tcp) if *to == id => Some((packet.ip.source, tcp)),
            _ => None,
        }
    });
    let Some((from, tcp)) = segment else { return };
    let ack = tcp.sequence.wrapping_add(tcp.sequence_len());
    let packet = packets::tcp(
        (GUEST, tcp.destination),
        (from, tcp.source),
        flags,
        tcp.acknowledgement,
        ack,
        &[],
        data,
    );
    guest(rig, row, &packet);
}

fn broker(rig: &mut Rig, tape: &mut Tape<'_>) {
    let row = vm_row(tape);
    let id = rig.ids[usize::from(row)];
    match tape.u8() % 8 {
        0 if id != 0 => {
            rig.ids[usize::from(row)] = 0;
            rig.tell(move |engine| engine.remove_vm(VmRow::new(row), VmId::new(id)));
        }
        0 | 1 if id == 0 => {
            rig.new_vm(row);
            if let Some(vm) = rig.vm(row) {
                rig.tell(|engine| engine.set_vm(vm));
            }
        }
        2 => {
            let network = network(u32::from(tape.u16()));
            rig.tell(move |engine| engine.set_network(&network));
        }
        3 => {
            let ports = vec![
                (Protocol::Tcp, 61_000 + u16::from(tape.u8() % 4)),
                (Protocol::Udp, 61_001),
            ];
            rig.tell(|engine| engine.set_reserved_ports(ports));
        }
        4 => {
            let row = VmRow::new(u16::from(tape.u8()) % ROWS);
            let to = Destination {
                addr: tape.array::<4>().into(),
                port: tape.u16(),
                protocol: Protocol::Tcp,
            };
            let name = (tape.u8() & 1 != 0).then_some("www.example.test");
            rig.tell(move |engine| drop(engine.why(row, to, name)));
        }
        5 => {
            // Seeds name the request.
            let _ = tape.u8();
            rig.tell(|engine| {
                engine.after_ends();
            });
        }
        6 => {
            let port = 8_000 + u16::from(tape.u8() % 4);
            let mut kernel = rig.kernel.borrow_mut();
            kernel.forwards.insert((HOST, port, 6), (row, id));
            drop(kernel);
            let forward = Forward {
                protocol: Protocol::Tcp,
                host: HOST.into(),
                host_port: port,
                vm: VmId::new(id),
                vm_row: VmRow::new(row),
                guest_port: 80,
                rule: RuleIndex::new(12),
                is_own: false,
            };
            rig.tell(move |engine| engine.set_forwards(vec![forward]));
        }
        _ => rig.tell(|engine| engine.set_resolvers(&[])),
    }
}
