//! The transport headers, which identify a flow.
use slipgate_abi::tcp::{self, Flags};

use super::{Malformed, Version, icmp};

/// Length of a TCP header without options, bytes.
pub const TCP_HEADER_LEN: usize = 20;
/// Length of a UDP header, bytes.
pub const UDP_HEADER_LEN: usize = 8;

/// A parsed transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// Header of a TCP segment.
    Tcp(Tcp),
    /// Header of a UDP datagram.
    Udp(Udp),
    /// Header of an ICMP or ICMPv6 message.
    Icmp(icmp::Icmp),
    /// Another protocol, which has no flows.
    Other,
}

/// A TCP header (RFC 9293 section 3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tcp {
    /// Source port, host byte order.
    pub source: u16,
    /// Destination port, host byte order.
    pub destination: u16,
    /// Sequence number, host byte order.
    pub sequence: u32,
    /// Acknowledgement number, host byte order.
    pub acknowledgement: u32,
    /// The flag octet, [`Flags`].
    pub flags: u8,
    /// The window field, unscaled.
    pub window: u16,
    /// Header length with options, bytes.
    pub header_len: usize,
    /// Length of the payload, bytes.
    pub payload_len: usize,
}

impl Tcp {
    /// Whether all of `flags` are set.
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// Whether the segment is a SYN that opens a connection: without ACK, RST or FIN.
    pub fn is_opening_syn(&self) -> bool {
        Flags::open(self.flags)
    }

    /// Returns the segment in the form of the rules that programs and engine share.
    pub fn segment(&self) -> tcp::Segment {
        tcp::Segment::new(
            self.flags,
            self.sequence,
            self.payload_len as u32,
            self.acknowledgement,
            self.window,
        )
    }

    /// Returns the sequence numbers that the segment occupies: payload, SYN and FIN.
    pub fn sequence_len(&self) -> u32 {
        self.payload_len as u32 + u32::from(self.has(Flags::SYN)) + u32::from(self.has(Flags::FIN))
    }
}

/// A UDP header (RFC 768).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Udp {
    /// Source port, host byte order.
    pub source: u16,
    /// Destination port, host byte order.
    pub destination: u16,
    /// Length of the payload, bytes.
    pub payload_len: usize,
}

impl Transport {
    /// Parses the header of this IP protocol. ICMP in IPv6, and ICMPv6 in IPv4, are other protocols.
    ///
    /// # Errors
    /// When the header is invalid or truncated.
    pub fn parse(version: Version, protocol: u8, l4: &[u8]) -> Result<Self, Malformed> {
        Ok(match protocol {
            6 => Self::Tcp(parse_tcp(l4)?),
            17 => Self::Udp(parse_udp(l4)?),
            icmp if icmp == version.icmp() => Self::Icmp(icmp::Icmp::parse(version, l4)?),
            _ => Self::Other,
        })
    }

    /// Returns source and destination port; for an ICMP echo its id twice; `None` for others.
    pub fn ports(&self) -> Option<(u16, u16)> {
        match self {
            Self::Tcp(h) => Some((h.source, h.destination)),
            Self::Udp(h) => Some((h.source, h.destination)),
            Self::Icmp(h) => h.is_echo().then_some((h.id, h.id)),
            Self::Other => None,
        }
    }

    /// Returns the length of the header, bytes.
    pub fn header_len(&self) -> usize {
        match self {
            Self::Tcp(h) => h.header_len,
            Self::Udp(_) => UDP_HEADER_LEN,
            Self::Icmp(_) => icmp::HEADER_LEN,
            Self::Other => 0,
        }
    }
}

fn parse_tcp(l4: &[u8]) -> Result<Tcp, Malformed> {
    let h: &[u8; TCP_HEADER_LEN] = l4.first_chunk().ok_or(Malformed)?;
    let header_len = usize::from(h[12] >> 4) * 4;
    if header_len < TCP_HEADER_LEN || header_len > l4.len() {
        return Err(Malformed);
    }
    Ok(Tcp {
        source: u16::from_be_bytes([h[0], h[1]]),
        destination: u16::from_be_bytes([h[2], h[3]]),
        sequence: u32::from_be_bytes([h[4], h[5], h[6], h[7]]),
        acknowledgement: u32::from_be_bytes([h[8], h[9], h[10], h[11]]),
        flags: h[13],
        window: u16::from_be_bytes([h[14], h[15]]),
        header_len,
        payload_len: l4.len() - header_len,
    })
}

fn parse_udp(l4: &[u8]) -> Result<Udp, Malformed> {
    let h: &[u8; UDP_HEADER_LEN] = l4.first_chunk().ok_or(Malformed)?;
    let len = usize::from(u16::from_be_bytes([h[4], h[5]]));
    // In a GSO frame the field is the whole frame's length, or 0 past 64 KiB; otherwise it must
    // fit.
    if len != 0 && (len < UDP_HEADER_LEN || len > l4.len()) {
        return Err(Malformed);
    }
    Ok(Udp {
        source: u16::from_be_bytes([h[0], h[1]]),
        destination: u16::from_be_bytes([h[2], h[3]]),
        payload_len: l4.len() - UDP_HEADER_LEN,
    })
}

/// Returns the options of a TCP header as (kind, offset in the header, length). Ends at the first
/// malformed option.
pub fn tcp_options(header: &[u8]) -> impl Iterator<Item = (u8, usize, usize)> {
    let mut at = TCP_HEADER_LEN;
    std::iter::from_fn(move || {
        loop {
            match *header.get(at)? {
                0 => return None,
                1 => at += 1,
                kind => {
                    let len = usize::from(*header.get(at + 1)?);
                    if len < 2 || at + len > header.len() {
                        return None;
                    }
                    let found = (kind, at, len);
                    at += len;
                    return Some(found);
                }
            }
        }
    })
}

/// Option kind of the maximum segment size (RFC 9293 section 3.2).
pub const OPTION_MSS: u8 = 2;
/// Option kind of timestamps (RFC 7323 section 3).
pub const OPTION_TIMESTAMPS: u8 = 8;
