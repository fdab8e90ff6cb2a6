//! Software GSO and checksums, as the kernel does both for a device without offloads.
use slipgate_abi::tcp::Flags;

use crate::{
    packet::{Ip, Version, checksum::Sum, ipv4},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

const PSH: u8 = 0x08;

/// Segments a frame of the engine. Returns its L3 packets with full checksums. The frame is not
/// GSO, or TCP without options of IP.
pub fn segments(offload: VirtioNetHdr, l3: &[u8]) -> Vec<Vec<u8>> {
    if offload.gso_type == VirtioNetHdr::GSO_NONE {
        let mut packet = l3.to_vec();
        if offload.needs_csum() {
            complete(offload, &mut packet);
        }
        return vec![packet];
    }
    let ip = Ip::parse(l3).unwrap();
    let version = ip.version();
    let gso_type = match version {
        Version::V4 => VirtioNetHdr::GSO_TCPV4,
        Version::V6 => VirtioNetHdr::GSO_TCPV6,
    };
    assert_eq!(offload.gso_type, gso_type);
    assert!(offload.needs_csum() && offload.csum_offset == 16);
    let ip_len = version.header_len();
    assert_eq!(usize::from(offload.csum_start), ETHERNET_LEN + ip_len);
    let (headers, payload) = l3.split_at(usize::from(offload.hdr_len) - ETHERNET_LEN);
    let field = ip_len + 16;
    let partial = pseudo_header(&ip, l3.len() - ip_len).folded();
    assert_eq!(
        l3[field..field + 2],
        partial.to_be_bytes(),
        "the pseudo-header's sum"
    );
    if version == Version::V4 {
        assert_eq!(usize::from(u16::from_be_bytes([l3[2], l3[3]])), l3.len());
        assert!(ipv4::Ipv4::parse(l3).is_ok_and(|ip| ip.checksum_is_right()));
    }
    let pieces = payload.chunks(offload.gso_size.into());
    let last = pieces.len() - 1;
    assert!(last > 0, "one segment needs no GSO");
    let segment = |(nth, piece): (usize, &[u8])| {
        let mut packet = [headers, piece].concat();
        let len = packet.len();
        match version {
            Version::V4 => {
                packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
                ipv4::fill_checksum(&mut packet, ip_len);
            }
            Version::V6 => {
                packet[4..6].copy_from_slice(&((len - ip_len) as u16).to_be_bytes());
            }
        }
        let tcp = &mut packet[ip_len..];
        let first = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        let sequence = first.wrapping_add(nth as u32 * u32::from(offload.gso_size));
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        if nth < last {
            tcp[13] &= !(Flags::FIN | PSH);
        }
        let partial = pseudo_header(&ip, tcp.len()).folded();
        tcp[16..18].copy_from_slice(&partial.to_be_bytes());
        complete(offload, &mut packet);
        packet
    };
    pieces.enumerate().map(segment).collect()
}

/// Completes a partial checksum, which is the pseudo-header's sum.
fn complete(offload: VirtioNetHdr, packet: &mut [u8]) {
    let l4 = usize::from(offload.csum_start) - ETHERNET_LEN;
    let field = l4 + usize::from(offload.csum_offset);
    let sum = Sum::default().bytes(&packet[l4..]).finish();
    packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Returns the TCP pseudo-header's sum (RFC 9293 section 3.1, RFC 8200 section 8.1).
fn pseudo_header(ip: &Ip<'_>, len: usize) -> Sum {
    Sum::default().pseudo(ip.source, ip.destination, 6, len)
}
