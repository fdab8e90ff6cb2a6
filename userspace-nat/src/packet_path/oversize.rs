//! Packets larger than the link they would leave by (RFC 4787 REQ-13).
//!
//! With DF, or as a GSO frame, the sender is told the MTU. Without, the packet is fragmented. The
//! kernel's translation can't do that, so here the engine translates: it rewrites, completes the
//! checksum, charges the VM's rates for the fragments, counts the packet in its flow, as the one that
//! it was, and sends the fragments as they are: all, or none.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, DropReason, NextHop,
    segment::{self, Segments},
};

use crate::{
    datapath::Datapath,
    packet::{
        Packet, Transport,
        checksum::{self, Sum},
        ipv4::{self, End, HEADER_LEN},
    },
    packet_path::{Disposition, Finish},
    port::{ETHERTYPE_IPV4, Exit, VirtioNetHdr},
    reply::IcmpError,
    route::Route,
    state::{Core, VmState},
};

impl<D: Datapath> Core<D> {
    /// A guest's packet of a flow, larger than the uplink.
    pub(crate) fn too_big_from_guest(
        &mut self,
        vm: &mut VmState,
        vnet: VirtioNetHdr,
        packet: Packet<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        let mtu = self.uplink_mtu(slot);
        if packet.ip.dont_fragment || vnet.gso_type != VirtioNetHdr::GSO_NONE {
            let error = IcmpError::TooBig(mtu);
            vm.answers
                .icmp_to_guest(&vm.net, &packet, error, &mut self.out, now_ns);
            return Finish::Drop(DropReason::TooBig);
        }
        let Some(entry) = self.flows.entry(slot).copied() else {
            return Finish::Drop(DropReason::NoFlow);
        };
        if self.is_strange(slot, &packet, now_ns) {
            return Finish::Drop(DropReason::OutOfWindow);
        }
        let exit = self.exit_of(slot);
        self.copy(&packet);
        let (source, port) = (entry.nat, entry.nat_port);
        rewrite(&mut self.scratch, &packet, vnet, End::Source, source, port);
        self.set_identification();
        if let Err(reason) = self.send_fragments(vm, Side::World(exit), mtu, now_ns) {
            return Finish::Drop(reason);
        }
        let live = self.datapath.slot(slot);
        live.tx_packets().fetch_add(1, Relaxed);
        live.tx_bytes()
            .fetch_add(packet.ip.bytes.len() as u64, Relaxed);
        live.tx_last_ns().fetch_max(now_ns, Relaxed);
        self.note_segment(slot, Direction::Tx, &packet, now_ns);
        Finish::Dispose(Disposition::Consumed)
    }

    /// The world's packet of a flow, larger than the guest's link.
    pub(crate) fn too_big_from_world(
        &mut self,
        vm: &mut VmState,
        vnet: VirtioNetHdr,
        packet: Packet<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        let mtu = u32::from(vm.net.mtu);
        if packet.ip.dont_fragment || vnet.gso_type != VirtioNetHdr::GSO_NONE {
            self.tell_world(vm, &packet, IcmpError::TooBig(mtu), now_ns);
            return Finish::Drop(DropReason::TooBig);
        }
        let Some(entry) = self.flows.entry(slot).copied() else {
            return Finish::Drop(DropReason::NoFlow);
        };
        if entry.guest.scope != vm.net.id {
            return Finish::Drop(DropReason::NoFlow);
        }
        self.copy(&packet);
        let guest = &entry.guest;
        rewrite(
            &mut self.scratch,
            &packet,
            vnet,
            End::Destination,
            guest.local,
            guest.local_port,
        );
        if let Err(reason) = self.send_fragments(vm, Side::Guest, mtu, now_ns) {
            return Finish::Drop(reason);
        }
        let live = self.datapath.slot(slot);
        live.rx_packets().fetch_add(1, Relaxed);
        live.rx_bytes()
            .fetch_add(packet.ip.bytes.len() as u64, Relaxed);
        live.rx_last_ns().fetch_max(now_ns, Relaxed);
        self.note_segment(slot, Direction::Rx, &packet, now_ns);
        Finish::Dispose(Disposition::Consumed)
    }

    /// Sends the packet in the scratch buffer in pieces that its link carries.
    fn send_fragments(
        &mut self,
        vm: &VmState,
        to: Side,
        mtu: u32,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let len = self.scratch.len();
        let fragments = segment::fragments(len as u32, mtu);
        let bytes = len + (fragments as usize - 1) * HEADER_LEN;
        if !self.out.has_room(fragments as usize, bytes) {
            return Err(DropReason::EngineBusy);
        }
        let direction = match to {
            Side::World(_) => Direction::Tx,
            Side::Guest => Direction::Rx,
        };
        let charged = Segments {
            packets: fragments,
            bytes: bytes as u64,
        };
        self.may_carry(&vm.net, direction, charged, now_ns)?;
        let mut packets = Fragments::new(&self.scratch, mtu);
        let vnet = VirtioNetHdr::default();
        while let Some(fragment) = packets.next() {
            let sent = match to {
                Side::World(exit) => self.out.emit(&vm.net, exit, vnet, fragment),
                Side::Guest => self.out.to_guest(&vm.net, ETHERTYPE_IPV4, vnet, fragment),
            };
            debug_assert!(sent.is_ok(), "there is room for all");
        }
        Ok(())
    }

