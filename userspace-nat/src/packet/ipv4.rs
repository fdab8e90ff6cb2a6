//! The IPv4 header (RFC 791).
use slipgate_abi::Ip4;

use super::{Malformed, checksum, ip::End};

/// Length of a header without options, bytes.
pub const HEADER_LEN: usize = 20;

/// An IPv4 header and the packet that it begins.
#[derive(Clone, Copy, Debug)]
pub struct Ipv4<'a> {
    /// The packet, truncated to the header's total length.
    pub bytes: &'a [u8],
    /// Header length with options, bytes.
    pub header_len: usize,
    /// Source address of the packet.
    pub source: Ip4,
    /// Destination address of the packet.
    pub destination: Ip4,
    /// IP protocol number of the payload.
    pub protocol: u8,
    /// Time to live, hops.
    pub ttl: u8,
    /// Identification of the datagram, for its fragments.
    pub identification: u16,
    /// Whether DF is set.
    pub dont_fragment: bool,
    /// Whether MF is set.
    pub more_fragments: bool,
    /// Offset of the fragment in its datagram, bytes.
    pub fragment_offset: usize,
}

impl<'a> Ipv4<'a> {
    /// Parses a header; bytes after the total length (Ethernet padding) are left out. The caller
    /// verifies the header's checksum ([`Ipv4::checksum_is_right`]): the kernel has done so for
    /// most packets.
    ///
    /// # Errors
    /// When the header or its lengths are invalid.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let header = Self::parse_truncated(bytes)?;
        let total = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
        if total < header.header_len || total > bytes.len() {
            return Err(Malformed);
        }
        Ok(Self {
            bytes: &bytes[..total],
            ..header
        })
    }

    /// Parses a header whose packet may be truncated, as in the quote of an ICMP error.
    ///
    /// # Errors
    /// When the header is invalid or truncated.
    pub fn parse_truncated(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let h: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(Malformed)?;
        let header_len = usize::from(h[0] & 0x0f) * 4;
        if h[0] >> 4 != 4 || header_len < HEADER_LEN || header_len > bytes.len() {
            return Err(Malformed);
        }
        let fragment = u16::from_be_bytes([h[6], h[7]]);
        Ok(Self {
            bytes,
            header_len,
            source: Ip4 {
                octets: [h[12], h[13], h[14], h[15]],
            },
            destination: Ip4 {
                octets: [h[16], h[17], h[18], h[19]],
            },
            protocol: h[9],
            ttl: h[8],
            identification: u16::from_be_bytes([h[4], h[5]]),
            dont_fragment: fragment & 0x4000 != 0,
            more_fragments: fragment & 0x2000 != 0,
            fragment_offset: usize::from(fragment & 0x1fff) * 8,
        })
    }

    /// Whether the packet is a fragment.
    pub fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// Whether the header has options.
    pub fn has_options(&self) -> bool {
        self.header_len > HEADER_LEN
    }

    /// Whether the header's checksum is correct.
    pub fn checksum_is_right(&self) -> bool {
        checksum::of(&self.bytes[..self.header_len]) == 0
    }

    /// Returns the bytes after the header.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.header_len..]
    }
}

/// Rewrites an address in a header and updates the header's checksum. `header` must have been
/// parsed.
pub fn set_address(header: &mut [u8], end: End, new: Ip4) {
    let at = match end {
        End::Source => 12,
        End::Destination => 16,
    };
    let Some(h) = header.first_chunk_mut::<HEADER_LEN>() else {
        return;
    };
    let old = Ip4 {
        octets: [h[at], h[at + 1], h[at + 2], h[at + 3]],
    };
    h[at..at + 4].copy_from_slice(&new.octets);
    let mut field = [h[10], h[11]];
    checksum::replace_address(&mut field, old, new);
    h[10..12].copy_from_slice(&field);
}

/// Decrements the TTL and updates the checksum. The caller makes sure that the TTL is not 0.
pub fn decrement_ttl(header: &mut [u8]) {
    let Some(h) = header.first_chunk_mut::<HEADER_LEN>() else {
        return;
    };
    let old = u16::from_be_bytes([h[8], h[9]]);
    h[8] = h[8].saturating_sub(1);
    let mut field = [h[10], h[11]];
    checksum::replace16(&mut field, old, u16::from_be_bytes([h[8], h[9]]));
    h[10..12].copy_from_slice(&field);
}

/// Recomputes the header's checksum. `header` must have been parsed.
pub fn fill_checksum(header: &mut [u8], header_len: usize) {
    header[10..12].fill(0);
    let sum = checksum::of(&header[..header_len]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}
