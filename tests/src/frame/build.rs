use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use super::{BROADCAST, FRAGMENT, ICMP, ICMPV6, IPV6_HEADER_BYTES, Mac, fold, pseudo_sum, sum_of};
use crate::tap::VnetHdr;

/// Way in which a builder fills the transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Complete, with the correct sum.
    Full,
    /// The pseudo-header's sum, with NEEDS_CSUM in the vnet header, as a stack with checksum
    /// offload sends it.
    Partial,
    /// Complete, with a wrong sum.
    Wrong,
    /// Zero ("none" in UDP).
    Zero,
}

#[derive(Clone, Debug)]
enum Transport {
    Tcp {
        sequence: u32,
        acknowledgment: u32,
        flags: u8,
        window: u16,
        options: Vec<u8>,
    },
    Udp,
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
    },
    Raw(u8),
}

/// Flag bits of the TCP header.
#[allow(missing_docs, reason = "RFC 9293's names")]
pub mod tcp_flags {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
    pub const URG: u8 = 32;
}

/// Builds an Ethernet frame with one packet, and the vnet header that belongs to it. The family is
/// that of its addresses; without another word each function means both.
#[derive(Clone, Debug)]
pub struct FrameBuilder {
    macs: (Mac, Mac),
    vlan: Option<u16>,
    source: SocketAddr,
    destination: SocketAddr,
    ttl: u8,
    tos: u8,
    ident: u16,
    fragment: u16,
    options: Vec<u8>,
    transport: Transport,
    payload: Vec<u8>,
    checksum: Checksum,
    gso_size: Option<u16>,
}

impl FrameBuilder {
    fn new(source: SocketAddr, destination: SocketAddr, transport: Transport) -> Self {
        FrameBuilder {
            macs: ([0x52, 0x54, 0, 0x12, 0x34, 0x56], BROADCAST),
            vlan: None,
            source,
            destination,
            ttl: 64,
            tos: 0,
            ident: 0,
            fragment: 0x4000,
            options: Vec::new(),
            transport,
            payload: Vec::new(),
            checksum: Checksum::Full,
            gso_size: None,
        }
    }

    /// A TCP segment; by default an ACK without data. Addresses are `"10.0.2.15:4000"`,
    /// [`SocketAddrV4`] or [`SocketAddr`].
    pub fn tcp(source: impl IntoAddress, destination: impl IntoAddress) -> Self {
        let transport = Transport::Tcp {
            sequence: 0,
            acknowledgment: 0,
            flags: tcp_flags::ACK,
            window: 65535,
            options: Vec::new(),
        };
        Self::new(source.into_address(), destination.into_address(), transport)
    }

    /// Starts a UDP datagram.
    pub fn udp(source: impl IntoAddress, destination: impl IntoAddress) -> Self {
        Self::new(
            source.into_address(),
            destination.into_address(),
            Transport::Udp,
        )
    }

    /// An ICMP message; `rest` is the second half of its header (identifier and sequence of an
    /// echo, MTU of a fragmentation-needed).
    pub fn icmp(
        source: impl Into<IpAddr>,
        destination: impl Into<IpAddr>,
        kind: u8,
        code: u8,
        rest: [u8; 4],
    ) -> Self {
        let (source, destination) = (
            SocketAddr::new(source.into(), 0),
            SocketAddr::new(destination.into(), 0),
        );
        Self::new(source, destination, Transport::Icmp { kind, code, rest })
    }

    /// Starts an ICMP echo request.
    pub fn ping(
        source: impl Into<IpAddr>,
        destination: impl Into<IpAddr>,
        ident: u16,
        sequence: u16,
    ) -> Self {
        let (i, s) = (ident.to_be_bytes(), sequence.to_be_bytes());
        let source = source.into();
        let kind = if source.is_ipv4() { 8 } else { 128 };
        Self::icmp(source, destination, kind, 0, [i[0], i[1], s[0], s[1]])
    }

    /// A packet of any protocol, its payload bare.
    pub fn ip(source: impl Into<IpAddr>, destination: impl Into<IpAddr>, protocol: u8) -> Self {
        let (source, destination) = (
            SocketAddr::new(source.into(), 0),
            SocketAddr::new(destination.into(), 0),
        );
        Self::new(source, destination, Transport::Raw(protocol))
    }

    /// Ethernet source and destination.
    pub fn macs(mut self, source: Mac, destination: Mac) -> Self {
        self.macs = (source, destination);
        self
    }

    /// Adds an 802.1Q tag.
    pub fn vlan(mut self, id: u16) -> Self {
        self.vlan = Some(id);
        self
    }

    /// Sets the time to live, or the hop limit.
    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the TOS byte, or the traffic class.
    pub fn tos(mut self, tos: u8) -> Self {
        self.tos = tos;
        self
    }

    /// Sets the identification; an IPv6 packet has one as a fragment only.
    pub fn ident(mut self, ident: u16) -> Self {
        self.ident = ident;
        self
    }

