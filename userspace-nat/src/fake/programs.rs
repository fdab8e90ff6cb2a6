//! What the BPF programs do with a packet, as far as the engine can tell the difference.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Command, Direction, DropReason, Handover, PortHeader, SequencesRef, SlotRef, Tuple, Verdict,
    handshake,
    link::is_usable,
    portframe::PortFlags,
    rate::RateRef,
    segment::{self, Segments},
    slot::SlotFlags,
    tcp::{self, Flags, Phase, TcpBits},
    vm::VmFlags,
};

use super::{Kernel, segments};
use crate::{
    packet::{
        Ipv4, Packet, Transport,
        checksum::{self},
        icmp::{ECHO_REPLY, ECHO_REQUEST},
        ipv4::{self, End},
    },
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, Frame, VirtioNetHdr, single},
};

/// Where a packet went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Translated in the kernel.
    Fast,
    /// To the engine, for this reason.
    Engine(Handover),
    /// Dropped and counted.
    Dropped(DropReason),
    /// Not ours.
    Passed,
}

/// A flow that was found.
#[derive(Clone, Copy)]
struct Flow {
    slot: SlotRef,
    sequences: SequencesRef,
}

impl Kernel {
    /// A guest sends an IPv4 packet.
    pub fn guest_sends(&mut self, row: u16, vnet: VirtioNetHdr, l3: &[u8]) -> Way {
        let vm = self.vm(row);
        let id = vm.id().load(Relaxed);
        // SAFETY: a live row; one thread.
        let (guest, gateway) = unsafe { ((*vm.as_ptr()).guest, (*vm.as_ptr()).gateway) };
        let Ok(packet) = parse(l3) else {
            return self.drop_at(row, DropReason::Malformed, l3);
        };
        let segments = packet.segments(vnet);
        if self.is_frozen(row) {
            return self.drop_at(row, DropReason::Frozen, l3);
        }
        if packet.ip.source != guest {
            if matches!(packet.transport, Transport::Udp(udp) if udp.destination == 67) {
                return self.hand_over(row, Handover::Dhcp, PortFlags::GROUP, vnet, l3);
            }
            return self.drop_at(row, DropReason::Spoofed, l3);
        }
        if contradicts_itself(&packet) {
            return self.drop_at(row, DropReason::BadTcpFlags, l3);
        }
        if packet.ip.destination.octets[..3] == gateway.octets[..3] {
            return self.hand_over(row, Handover::Local, 0, vnet, l3);
        }
        match packet.transport {
            Transport::Icmp(icmp) if icmp.kind != ECHO_REQUEST => {
                return self.hand_over(row, Handover::Icmp, 0, vnet, l3);
            }
            Transport::Other => return self.drop_at(row, DropReason::IpProtocol, l3),
            _ => {}
        }
        let flow = packet.tuple(id, Direction::Tx).and_then(|t| self.flow(&t));
        let Some(flow) = flow else {
            return self.hand_over(row, Handover::Miss, 0, vnet, l3);
        };
        let slot = flow.slot;
        if let Some(why) = detour(slot, &packet, Direction::Tx) {
            return self.hand_over(row, why, 0, vnet, l3);
        }
        if self.is_strange(flow, &packet) {
            return self.drop_at(row, DropReason::OutOfWindow, l3);
        }
        if packet.ip.ttl <= 1 {
            return self.hand_over(row, Handover::TtlExpired, 0, vnet, l3);
        }
        // SAFETY: `next_hop` is an index the engine was given.
        let hop = unsafe { &*self.next_hops.at(slot.next_hop().load(Relaxed) as usize) };
        if is_usable(hop.sequence) && packet.ip.bytes.len() as u32 > hop.mtu {
            if let Some(way) = self.refuses_now(row, Direction::Tx, segments) {
                return way;
            }
            return self.hand_over(row, Handover::TooBig, 0, vnet, l3);
        }
        if let Some(way) = self.over_rate(row, Direction::Tx, segments) {
            return way;
        }
        count(
            flow,
            &packet,
            Direction::Tx,
            segments.packets,
            segments.bytes,
            self.now_ns,
        );
        self.at_world.push(translated(
            &packet,
            End::Source,
            slot.nat(),
            slot.nat_port(),
        ));
        Way::Fast
    }

    /// A guest sends an ARP packet that the kernel does not answer.
    pub fn guest_sends_arp(&mut self, row: u16, message: &[u8]) -> Way {
        if self.is_frozen(row) {
            return self.drop_at(row, DropReason::Frozen, message);
        }
        self.push(
            row,
            Handover::Arp,
            0,
            VirtioNetHdr::default(),
            ETHERTYPE_ARP,
            message,
        )
    }

