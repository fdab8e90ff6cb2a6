//! Segments as the state machine sees them, and their form in a frame.
use std::net::SocketAddr;

use slipgate_abi::tcp::Flags;

use super::options::{Options, SackBlocks, SynOptions, Timestamps, Written};
use crate::{
    packet::{
        Version, build,
        checksum::Sum,
        transport::{TCP_HEADER_LEN, Tcp},
    },
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Urgent flag (RFC 9293 section 3.1).
pub(super) const URG: u8 = 0x20;
/// Push flag (RFC 9293 section 3.1).
pub(super) const PSH: u8 = 0x08;

/// Returns the length of an IP header and a TCP header, both without options, bytes.
pub const fn headers_len(version: Version) -> usize {
    version.header_len() + TCP_HEADER_LEN
}

/// Returns the most payload in one frame: the packet's length has 16 bits, and so has the whole frame's
/// in some devices.
pub const fn most_payload(version: Version) -> u32 {
    65_535 - (headers_len(version) + ETHERNET_LEN) as u32
}

/// Returns the MSS that is announced to guests, bytes: frames to the engine may have any length.
const fn our_mss(version: Version) -> u16 {
    65_535 - headers_len(version) as u16
}

/// A segment of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Segment {
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// Acknowledgement number, if the flag ACK is set.
    pub acknowledgement: u32,
    /// Flags of the segment.
    pub flags: u8,
    /// The window field, unscaled.
    pub window: u16,
    /// Length of the payload, bytes.
    pub payload_len: u32,
    /// Options, of a SYN.
    pub options: SynOptions,
    /// Timestamps, if it has them.
    pub timestamps: Option<Timestamps>,
    /// What the guest has received behind a gap.
    pub sack: SackBlocks,
}

impl Segment {
    /// Reads a segment. `header`: the bytes that `tcp` was parsed from.
    pub fn read(tcp: &Tcp, header: &[u8]) -> Self {
        let options = Options::read(tcp, header);
        Self {
            sequence: tcp.sequence,
            acknowledgement: tcp.acknowledgement,
            flags: tcp.flags,
            window: tcp.window,
            payload_len: tcp.payload_len as u32,
            options: options.syn,
            timestamps: options.timestamps,
            sack: options.sack,
        }
    }

    /// Whether all of `flags` are set.
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }
}

/// Header of a segment to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// Number of the next byte that is expected of the guest.
    pub acknowledgement: u32,
    /// Flag bits, as in the header.
    pub flags: u8,
    /// The window field as it is on the wire.
    pub window: u16,
    /// Options, of a SYN: MSS, and window scale if the guest offered one.
    pub window_scale: Option<Option<u8>>,
    /// Whether selective acknowledgements are permitted, of a SYN.
    pub sack_permitted: bool,
    /// Timestamps, if both sides use them.
    pub timestamps: Option<Timestamps>,
    /// What was received behind a gap, as far as there is room.
    pub sack: SackBlocks,
}

impl Header {
    /// Length of the header with that of IP, bytes.
    pub fn headers_len(&self, version: Version) -> usize {
        headers_len(version) + self.options(version).len()
    }

    fn options(&self, version: Version) -> Written<'_> {
        Written {
            syn: self.window_scale.map(|scale| (our_mss(version), scale)),
            sack_permitted: self.sack_permitted,
            timestamps: self.timestamps,
            sack: &self.sack,
        }
    }
}

/// Returns the RST that answers a segment of no connection (RFC 9293 section 3.10.7.1); none answers
/// an RST.
pub fn reset_for(segment: &Segment) -> Option<Header> {
    if segment.has(Flags::RST) {
        return None;
    }
    let reset = Header {
        sequence: segment.acknowledgement,
        acknowledgement: 0,
        flags: Flags::RST,
        ..Header::default()
    };
    if segment.has(Flags::ACK) {
        return Some(reset);
    }
    let occupies = segment.payload_len
        + u32::from(segment.has(Flags::SYN))
        + u32::from(segment.has(Flags::FIN));
    Some(Header {
        sequence: 0,
        acknowledgement: segment.sequence.wrapping_add(occupies),
        flags: Flags::RST | Flags::ACK,
        ..reset
    })
}

/// Writes IP and TCP headers before a payload. `l3` begins with room for the headers
/// ([`Header::headers_len`]) and ends with the payload. The checksum is left partial, and a payload longer
/// than `mss` is to be segmented: returns the offload header that says so. Both addresses are of one
/// family.
pub fn write_headers(
    l3: &mut [u8],
    source: SocketAddr,
    destination: SocketAddr,
    header: &Header,
    mss: u16,
) -> VirtioNetHdr {
    let version = Version::of(source.ip());
    let payload_len = l3.len() - header.headers_len(version);
    let (ip, tcp) = l3.split_at_mut(version.header_len());
    let tcp_len = tcp.len();
    let ends = (source.ip(), destination.ip());
    let is_written = build::write_header(ip, ends, 6, None, tcp_len);
    debug_assert!(is_written, "the addresses are of two families");
    let header_len = header.headers_len(version) - version.header_len();
    tcp[..2].copy_from_slice(&source.port().to_be_bytes());
    tcp[2..4].copy_from_slice(&destination.port().to_be_bytes());
    tcp[4..8].copy_from_slice(&header.sequence.to_be_bytes());
    tcp[8..12].copy_from_slice(&header.acknowledgement.to_be_bytes());
    tcp[12] = (header_len as u8 / 4) << 4;
    tcp[13] = header.flags;
    tcp[14..16].copy_from_slice(&header.window.to_be_bytes());
    tcp[18..20].fill(0);
    header
        .options(version)
        .write(&mut tcp[TCP_HEADER_LEN..header_len]);
    let sum = Sum::default().pseudo(source.ip(), destination.ip(), 6, tcp_len);
    tcp[16..18].copy_from_slice(&sum.folded().to_be_bytes());
    let is_long = payload_len > usize::from(mss);
    VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: match (is_long, version) {
            (false, _) => VirtioNetHdr::GSO_NONE,
            (true, Version::V4) => VirtioNetHdr::GSO_TCPV4,
            (true, Version::V6) => VirtioNetHdr::GSO_TCPV6,
        },
        hdr_len: (ETHERNET_LEN + header.headers_len(version)) as u16,
        gso_size: if is_long { mss } else { 0 },
        csum_start: (ETHERNET_LEN + version.header_len()) as u16,
        csum_offset: 16,
    }
}