    /// Makes it a fragment: offset in units of 8 bytes, and whether more follow.
    pub fn fragment(mut self, offset: u16, more: bool) -> Self {
        self.fragment = (offset & 0x1fff) | if more { 0x2000 } else { 0 };
        self
    }

    /// Whether the don't-fragment bit of IPv4 is set (it is at first).
    pub fn dont_fragment(mut self, set: bool) -> Self {
        self.fragment = (self.fragment & !0x4000) | if set { 0x4000 } else { 0 };
        self
    }

    /// Options of IPv4, padded to 4 bytes.
    pub fn ip_options(mut self, options: &[u8]) -> Self {
        self.options = padded(options);
        self
    }

    /// TCP flags, see [`tcp_flags`].
    pub fn flags(mut self, set: u8) -> Self {
        if let Transport::Tcp { flags, .. } = &mut self.transport {
            *flags = set;
        }
        self
    }

    /// TCP sequence and acknowledgment numbers.
    pub fn numbers(mut self, seq: u32, ack: u32) -> Self {
        if let Transport::Tcp {
            sequence,
            acknowledgment,
            ..
        } = &mut self.transport
        {
            (*sequence, *acknowledgment) = (seq, ack);
        }
        self
    }

    /// Sets the TCP window, unscaled.
    pub fn window(mut self, bytes: u16) -> Self {
        if let Transport::Tcp { window, .. } = &mut self.transport {
            *window = bytes;
        }
        self
    }

    /// TCP options, padded to 4 bytes.
    pub fn tcp_options(mut self, set: &[u8]) -> Self {
        if let Transport::Tcp { options, .. } = &mut self.transport {
            *options = padded(set);
        }
        self
    }

    /// Sets the payload behind the headers.
    pub fn payload(mut self, bytes: &[u8]) -> Self {
        self.payload = bytes.to_vec();
        self
    }

    /// Sets the way in which the transport checksum is filled.
    pub fn checksum(mut self, checksum: Checksum) -> Self {
        self.checksum = checksum;
        self
    }

    /// Makes it a GSO frame of `size` payload bytes per segment, which needs a partial checksum.
    pub fn gso(mut self, size: u16) -> Self {
        self.gso_size = Some(size);
        self.checksum = Checksum::Partial;
        self
    }