    /// The world sends an IPv4 packet to the host.
    pub fn world_sends(&mut self, vnet: VirtioNetHdr, l3: &[u8]) -> Way {
        let Ok(packet) = parse(l3) else {
            return Way::Passed;
        };
        let segments = packet.segments(vnet);
        if let Transport::Icmp(icmp) = packet.transport
            && icmp.kind != ECHO_REPLY
        {
            let Ok(quoted) = crate::icmp::Quoted::parse(&packet.ip, false) else {
                return Way::Passed;
            };
            let Some(flow) = self.flow(&quoted.tuple_as_sent(Tuple::WORLD)) else {
                return Way::Passed;
            };
            let row = flow.slot.vm_row() as u16;
            if self.is_frozen(row) {
                return self.drop_at(row, DropReason::Frozen, l3);
            }
            return self.hand_over(row, Handover::Icmp, PortFlags::FROM_UPLINK, vnet, l3);
        }
        let Some(tuple) = packet.tuple(Tuple::WORLD, Direction::Rx) else {
            return Way::Passed;
        };
        let Some(flow) = self.flow(&tuple) else {
            let key = (tuple.local, tuple.local_port, tuple.protocol);
            let opens = match packet.transport {
                Transport::Tcp(tcp) => Flags::open(tcp.flags),
                Transport::Udp(_) => true,
                _ => false,
            };
            let Some((row, _)) = self.forwards.get(&key).copied().filter(|_| opens) else {
                return Way::Passed;
            };
            if self.is_frozen(row) {
                return self.drop_at(row, DropReason::Frozen, l3);
            }
            return self.hand_over(row, Handover::Forward, PortFlags::FROM_UPLINK, vnet, l3);
        };
        let slot = flow.slot;
        let row = slot.vm_row() as u16;
        if self.is_frozen(row) {
            return self.drop_at(row, DropReason::Frozen, l3);
        }
        if contradicts_itself(&packet) {
            return self.drop_at(row, DropReason::BadTcpFlags, l3);
        }
        if let Some(why) = detour(slot, &packet, Direction::Rx) {
            return self.hand_over(row, why, PortFlags::FROM_UPLINK, vnet, l3);
        }
        if packet.ip.ttl <= 1 {
            let flags = PortFlags::FROM_UPLINK;
            return self.hand_over(row, Handover::TtlExpired, flags, vnet, l3);
        }
        // SAFETY: a live row; one thread.
        if packet.ip.bytes.len() as u32 > unsafe { (*self.vm(row).as_ptr()).mtu } {
            if let Some(way) = self.refuses_now(row, Direction::Rx, segments) {
                return way;
            }
            return self.hand_over(row, Handover::TooBig, PortFlags::FROM_UPLINK, vnet, l3);
        }
        if let Some(way) = self.over_rate(row, Direction::Rx, segments) {
            return way;
        }
        count(
            flow,
            &packet,
            Direction::Rx,
            segments.packets,
            segments.bytes,
            self.now_ns,
        );
        let bytes = translated(&packet, End::Destination, slot.guest(), slot.guest_port());
        self.at_guest.push((slot.vm(), bytes));
        Way::Fast
    }

    /// The engine writes a frame.
    pub(super) fn engine_port(&mut self, bytes: &[u8]) {
        let frame = Frame::parse(bytes).expect("the engine writes frames of the port's form");
        let PortHeader {
            code, vm_row, id, ..
        } = frame.header;
        let command = Command::from_u8(code).expect("the engine writes commands that exist");
        if self.is_frozen(vm_row) {
            self.drop_at(vm_row, DropReason::Frozen, frame.l3);
            return;
        }
        match command {
            Command::ToGuest => {
                let packets = segments(frame.vnet, frame.l3).into_iter();
                self.at_guest.extend(packets.map(|packet| (id, packet)));
            }
            Command::Emit | Command::EmitBy => self.at_world.push(frame.l3.to_vec()),
            Command::Forward | Command::Deliver => {
                let packet = parse(frame.l3).expect("the engine sends back what it could parse");
                let segments = packet.segments(frame.vnet);
                let (direction, scope) = match command {
                    Command::Forward => (Direction::Tx, id),
                    _ => (Direction::Rx, Tuple::WORLD),
                };
                let flow = packet.tuple(scope, direction).and_then(|t| self.flow(&t));
                let Some(flow) = flow else {
                    self.stats(vm_row).dropped(DropReason::NoFlow, segments);
                    self.dropped += 1;
                    return;
                };
                let slot = flow.slot;
                if direction == Direction::Tx && self.is_strange(flow, &packet) {
                    self.stats(vm_row)
                        .dropped(DropReason::OutOfWindow, segments);
                    self.dropped += 1;
                    return;
                }
                if self.over_rate(vm_row, direction, segments).is_some() {
                    return;
                }
                let (packets, bytes) = (segments.packets, segments.bytes);
                count(flow, &packet, direction, packets, bytes, self.now_ns);
                if direction == Direction::Tx {
                    let sent = translated(&packet, End::Source, slot.nat(), slot.nat_port());
                    self.at_world.push(sent);
                } else {
                    let to = (slot.guest(), slot.guest_port());
                    let sent = translated(&packet, End::Destination, to.0, to.1);
                    self.at_guest.push((slot.vm(), sent));
                }
            }
        }
    }

