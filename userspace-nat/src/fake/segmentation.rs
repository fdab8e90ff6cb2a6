//! Software GSO, as the kernel performs it for a device that accepts no GSO frames.
use slipgate_abi::{Protocol, tcp::Flags};

use crate::{
    packet::{checksum::Sum, ipv4},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

const IPV4_LEN: usize = 20;
const PSH: u8 = 0x08;

/// Segments a frame of the engine. Returns its L3 packets with full checksums. The frame is not
/// GSO, or TCP over IPv4 without options.
pub fn segments(offload: VirtioNetHdr, l3: &[u8]) -> Vec<Vec<u8>> {
    if offload.gso_type == VirtioNetHdr::GSO_NONE {
        return vec![l3.to_vec()];
    }
    assert_eq!(offload.gso_type, VirtioNetHdr::GSO_TCPV4);
    assert!(offload.needs_csum() && offload.csum_offset == 16);
    assert_eq!(usize::from(offload.csum_start), ETHERNET_LEN + IPV4_LEN);
    let (headers, payload) = l3.split_at(usize::from(offload.hdr_len) - ETHERNET_LEN);
    let partial = Sum::default().bytes(&pseudo_header(l3)).folded();
    assert_eq!(l3[36..38], partial.to_be_bytes(), "the pseudo-header's sum");
    assert_eq!(usize::from(u16::from_be_bytes([l3[2], l3[3]])), l3.len());
    assert!(ipv4::Ipv4::parse(l3).is_ok_and(|ip| ip.checksum_is_right()));
    let pieces = payload.chunks(offload.gso_size.into());
    let last = pieces.len() - 1;
    assert!(last > 0, "one segment needs no GSO");
    let segment = |(nth, piece): (usize, &[u8])| {
        let mut packet = [headers, piece].concat();
        let len = packet.len() as u16;
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        ipv4::fill_checksum(&mut packet, IPV4_LEN);
        let first = u32::from_be_bytes([packet[24], packet[25], packet[26], packet[27]]);
        let sequence = first.wrapping_add(nth as u32 * u32::from(offload.gso_size));
        packet[24..28].copy_from_slice(&sequence.to_be_bytes());
        if nth < last {
            packet[33] &= !(Flags::FIN | PSH);
        }
        packet[36..38].fill(0);
        let sum = Sum::default().bytes(&pseudo_header(&packet));
        let sum = sum.bytes(&packet[IPV4_LEN..]).finish();
        packet[36..38].copy_from_slice(&sum.to_be_bytes());
        packet
    };
    pieces.enumerate().map(segment).collect()
}

/// Returns the TCP pseudo-header (RFC 9293 section 3.1).
fn pseudo_header(packet: &[u8]) -> [u8; 12] {
    let len = (packet.len() - IPV4_LEN) as u16;
    let mut header = [0; 12];
    header[..8].copy_from_slice(&packet[12..20]);
    header[9] = Protocol::Tcp as u8;
    header[10..].copy_from_slice(&len.to_be_bytes());
    header
}