    /// Largest packet that the flow's uplink, and its route there, carry, bytes.
    #[expect(unsafe_code, reason = "reads one word of a mapped element")]
    pub(crate) fn uplink_mtu(&self, slot: u32) -> u32 {
        let live = self.datapath.slot(slot);
        let next_hop = live.next_hop().load(Relaxed);
        let hop = self.datapath.next_hop(next_hop);
        // SAFETY: `Tables::next_hop` gives a mapped element; a word is read, not a reference made.
        let mtu = |hop: *const NextHop| unsafe { (&raw const (*hop).mtu).read_volatile() };
        let known = hop.and_then(|hop| hop.read(mtu));
        known.filter(|mtu| *mtu >= 68).unwrap_or_else(|| {
            let link_mtu = self.link_mtu(live.uplink_ifindex());
            match self.routes.lookup(live.remote().into()) {
                Route::Via { mtu: Some(mtu), .. } => link_mtu.min(mtu),
                _ => link_mtu,
            }
        })
    }

    /// Guests choose identifications on their own; behind one address they would collide (RFC
    /// 6864 section 5.3).
    fn set_identification(&mut self) {
        self.identification = self.identification.wrapping_add(1);
        self.scratch[4..6].copy_from_slice(&self.identification.to_be_bytes());
        ipv4::fill_checksum(&mut self.scratch, HEADER_LEN);
    }
}

/// Where fragments go.
#[derive(Clone, Copy)]
enum Side {
    World(Exit),
    Guest,
}

/// Translates one end of a packet, TTL and a complete L4 checksum included.
fn rewrite(
    bytes: &mut [u8],
    packet: &Packet<'_>,
    vnet: VirtioNetHdr,
    end: End,
    addr: slipgate_abi::Ip4,
    port: u16,
) {
    ipv4::set_address(bytes, end, addr);
    ipv4::decrement_ttl(bytes);
    let old = match end {
        End::Source => packet.ip.source,
        End::Destination => packet.ip.destination,
    };
    let port_at = match (packet.transport, end) {
        (Transport::Icmp(_), _) => 4,
        (_, End::Source) => 0,
        (_, End::Destination) => 2,
    };
    let (sum_at, has_pseudo) = match packet.transport {
        Transport::Tcp(_) => (16, true),
        Transport::Udp(_) => (6, true),
        Transport::Icmp(_) | Transport::Other => (2, false),
    };
    let (head, l4) = bytes.split_at_mut(packet.ip.header_len);
    let old_port = u16::from_be_bytes([l4[port_at], l4[port_at + 1]]);
    l4[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    let mut sum = [l4[sum_at], l4[sum_at + 1]];
    let is_udp = matches!(packet.transport, Transport::Udp(_));
    if vnet.needs_csum() {
        l4[sum_at..sum_at + 2].fill(0);
        let at = |from: usize| slipgate_abi::Ip4 {
            octets: [head[from], head[from + 1], head[from + 2], head[from + 3]],
        };
        let whole = Sum::default().pseudo(at(12), at(16), packet.ip.protocol, l4.len());
        sum = whole.bytes(l4).finish().to_be_bytes();
    } else if is_udp && sum == [0, 0] {
        return;
    } else {
        if has_pseudo {
            checksum::replace_address(&mut sum, old, addr);
        }
        checksum::replace16(&mut sum, old_port, port);
    }
    if is_udp && sum == [0, 0] {
        sum = [0xff, 0xff];
    }
    l4[sum_at..sum_at + 2].copy_from_slice(&sum);
}

/// The fragments of a packet without options.
struct Fragments<'a> {
    packet: &'a [u8],
    offset: usize,
    step: usize,
    buffer: Vec<u8>,
}

impl<'a> Fragments<'a> {
    fn new(packet: &'a [u8], mtu: u32) -> Self {
        let step = segment::fragment_payload(mtu) as usize;
        Self {
            packet,
            offset: 0,
            step,
            buffer: Vec::with_capacity(HEADER_LEN + step),
        }
    }

    fn next(&mut self) -> Option<&[u8]> {
        let payload = &self.packet[HEADER_LEN..];
        if self.offset >= payload.len() {
            return None;
        }
        let end = (self.offset + self.step).min(payload.len());
        let more = end < payload.len();
        self.buffer.clear();
        self.buffer.extend_from_slice(&self.packet[..HEADER_LEN]);
        self.buffer.extend_from_slice(&payload[self.offset..end]);
        let total = self.buffer.len() as u16;
        let word = (self.offset / 8) as u16 | if more { 0x2000 } else { 0 };
        self.buffer[2..4].copy_from_slice(&total.to_be_bytes());
        self.buffer[6..8].copy_from_slice(&word.to_be_bytes());
        ipv4::fill_checksum(&mut self.buffer, HEADER_LEN);
        self.offset = end;
        Some(&self.buffer)
    }
}