    fn flow(&self, tuple: &Tuple) -> Option<Flow> {
        let reference = self.flows.get(tuple)?;
        let slot = self.slot(reference.slot);
        let same = slot.generation().load(Relaxed) == reference.generation
            && (slot.guest_tuple() == *tuple || slot.world_tuple() == *tuple)
            && slot.verdict().load(Relaxed) != Verdict::Free as u32;
        same.then_some(Flow {
            slot,
            sequences: self.sequences(reference.slot),
        })
    }

    /// Whether a guest's segment is none of the connection that was inspected in its flow.
    fn is_strange(&self, flow: Flow, packet: &Packet<'_>) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return false;
        };
        let is_held = flow.slot.tcp().load(Relaxed) & TcpBits::HELD != 0;
        let now_ns = || self.now_ns;
        is_held && !flow.sequences.is_guests(flow.slot, &tcp.segment(), now_ns)
    }

    fn is_frozen(&self, row: u16) -> bool {
        self.vm(row).flags().load(Relaxed) & VmFlags::FROZEN != 0
    }

    /// Charges a packet, or drops it as over its VM's rate.
    fn over_rate(&mut self, row: u16, direction: Direction, segments: Segments) -> Option<Way> {
        let rates = self.limited(row)?;
        let taken = rates.take(direction, segments, self.now_ns);
        Some(self.drop_counted(row, taken.err()?, segments))
    }

    /// Drops a packet that would be over its VM's rate.
    fn refuses_now(&mut self, row: u16, direction: Direction, segments: Segments) -> Option<Way> {
        let rates = self.limited(row)?;
        let passes = rates.look(direction, self.now_ns);
        Some(self.drop_counted(row, passes.err()?, segments))
    }

    fn limited(&self, row: u16) -> Option<RateRef> {
        let flags = self.vm(row).flags().load(Relaxed);
        (flags & VmFlags::LIMITED != 0).then(|| self.rates(row))
    }

    fn drop_counted(&mut self, row: u16, reason: DropReason, segments: Segments) -> Way {
        self.stats(row).dropped(reason, segments);
        self.dropped += 1;
        Way::Dropped(reason)
    }

    fn drop_at(&mut self, row: u16, reason: DropReason, l3: &[u8]) -> Way {
        self.stats(row).dropped(reason, single(l3.len()));
        self.dropped += 1;
        Way::Dropped(reason)
    }

    /// Hands a frame over whatever the programs would think of it.
    pub fn hand_over(
        &mut self,
        row: u16,
        why: Handover,
        flags: u8,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Way {
        self.push(row, why, flags, vnet, ETHERTYPE_IPV4, l3)
    }

    fn push(
        &mut self,
        row: u16,
        why: Handover,
        flags: u8,
        vnet: VirtioNetHdr,
        ethertype: u16,
        l3: &[u8],
    ) -> Way {
        let vm = self.vm(row);
        let from_world = flags & PortFlags::FROM_UPLINK != 0;
        let (handed_over, taken_in) = vm.under_way(from_world);
        let out = handed_over.load(Relaxed) - taken_in.load(Relaxed);
        // SAFETY: a live row; one thread.
        let (guests, worlds) = unsafe { ((*vm.as_ptr()).credits, (*vm.as_ptr()).world_credits) };
        let credits = match (from_world, why) {
            (false, _) => guests,
            (true, Handover::Forward) => worlds.div_ceil(2),
            (true, _) => worlds,
        };
        if out >= u64::from(credits) {
            return self.drop_at(row, DropReason::NoCredit, l3);
        }
        let gso_size = match vnet.gso_type {
            VirtioNetHdr::GSO_NONE => 0,
            _ => u32::from(vnet.gso_size),
        };
        let protocol = match ethertype {
            ETHERTYPE_IPV4 => l3.get(9).copied().unwrap_or(0),
            _ => 0,
        };
        let cost = segment::credits(l3.len() as u32, protocol, gso_size);
        handed_over.fetch_add(cost, Relaxed);
        self.handed_over += 1;
        let header = PortHeader {
            code: why as u8,
            flags,
            vm_row: row,
            id: vm.id().load(Relaxed),
        };
        let mut frame = vnet.encode().to_vec();
        frame.extend_from_slice(&header.encode());
        frame.extend_from_slice(&ethertype.to_be_bytes());
        frame.extend_from_slice(l3);
        if self.faults.queue_len != 0 && self.queue.len() >= self.faults.queue_len {
            self.lost += 1;
        } else {
            self.queue.push_back(frame);
        }
        Way::Engine(why)
    }
}

