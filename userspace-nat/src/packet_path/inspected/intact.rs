//! Whether a server would take a packet in.
use crate::{
    packet::{Packet, Transport, checksum::Sum, ipv4},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Whether a packet's checksum is right, or what is there of a partial one is and it lies where
/// whoever completes it looks for it; and whether a UDP header speaks of the whole packet.
pub(crate) fn is_intact(packet: &Packet<'_>, vnet: VirtioNetHdr) -> bool {
    let l4 = packet.ip.payload();
    let is_gso = vnet.gso_type != VirtioNetHdr::GSO_NONE;
    let checksum_at = match packet.transport {
        Transport::Tcp(_) => 16,
        Transport::Udp(_) => {
            let len = l4.get(4..6).map(|f| u16::from_be_bytes([f[0], f[1]]));
            if !is_gso && len.map(usize::from) != Some(l4.len()) {
                return false;
            }
            if l4.get(6..8) == Some(&[0, 0]) && !vnet.needs_csum() {
                // RFC 768: none was made.
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
    let place = usize::from(vnet.csum_start) == ETHERNET_LEN + ipv4::HEADER_LEN
        && usize::from(vnet.csum_offset) == checksum_at;
    let Some(field) = l4.get(checksum_at..checksum_at + 2) else {
        return false;
    };
    // All ones and zero are the same number.
    let field = u16::from_be_bytes([field[0], field[1]]);
    place && field % 0xffff == pseudo.folded() % 0xffff
}
