//! Joins TCP segments into GSO frames.
//!
//! A guest whose link has no offloads sends segments of its MSS. Each would cost a run of the programs
//! and a call of its socket. A run of segments that one GSO frame can represent is taken as that frame.
//! As in GRO, all but the last have the same length, and their headers differ only in sequence number,
//! length, checksums, and PSH or FIN of the last. So their options are equal: timestamps of the same
//! tick.
use slipgate_abi::{Protocol, segment::MAX_GSO_FRAME_LEN, tcp::Flags};

use crate::{
    packet::{checksum::Sum, ipv4},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Length of an IPv4 header without options, bytes; with a TCP header without options, and with one
/// that has all that there may be.
const IPV4_LEN: usize = 20;
const LEAST_HEADERS_LEN: usize = 40;
const MOST_HEADERS_LEN: usize = IPV4_LEN + 60;
/// First byte of an IPv4 header's flags with DF alone.
const DONT_FRAGMENT: u8 = 0x40;
/// Push flag (RFC 9293 section 3.1).
const PSH: u8 = 0x08;
/// Most L3 bytes in a frame that no device on the path segments.
const MAX_LEN: usize = MAX_GSO_FRAME_LEN as usize - 1 - ETHERNET_LEN;

/// Segments that one frame represents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Headers of the first.
    first: [u8; MOST_HEADERS_LEN],
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
        let tcp_len = first
            .get(32)
            .map_or(0, |offset| usize::from(offset >> 4) * 4);
        let headers_len = IPV4_LEN + tcp_len;
        let can_be_joined = headers_len >= LEAST_HEADERS_LEN
            && first.len() > headers_len
            && first[0] == 0x45
            && first[9] == Protocol::Tcp as u8
            && first[33] == Flags::ACK;
        let mut headers = [0; MOST_HEADERS_LEN];
        if can_be_joined {
            headers[..headers_len].copy_from_slice(&first[..headers_len]);
        }
        Self {
            first: headers,
            headers_len,
            segment_len: first.len().saturating_sub(headers_len),
            len: first.len(),
            flags: Flags::ACK,
            is_over: !can_be_joined,
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
        let payload = next.len().saturating_sub(self.headers_len);
        !self.is_over
            && (1..=self.segment_len).contains(&payload)
            && self.len + payload <= MAX_LEN
            // Version, header length, service; fragments, TTL, protocol; addresses and ports.
            && next[..2] == first[..2]
            // Of an atomic datagram it has no meaning (RFC 6864 section 4).
            && (next[4..6] == first[4..6] || first[6..8] == [DONT_FRAGMENT, 0])
            && next[6..10] == first[6..10]
            && next[12..24] == first[12..24]
            && sequence(next) == sequence(first).wrapping_add((self.len - self.headers_len) as u32)
            // Acknowledgement, data offset, window.
            && next[28..33] == first[28..33]
            && next[33] & !(PSH | Flags::FIN) == Flags::ACK
            && next[34..36] == first[34..36]
            // Options.
            && next[LEAST_HEADERS_LEN..self.headers_len]
                == first[LEAST_HEADERS_LEN..self.headers_len]
    }

    /// Adds a packet that continues the run.
    pub(crate) fn add(&mut self, next: &[u8]) {
        let payload = next.len() - self.headers_len;
        self.len += payload;
        self.flags = next[33];
        self.is_over = payload < self.segment_len || self.flags != Flags::ACK;
    }

    /// Writes the headers of the joined frame. The TCP checksum is left partial, for the device
    /// that segments the frame or the guest that receives it whole.
    pub(crate) fn finish(self, frame: &mut [u8]) -> VirtioNetHdr {
        frame[2..4].copy_from_slice(&(self.len as u16).to_be_bytes());
        ipv4::fill_checksum(frame, IPV4_LEN);
        frame[33] = self.flags;
        let segment_len = self.len - IPV4_LEN;
        let pseudo_header = Sum::default().bytes(&frame[12..20]);
        let lengths = [
            0,
            Protocol::Tcp as u8,
            (segment_len >> 8) as u8,
            segment_len as u8,
        ];
        let sum = pseudo_header.bytes(&lengths).folded();
        frame[36..38].copy_from_slice(&sum.to_be_bytes());
        VirtioNetHdr {
            flags: VirtioNetHdr::NEEDS_CSUM,
            gso_type: VirtioNetHdr::GSO_TCPV4,
            hdr_len: (ETHERNET_LEN + self.headers_len) as u16,
            gso_size: self.segment_len as u16,
            csum_start: (ETHERNET_LEN + IPV4_LEN) as u16,
            csum_offset: 16,
        }
    }
}

fn sequence(packet: &[u8]) -> u32 {
    u32::from_be_bytes([packet[24], packet[25], packet[26], packet[27]])
}

#[cfg(test)]
#[path = "gso_test.rs"]
mod tests;
