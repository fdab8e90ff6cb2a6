//! Joins TCP segments into GSO frames.
//!
//! A guest whose link has no offloads sends segments of its MSS. Each would cost a run of the programs
//! and a call of its socket. A run of segments that one GSO frame can represent is taken as that frame.
//! As in GRO, all but the last have the same length, and their headers differ only in sequence number,
//! length, checksums, and PSH or FIN of the last. So their options are equal: timestamps of the same
//! tick.
use std::ops::Range;

use slipgate_abi::{Protocol, segment::MAX_GSO_FRAME_LEN, tcp::Flags};

use crate::{
    packet::{Version, checksum::Sum, ipv4},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Length of a TCP header without options, bytes, and of one with as many as there may be.
const LEAST_TCP_LEN: usize = 20;
const MOST_TCP_LEN: usize = 60;
/// Length of an IPv6 header, the longer one without options or extension headers, bytes.
const MOST_IP_LEN: usize = 40;
/// First byte of an IPv4 header's flags with DF alone.
const DONT_FRAGMENT: u8 = 0x40;
/// Push flag (RFC 9293 section 3.1).
const PSH: u8 = 0x08;
/// Most L3 bytes in a frame that no device on the path segments.
const MAX_LEN: usize = MAX_GSO_FRAME_LEN as usize - 1 - ETHERNET_LEN;

/// Segments that one frame represents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    version: Version,
    /// Headers of the first.
    first: [u8; MOST_IP_LEN + MOST_TCP_LEN],
    headers_len: usize,
    /// Payload length of each segment but the last, bytes.
    segment_len: usize,
    len: usize,
    flags: u8,
    /// Whether no segment may follow the last.
    is_over: bool,
}

impl Run {
    /// Begins with an L3 packet, of whatever protocol.
    pub(crate) fn begin(first: &[u8]) -> Self {
        let shape = Shape::of(first).filter(|shape| {
            first.len() > shape.headers_len && first[shape.ip_len() + 13] == Flags::ACK
        });
        let mut headers = [0; MOST_IP_LEN + MOST_TCP_LEN];
        let headers_len = shape.map_or(0, |shape| shape.headers_len);
        headers[..headers_len].copy_from_slice(&first[..headers_len]);
        Self {
            version: shape.map_or(Version::V4, |shape| shape.version),
            first: headers,
            headers_len,
            segment_len: first.len() - headers_len,
            len: first.len(),
            flags: Flags::ACK,
            is_over: shape.is_none(),
        }
    }

    /// Length of the headers of each segment, bytes.
    pub(crate) fn headers_len(&self) -> usize {
        self.headers_len
    }

    /// Payload length of each segment but the last, bytes.
    pub(crate) fn segment_len(&self) -> usize {
        self.segment_len
    }

    /// Whether an L3 packet continues the run.
    pub(crate) fn takes(&self, next: &[u8]) -> bool {
        let first = &self.first;
        let tcp = self.version.header_len();
        let payload = next.len().saturating_sub(self.headers_len);
        let same = |range: Range<usize>| next[range.clone()] == first[range];
        !self.is_over
            && (1..=self.segment_len).contains(&payload)
            && self.len + payload <= MAX_LEN
            && match self.version {
                // Version, header length, service; fragments, TTL, protocol; addresses.
                Version::V4 => {
                    same(0..2)
                        // Of an atomic datagram it has no meaning (RFC 6864 section 4).
                        && (same(4..6) || first[6..8] == [DONT_FRAGMENT, 0])
                        && same(6..10)
                        && same(12..20)
                }
                // Version, traffic class, flow label; next header, hop limit, addresses.
                Version::V6 => same(0..4) && same(6..40),
            }
            // Ports.
            && same(tcp..tcp + 4)
            && sequence(next, tcp)
                == sequence(first, tcp).wrapping_add((self.len - self.headers_len) as u32)
            // Acknowledgement, data offset.
            && same(tcp + 8..tcp + 13)
            && next[tcp + 13] & !(PSH | Flags::FIN) == Flags::ACK
            // Window, options.
            && same(tcp + 14..tcp + 16)
            && same(tcp + LEAST_TCP_LEN..self.headers_len)
    }

    /// Adds a packet that continues the run.
    pub(crate) fn add(&mut self, next: &[u8]) {
        let payload = next.len() - self.headers_len;
        self.len += payload;
        self.flags = next[self.version.header_len() + 13];
        self.is_over = payload < self.segment_len || self.flags != Flags::ACK;
    }

    /// Writes the headers of the joined frame. The TCP checksum is left partial, for the device
    /// that segments the frame or the guest that receives it whole.
    pub(crate) fn finish(self, frame: &mut [u8]) -> VirtioNetHdr {
        let ip_len = self.version.header_len();
        let tcp_len = self.len - ip_len;
        let (gso_type, addresses) = match self.version {
            Version::V4 => {
                frame[2..4].copy_from_slice(&(self.len as u16).to_be_bytes());
                ipv4::fill_checksum(frame, ip_len);
                (VirtioNetHdr::GSO_TCPV4, 12..20)
            }
            Version::V6 => {
                frame[4..6].copy_from_slice(&(tcp_len as u16).to_be_bytes());
                (VirtioNetHdr::GSO_TCPV6, 8..40)
            }
        };
        frame[ip_len + 13] = self.flags;
        let lengths = [0, Protocol::Tcp as u8, (tcp_len >> 8) as u8, tcp_len as u8];
        let pseudo_header = Sum::default().bytes(&frame[addresses]).bytes(&lengths);
        frame[ip_len + 16..ip_len + 18].copy_from_slice(&pseudo_header.folded().to_be_bytes());
        VirtioNetHdr {
            flags: VirtioNetHdr::NEEDS_CSUM,
            gso_type,
            hdr_len: (ETHERNET_LEN + self.headers_len) as u16,
            gso_size: self.segment_len as u16,
            csum_start: (ETHERNET_LEN + ip_len) as u16,
            csum_offset: 16,
        }
    }
}

/// Headers of a TCP segment whose IP header has no options or extension headers.
#[derive(Clone, Copy)]
struct Shape {
    version: Version,
    /// Length of both headers, bytes. The packet is at least as long.
    headers_len: usize,
}

impl Shape {
    /// Returns the shape of an L3 packet; `None` for any other packet.
    fn of(packet: &[u8]) -> Option<Self> {
        let (version, protocol) = match packet.first()? {
            0x45 => (Version::V4, *packet.get(9)?),
            first if first >> 4 == 6 => (Version::V6, *packet.get(6)?),
            _ => return None,
        };
        let offset = *packet.get(version.header_len() + 12)?;
        let tcp_len = usize::from(offset >> 4) * 4;
        let headers_len = version.header_len() + tcp_len;
        let is_whole = tcp_len >= LEAST_TCP_LEN && packet.len() >= headers_len;
        (protocol == Protocol::Tcp as u8 && is_whole).then_some(Self {
            version,
            headers_len,
        })
    }

    fn ip_len(self) -> usize {
        self.version.header_len()
    }
}

/// Sequence number of a packet whose TCP header begins at `tcp`.
fn sequence(packet: &[u8], tcp: usize) -> u32 {
    u32::from_be_bytes([
        packet[tcp + 4],
        packet[tcp + 5],
        packet[tcp + 6],
        packet[tcp + 7],
    ])
}

#[cfg(test)]
#[path = "gso_test.rs"]
mod tests;
