//! The IPv6 header (RFC 8200 section 3).
use std::net::Ipv6Addr;

use super::{Malformed, ip::End};

/// Length of the header, bytes.
pub const HEADER_LEN: usize = 40;

/// Next header of a packet with a fragment header (RFC 8200 section 4.5).
pub const FRAGMENT: u8 = 44;
/// Length of a fragment header, bytes.
pub const FRAGMENT_HEADER_LEN: usize = 8;
/// Next headers of the extension headers that slipgate does not pass: hop-by-hop options, routing,
/// destination options (RFC 8200 section 4); authentication (RFC 4302), ESP (RFC 4303); mobility
/// (RFC 6275), HIP (RFC 7401) and Shim6 (RFC 5533).
pub const EXTENSIONS: [u8; 8] = [0, 43, 60, 51, 50, 135, 139, 140];

/// An IPv6 header and the packet that it begins.
#[derive(Clone, Copy, Debug)]
pub struct Ipv6<'a> {
    /// The packet, truncated to the header's payload length.
    pub bytes: &'a [u8],
    /// Source address of the packet.
    pub source: Ipv6Addr,
    /// Destination address of the packet.
    pub destination: Ipv6Addr,
    /// Protocol number of what follows the header: a transport protocol or an extension header.
    pub next_header: u8,
    /// Hops that the packet may still take.
    pub hop_limit: u8,
}

impl<'a> Ipv6<'a> {
    /// Parses a header; bytes after the payload (Ethernet padding) are left out. Jumbograms (RFC
    /// 2675) are not packets of any link of ours; a GSO frame longer than 64 KiB has no length in
    /// its header either, and no device that slipgate attaches to is told to make one.
    ///
    /// # Errors
    /// When the header or its length is invalid.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let header = Self::parse_truncated(bytes)?;
        let payload = usize::from(u16::from_be_bytes([bytes[4], bytes[5]]));
        let packet = bytes.get(..HEADER_LEN + payload).ok_or(Malformed)?;
        Ok(Self {
            bytes: packet,
            ..header
        })
    }

    /// Parses a header whose packet may be truncated, as in the quote of an ICMPv6 error.
    ///
    /// # Errors
    /// When the header is invalid or truncated.
    pub fn parse_truncated(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let h: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(Malformed)?;
        if h[0] >> 4 != 6 {
            return Err(Malformed);
        }
        let addr = |at: usize| {
            let octets: Option<&[u8; 16]> = h[at..].first_chunk();
            octets.copied().map(Ipv6Addr::from).ok_or(Malformed)
        };
        Ok(Self {
            bytes,
            source: addr(8)?,
            destination: addr(24)?,
            next_header: h[6],
            hop_limit: h[7],
        })
    }

    /// Returns the bytes after the header.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[HEADER_LEN..]
    }

    /// Whether a fragment header follows the header.
    pub fn is_fragment(&self) -> bool {
        self.next_header == FRAGMENT
    }

    /// Whether an extension header follows that is not passed.
    pub fn has_extension(&self) -> bool {
        EXTENSIONS.contains(&self.next_header)
    }
}

/// Rewrites an address in a header, which has no checksum. `header` must have been parsed.
pub fn set_address(header: &mut [u8], end: End, new: Ipv6Addr) {
    let at = match end {
        End::Source => 8,
        End::Destination => 24,
    };
    if let Some(field) = header.get_mut(at..at + 16) {
        field.copy_from_slice(&new.octets());
    }
}

/// Decrements the hop limit. The caller makes sure that it is not 0.
pub fn decrement_hop_limit(header: &mut [u8]) {
    if let Some(limit) = header.get_mut(7) {
        *limit = limit.saturating_sub(1);
    }
}