fn parse(l3: &[u8]) -> Result<Packet<'_>, crate::packet::Malformed> {
    Packet::parse(Ipv4::parse(l3)?)
}

fn contradicts_itself(packet: &Packet<'_>) -> bool {
    matches!(packet.transport, Transport::Tcp(tcp) if Flags::are_contradictory(tcp.flags))
}

/// Why a packet of a flow goes to the engine all the same.
fn detour(slot: SlotRef, packet: &Packet<'_>, direction: Direction) -> Option<Handover> {
    if slot.verdict().load(Relaxed) != Verdict::Fast as u32 {
        return Some(Handover::Verdict);
    }
    if let Transport::Tcp(tcp) = packet.transport
        && Flags::open(tcp.flags)
    {
        let inbound = slot.flags() & SlotFlags::INBOUND != 0;
        let again = inbound == (direction == Direction::Rx)
            && tcp.sequence == slot.isn()
            && TcpBits(slot.tcp().load(Relaxed)).phase() == Phase::Opening;
        if !again {
            return Some(Handover::Syn);
        }
    }
    None
}

fn count(
    flow: Flow,
    packet: &Packet<'_>,
    direction: Direction,
    packets: u64,
    bytes: u64,
    now_ns: u64,
) {
    let slot = flow.slot;
    let (p, b, last) = match direction {
        Direction::Tx => (slot.tx_packets(), slot.tx_bytes(), slot.tx_last_ns()),
        Direction::Rx => (slot.rx_packets(), slot.rx_bytes(), slot.rx_last_ns()),
    };
    p.fetch_add(packets, Relaxed);
    b.fetch_add(bytes, Relaxed);
    last.store(now_ns, Relaxed);
    if let Transport::Tcp(tcp) = packet.transport
        && TcpBits(slot.tcp().load(Relaxed)).is_concerned_by(tcp.flags)
    {
        let now_ns = || now_ns;
        tcp::note(slot, flow.sequences, direction, &tcp.segment(), now_ns);
    }
    if let Transport::Tcp(tcp) = packet.transport
        && handshake::is_pending(slot)
    {
        handshake::note(slot, direction, &tcp.segment());
    }
}

/// One end of a packet translated, with its checksums.
fn translated(packet: &Packet<'_>, end: End, addr: slipgate_abi::Ip4, port: u16) -> Vec<u8> {
    let mut bytes = packet.ip.bytes.to_vec();
    ipv4::set_address(&mut bytes, end, addr);
    ipv4::decrement_ttl(&mut bytes);
    let old = match end {
        End::Source => packet.ip.source,
        End::Destination => packet.ip.destination,
    };
    let (port_at, sum_at) = match (packet.transport, end) {
        (Transport::Tcp(_), End::Source) => (0, 16),
        (Transport::Tcp(_), End::Destination) => (2, 16),
        (Transport::Udp(_), End::Source) => (0, 6),
        (Transport::Udp(_), End::Destination) => (2, 6),
        _ => (4, 2),
    };
    let l4 = &mut bytes[packet.ip.header_len..];
    let old_port = u16::from_be_bytes([l4[port_at], l4[port_at + 1]]);
    l4[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    let mut sum = [l4[sum_at], l4[sum_at + 1]];
    if !matches!(packet.transport, Transport::Icmp(_)) {
        checksum::replace_address(&mut sum, old, addr);
    }
    checksum::replace16(&mut sum, old_port, port);
    l4[sum_at..sum_at + 2].copy_from_slice(&sum);
    bytes
}