    /// The packet from its IP header on. A packet above 65535 bytes gets its length modulo 65536.
    pub fn build_ip(&self) -> Vec<u8> {
        let mut l4 = self.transport_header();
        l4.extend_from_slice(&self.payload);
        self.fill_checksum(&mut l4);
        let mut ip = match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                self.ipv6_header(source.octets(), destination.octets(), l4.len())
            }
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                self.ipv4_header(source.octets(), destination.octets(), l4.len())
            }
            (source, destination) => panic!("{source} and {destination} are of two families"),
        };
        ip.extend_from_slice(&l4);
        ip
    }

    fn ipv4_header(&self, source: [u8; 4], destination: [u8; 4], behind: usize) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let mut ip = vec![0x40 | (header_len / 4) as u8, self.tos];
        ip.extend_from_slice(&((header_len + behind) as u16).to_be_bytes());
        ip.extend_from_slice(&self.ident.to_be_bytes());
        ip.extend_from_slice(&self.fragment.to_be_bytes());
        ip.extend_from_slice(&[self.ttl, self.protocol(), 0, 0]);
        ip.extend_from_slice(&source);
        ip.extend_from_slice(&destination);
        ip.extend_from_slice(&self.options);
        let sum = !fold(sum_of(&ip));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        ip
    }

    fn ipv6_header(&self, source: [u8; 16], destination: [u8; 16], behind: usize) -> Vec<u8> {
        let fragment = self.fragment_header();
        let next = match fragment.is_empty() {
            true => self.protocol(),
            false => FRAGMENT,
        };
        let mut ip = vec![0x60 | self.tos >> 4, self.tos << 4, 0, 0];
        ip.extend_from_slice(&((fragment.len() + behind) as u16).to_be_bytes());
        ip.extend_from_slice(&[next, self.ttl]);
        ip.extend_from_slice(&source);
        ip.extend_from_slice(&destination);
        ip.extend_from_slice(&fragment);
        ip
    }

    /// Of IPv6; empty for what is no fragment.
    fn fragment_header(&self) -> Vec<u8> {
        let (offset, more) = (self.fragment & 0x1fff, self.fragment & 0x2000 != 0);
        if offset == 0 && !more {
            return Vec::new();
        }
        let mut header = vec![self.protocol(), 0];
        header.extend_from_slice(&(offset << 3 | u16::from(more)).to_be_bytes());
        header.extend_from_slice(&u32::from(self.ident).to_be_bytes());
        header
    }

    fn header_len(&self) -> usize {
        match self.source {
            SocketAddr::V4(_) => 20 + self.options.len(),
            SocketAddr::V6(_) => IPV6_HEADER_BYTES + self.fragment_header().len(),
        }
    }

    /// The vnet header and the frame.
    pub fn build(&self) -> (VnetHdr, Vec<u8>) {
        let mut frame = Vec::with_capacity(64 + self.payload.len());
        frame.extend_from_slice(&self.macs.1);
        frame.extend_from_slice(&self.macs.0);
        if let Some(id) = self.vlan {
            frame.extend_from_slice(&[0x81, 0]);
            frame.extend_from_slice(&id.to_be_bytes());
        }
        let kind = match self.source {
            SocketAddr::V4(_) => [8, 0],
            SocketAddr::V6(_) => [0x86, 0xdd],
        };
        frame.extend_from_slice(&kind);
        let l3 = frame.len();
        frame.extend_from_slice(&self.build_ip());
        let mut vnet = VnetHdr::default();
        if let (Checksum::Partial, Some(at)) = (self.checksum, self.checksum_at()) {
            vnet.flags = VnetHdr::NEEDS_CSUM;
            vnet.csum_start = (l3 + self.header_len()) as u16;
            vnet.csum_offset = at as u16;
        }
        if let Some(size) = self.gso_size {
            vnet.gso_size = size;
            vnet.gso_type = match self.transport {
                Transport::Udp => VnetHdr::GSO_UDP_L4,
                _ if self.source.is_ipv6() => VnetHdr::GSO_TCPV6,
                _ => VnetHdr::GSO_TCPV4,
            };
            vnet.hdr_len = vnet.csum_start + self.transport_header().len() as u16;
        }
        (vnet, frame)
    }

    fn protocol(&self) -> u8 {
        match self.transport {
            Transport::Tcp { .. } => 6,
            Transport::Udp => 17,
            Transport::Icmp { .. } if self.source.is_ipv6() => ICMPV6,
            Transport::Icmp { .. } => ICMP,
            Transport::Raw(protocol) => protocol,
        }
    }

    fn transport_header(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match &self.transport {
            Transport::Tcp {
                sequence,
                acknowledgment,
                flags,
                window,
                options,
            } => {
                out.extend_from_slice(&self.source.port().to_be_bytes());
                out.extend_from_slice(&self.destination.port().to_be_bytes());
                out.extend_from_slice(&sequence.to_be_bytes());
                out.extend_from_slice(&acknowledgment.to_be_bytes());
                out.extend_from_slice(&[((20 + options.len()) as u8 / 4) << 4, *flags]);
                out.extend_from_slice(&window.to_be_bytes());
                out.extend_from_slice(&[0; 4]);
                out.extend_from_slice(options);
            }
            Transport::Udp => {
                out.extend_from_slice(&self.source.port().to_be_bytes());
                out.extend_from_slice(&self.destination.port().to_be_bytes());
                out.extend_from_slice(&((8 + self.payload.len()) as u16).to_be_bytes());
                out.extend_from_slice(&[0; 2]);
            }
            Transport::Icmp { kind, code, rest } => {
                out.extend_from_slice(&[*kind, *code, 0, 0]);
                out.extend_from_slice(rest);
            }
            Transport::Raw(_) => {}
        }
        out
    }

    fn checksum_at(&self) -> Option<usize> {
        match self.transport {
            Transport::Tcp { .. } => Some(16),
            Transport::Udp => Some(6),
            Transport::Icmp { .. } | Transport::Raw(_) => None,
        }
    }

    fn fill_checksum(&self, l4: &mut [u8]) {
        let pseudo = pseudo_sum(
            self.source.ip(),
            self.destination.ip(),
            self.protocol(),
            l4.len(),
        );
        let (at, pseudo) = match self.transport {
            Transport::Icmp { .. } if self.source.is_ipv6() => (2, pseudo),
            Transport::Icmp { .. } => (2, 0),
            Transport::Raw(_) => return,
            Transport::Tcp { .. } => (16, pseudo),
            Transport::Udp => (6, pseudo),
        };
        let full = match !fold(pseudo + sum_of(l4)) {
            0 if matches!(self.transport, Transport::Udp) => 0xffff,
            sum => sum,
        };
        let value = match self.checksum {
            Checksum::Full => full,
            Checksum::Partial if self.checksum_at().is_some() => fold(pseudo),
            Checksum::Partial => full,
            Checksum::Wrong => full ^ 0x5555,
            Checksum::Zero => 0,
        };
        l4[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }
}

/// Types that the builders accept as an address.
pub trait IntoAddress {
    /// The address. Text that is none panics: it is a mistake in the test.
    fn into_address(self) -> SocketAddr;
}

impl IntoAddress for SocketAddrV4 {
    fn into_address(self) -> SocketAddr {
        self.into()
    }
}

impl IntoAddress for SocketAddr {
    fn into_address(self) -> SocketAddr {
        self
    }
}

impl IntoAddress for &str {
    fn into_address(self) -> SocketAddr {
        self.parse()
            .unwrap_or_else(|_| panic!("`{self}` is not ADDRESS:PORT"))
    }
}

fn padded(options: &[u8]) -> Vec<u8> {
    let mut out = options.to_vec();
    out.resize(options.len().next_multiple_of(4), 0);
    out
}
