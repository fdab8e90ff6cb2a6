//! Fragments of both families: parsing, and cutting a packet into them (RFC 791 section 3.2, RFC 8200
//! section 4.5).
use std::net::IpAddr;

use slipgate_abi::segment;

use super::{
    Ip, Ipv4, Ipv6, Malformed, Packet, Transport, Version,
    ip::version_of,
    ipv4,
    ipv6::{self, FRAGMENT_HEADER_LEN},
};

/// Flag of IPv4's field of the fragment offset: more fragments follow.
const MORE: u16 = 0x2000;
/// The same in IPv6's fragment header.
const MORE6: u16 = 1;

/// A fragment of a datagram.
#[derive(Clone, Copy, Debug)]
pub struct Fragment<'a> {
    /// The packet, truncated to the length that its header says.
    pub packet: &'a [u8],
    /// Source address of the datagram.
    pub source: IpAddr,
    /// Destination address of the datagram.
    pub destination: IpAddr,
    /// Identification of the datagram among those of its addresses.
    pub identification: u32,
    /// Number of the datagram's protocol. In IPv6, that of the first fragment is the datagram's.
    pub protocol: u8,
    /// Offset of the data in the datagram's, bytes.
    pub begin: usize,
    /// Whether more fragments follow.
    pub has_more: bool,
    /// The part of the datagram's data.
    pub data: &'a [u8],
}

impl<'a> Fragment<'a> {
    /// Parses a fragment.
    ///
    /// # Errors
    /// When the headers are invalid, the packet is no fragment, or its IPv4 header has options.
    pub fn parse(l3: &'a [u8]) -> Result<Self, Malformed> {
        match version_of(l3).ok_or(Malformed)? {
            Version::V4 => {
                let ip = Ipv4::parse(l3)?;
                if !ip.is_fragment() || ip.has_options() {
                    return Err(Malformed);
                }
                Ok(Self {
                    packet: ip.bytes,
                    source: ip.source.into(),
                    destination: ip.destination.into(),
                    identification: ip.identification.into(),
                    protocol: ip.protocol,
                    begin: ip.fragment_offset,
                    has_more: ip.more_fragments,
                    data: ip.payload(),
                })
            }
            Version::V6 => {
                let ip = Ipv6::parse(l3)?;
                let (header, data) = ip.payload().split_first_chunk().ok_or(Malformed)?;
                if !ip.is_fragment() {
                    return Err(Malformed);
                }
                let h: &[u8; FRAGMENT_HEADER_LEN] = header;
                let field = u16::from_be_bytes([h[2], h[3]]);
                Ok(Self {
                    packet: ip.bytes,
                    source: ip.source.into(),
                    destination: ip.destination.into(),
                    identification: u32::from_be_bytes([h[4], h[5], h[6], h[7]]),
                    protocol: h[0],
                    begin: usize::from(field & !7),
                    has_more: field & MORE6 != 0,
                    data,
                })
            }
        }
    }

    /// Returns the family of the datagram.
    pub fn version(&self) -> Version {
        Version::of(self.source)
    }

    /// Whether the fragment is the whole datagram, which is then processed by itself (RFC 6946).
    /// IPv4 has no such fragments.
    pub fn is_atomic(&self) -> bool {
        self.begin == 0 && !self.has_more
    }

    /// Returns the packet for an ICMP error about it. Of a first fragment the transport header is
    /// parsed, if all of it is there.
    pub fn as_packet(&self) -> Option<Packet<'a>> {
        let transport = match self.begin {
            0 => Transport::parse(self.version(), self.protocol, self.data).ok(),
            _ => None,
        };
        Some(Packet {
            ip: Ip::parse(self.packet).ok()?,
            transport: transport.unwrap_or(Transport::Other),
        })
    }
}

/// Iterator over the fragments of a packet without options or extension headers; the packet itself if
/// it is no longer than `most`.
#[derive(Debug)]
pub struct Fragments<'a> {
    packet: &'a [u8],
    version: Version,
    identification: u32,
    offset: usize,
    step: usize,
    buffer: Vec<u8>,
}

impl<'a> Fragments<'a> {
    /// Prepares the fragments of a packet, of at most `most` bytes each. An IPv4 packet has its
    /// identification in its header, an IPv6 packet gets this one.
    pub fn new(packet: &'a [u8], most: u32, identification: u32) -> Self {
        let version = version_of(packet).unwrap_or(Version::V4);
        // What is no larger than that is left whole.
        let step = match version {
            _ if packet.len() <= most as usize => u32::MAX,
            Version::V4 => segment::fragment_payload(most),
            Version::V6 => segment::fragment_payload6(most),
        };
        Self {
            packet,
            version,
            identification,
            offset: 0,
            step: step as usize,
            buffer: Vec::with_capacity(most.min(0xffff) as usize),
        }
    }

    /// Returns the next fragment.
    pub fn next_fragment(&mut self) -> Option<&[u8]> {
        let (head, payload) = self.packet.split_at(self.version.header_len());
        if self.offset >= payload.len() {
            return None;
        }
        let end = self.offset.saturating_add(self.step).min(payload.len());
        let data = &payload[self.offset..end];
        let more = end < payload.len();
        let buffer = &mut self.buffer;
        buffer.clear();
        buffer.extend_from_slice(head);
        match self.version {
            Version::V4 => {
                buffer.extend_from_slice(data);
                let total = buffer.len() as u16;
                let word = (self.offset / 8) as u16 | if more { MORE } else { 0 };
                buffer[2..4].copy_from_slice(&total.to_be_bytes());
                buffer[6..8].copy_from_slice(&word.to_be_bytes());
                ipv4::fill_checksum(buffer, ipv4::HEADER_LEN);
            }
            Version::V6 if self.offset > 0 || more => {
                let field = self.offset as u16 | if more { MORE6 } else { 0 };
                buffer[4..6]
                    .copy_from_slice(&((FRAGMENT_HEADER_LEN + data.len()) as u16).to_be_bytes());
                buffer[6] = ipv6::FRAGMENT;
                buffer.extend_from_slice(&[head[6], 0]);
                buffer.extend_from_slice(&field.to_be_bytes());
                buffer.extend_from_slice(&self.identification.to_be_bytes());
                buffer.extend_from_slice(data);
            }
            // Whole: a fragment that is the whole datagram helps nobody (RFC 8021).
            Version::V6 => buffer.extend_from_slice(data),
        }
        self.offset = end;
        Some(&self.buffer)
    }
}
