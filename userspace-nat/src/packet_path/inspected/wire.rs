//! The wire of an inspected flow: frames of a session's segments, and whether a server would accept
//! what a guest sends.
use std::net::IpAddr;

use slipgate_model::FlowTuple;

use crate::{
    inspection::tcp::{Segment, Wire, build_header},
    packet::{Packet, Transport, Version, checksum::Sum},
    port::{ETHERNET_LEN, Outbox, VirtioNetHdr, ethertype_of},
    state::Outgoing,
    vm::VmNet,
};

/// The two ends of an inspected connection, to which its session sends segments.
pub(super) struct Ends<'a> {
    out: &'a mut Outbox,
    packet: &'a mut Vec<u8>,
    vm: &'a VmNet,
    guest: (IpAddr, u16),
    server: (IpAddr, u16),
    sent_to_server: usize,
}

impl<'a> Ends<'a> {
    pub(super) fn new(vm: &'a VmNet, guest: &FlowTuple, out: &'a mut Outgoing) -> Self {
        Self {
            out: &mut out.queue,
            packet: &mut out.packet,
            vm,
            guest: (guest.local, guest.local_port),
            server: (guest.remote, guest.remote_port),
            sent_to_server: 0,
        }
    }

    fn push_to_server(&mut self) {
        let vnet = VirtioNetHdr::default();
        let _ = self.out.as_guest(self.vm, vnet, self.packet);
        self.sent_to_server += 1;
    }
}

// A full outbox loses a segment as a link would; the timers and the guest retransmit.
impl Wire for Ends<'_> {
    fn to_server(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.guest, self.server);
        self.push_to_server();
    }

    fn syn_to_server(&mut self, header: &[u8]) {
        build_header(self.packet, self.guest.0, self.server.0, header);
        self.push_to_server();
    }

    fn to_guest(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.server, self.guest);
        let vnet = VirtioNetHdr::default();
        let ethertype = ethertype_of(self.packet);
        let _ = self.out.to_guest(self.vm, ethertype, vnet, self.packet);
    }

    fn sent_to_server(&self) -> usize {
        self.sent_to_server
    }
}

/// Whether a packet's checksum is correct, or for a partial checksum, whether it holds the
/// pseudo-header's sum and is where the completing device expects it; and whether a UDP header's
/// length is that of the packet.
pub(super) fn is_intact(packet: &Packet<'_>, vnet: VirtioNetHdr) -> bool {
    let l4 = packet.ip.payload();
    let is_gso = vnet.gso_type != VirtioNetHdr::GSO_NONE;
    let checksum_at = match packet.transport {
        Transport::Tcp(_) => 16,
        Transport::Udp(_) => {
            let len = l4.get(4..6).map(|f| u16::from_be_bytes([f[0], f[1]]));
            if !is_gso && len.map(usize::from) != Some(l4.len()) {
                return false;
            }
            let may_be_without = packet.ip.version() == Version::V4;
            if may_be_without && l4.get(6..8) == Some(&[0, 0]) && !vnet.needs_csum() {
                // RFC 768: none was made. In IPv6 there has to be one (RFC 8200 section 8.1).
                return true;
            }
            6
        }
        Transport::Icmp(_) | Transport::Other => return true,
    };
    let (source, destination) = (packet.ip.source, packet.ip.destination);
    let pseudo = Sum::default().pseudo(source, destination, packet.ip.protocol, l4.len());
    if !vnet.needs_csum() {
        return pseudo.bytes(l4).finish() == 0;
    }
    let place = usize::from(vnet.csum_start) == ETHERNET_LEN + packet.ip.header_len
        && usize::from(vnet.csum_offset) == checksum_at;
    let Some(field) = l4.get(checksum_at..checksum_at + 2) else {
        return false;
    };
    // All ones and zero are the same number in one's complement.
    let field = u16::from_be_bytes([field[0], field[1]]);
    place && field % 0xffff == pseudo.folded() % 0xffff
}
