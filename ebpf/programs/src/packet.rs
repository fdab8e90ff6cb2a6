//! A packet's headers, read once into a small struct.
use slipgate_abi::{
    DropReason, Ip4, Protocol,
    segment::{self, Segments},
    tcp,
};

use crate::skb::Skb;
pub(crate) use crate::skb::{ETHERNET_LEN, L4};

/// Length of an IPv4 header without options: the only one that is translated.
pub(crate) const IPV4_LEN: usize = 20;

/// EtherTypes.
pub(crate) mod ether_type {
    pub(crate) const IPV4: u16 = 0x0800;
    pub(crate) const ARP: u16 = 0x0806;
    pub(crate) const IPV6: u16 = 0x86dd;
    pub(crate) const VLAN: u16 = 0x8100;
    pub(crate) const SERVICE_VLAN: u16 = 0x88a8;
}

/// ICMP types (RFC 792).
pub(crate) mod icmp {
    pub(crate) const ECHO_REPLY: u8 = 0;
    pub(crate) const UNREACHABLE: u8 = 3;
    pub(crate) const ECHO: u8 = 8;
    pub(crate) const TIME_EXCEEDED: u8 = 11;
    pub(crate) const PARAMETER_PROBLEM: u8 = 12;
}

// Headers as they stand on the wire. Packets are 2-aligned: with `packed(2)` a 32-bit field is
// read as two halves, not as four bytes. Multi-byte fields are in network order.

/// Ethernet header. Both addresses in one array of halves, destination first, as they stand side
/// by side in `NextHop` and `Vm` as well.
#[repr(C, packed(2))]
pub(crate) struct Ethernet {
    pub(crate) macs: Macs,
    pub(crate) ether_type: u16,
}

/// Destination and source address.
pub(crate) type Macs = [u16; 6];

/// IPv4 header without options.
#[repr(C, packed(2))]
pub(crate) struct Ipv4 {
    pub(crate) version_ihl: u8,
    pub(crate) tos: u8,
    pub(crate) total_len: u16,
    pub(crate) id: u16,
    pub(crate) fragment: u16,
    pub(crate) ttl_protocol: u16,
    pub(crate) checksum: u16,
    pub(crate) source: u32,
    pub(crate) destination: u32,
}

/// The second part of a TCP header.
#[repr(C, packed(2))]
struct TcpTail {
    acknowledgement: u32,
    offset: u8,
    flags: u8,
    window: u16,
    checksum: u16,
    urgent: u16,
}

/// A TCP header without options.
#[repr(C, packed(2))]
struct Tcp {
    ports: [u16; 2],
    sequence: u32,
    tail: TcpTail,
}

/// An IPv4 packet with or without the L4 part parsed.
#[derive(Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) source: Ip4,
    pub(crate) destination: Ip4,
    /// Host order; both 0 before [`Packet::parse_transport`].
    pub(crate) source_port: u16,
    /// As above. ICMP echo has its id here and in `source_port`.
    pub(crate) destination_port: u16,
    /// IP protocol number.
    pub(crate) protocol: u8,
    pub(crate) ttl: u8,
    pub(crate) tcp_flags: u8,
    pub(crate) icmp_type: u8,
    /// TCP sequence number, host order.
    pub(crate) sequence: u32,
    /// L4 checksum as it stands in the packet.
    pub(crate) checksum: u16,
    /// IP header to end, bytes.
    pub(crate) l3_len: u32,
    /// What each segment repeats, bytes.
    pub(crate) headers_len: u32,
    /// L4 payload per segment; 0 when the frame is one packet.
    pub(crate) gso_size: u32,
}

/// The segment in a frame that was parsed as TCP and has an Ethernet header; `payload_len` is the
/// whole frame's.
#[inline(always)]
pub(crate) fn segment(skb: Skb, payload_len: u32) -> Option<tcp::Segment> {
    let header = skb.header::<Tcp>(ETHERNET_LEN + IPV4_LEN)?;
    // SAFETY: `header` checked the bounds.
    let header = unsafe { &*header };
    Some(tcp::Segment::new(
        header.tail.flags,
        u32::from_be(header.sequence),
        payload_len,
        u32::from_be(header.tail.acknowledgement),
        u16::from_be(header.tail.window),
    ))
}

impl Packet {
    /// Reads the IPv4 header at `L2`. The reason is `Malformed`, `IpOptions` or `Fragment`.
    #[inline(always)]
    pub(crate) fn parse_network<const L2: usize>(skb: Skb) -> Result<Self, DropReason> {
        let Some(ip) = skb.pulled_header::<Ipv4>(L2) else {
            return Err(DropReason::Malformed);
        };
        // SAFETY: `pulled_header` checked the bounds.
        let ip = unsafe { &*ip };
        if ip.version_ihl != 0x45 {
            return Err(if ip.version_ihl > 0x45 && ip.version_ihl <= 0x4f {
                DropReason::IpOptions
            } else {
                DropReason::Malformed
            });
        }
        // Offset or "more fragments".
        if ip.fragment & u16::to_be(0x3fff) != 0 {
            return Err(DropReason::Fragment);
        }
        let gso_size = skb.gso_size();
        let room = skb.len().wrapping_sub(L2 as u32);
        let mut l3_len = u32::from(u16::from_be(ip.total_len));
        // GRO leaves 0 in what outgrows the field (BIG TCP).
        if l3_len == 0 && gso_size != 0 {
            l3_len = room;
        }
        // What segmentation makes of a frame follows from its length, not from the header's.
        if l3_len > room || l3_len < IPV4_LEN as u32 || (gso_size != 0 && l3_len != room) {
            return Err(DropReason::Malformed);
        }
        let [ttl, protocol] = ip.ttl_protocol.to_ne_bytes();
        Ok(Self {
            source: Ip4::from_wire(ip.source),
            destination: Ip4::from_wire(ip.destination),
            source_port: 0,
            destination_port: 0,
            protocol,
            ttl,
            tcp_flags: 0,
            icmp_type: 0,
            sequence: 0,
            checksum: 0,
            l3_len,
            headers_len: IPV4_LEN as u32,
            gso_size,
        })
    }

    /// Reads the L4 header. The reason is `Malformed` or `IpProtocol`.
    #[inline(always)]
    pub(crate) fn parse_transport<const L2: usize>(&mut self, skb: Skb) -> Result<(), DropReason> {
        let l4_len = self.l3_len - IPV4_LEN as u32;
        let Some(protocol) = Protocol::from_ip(self.protocol) else {
            return Err(DropReason::IpProtocol);
        };
        if l4_len < size_of::<L4>() as u32 {
            return Err(DropReason::Malformed);
        }
        let Some(l4) = skb.pulled_header::<L4>(L2 + IPV4_LEN) else {
            return Err(DropReason::Malformed);
        };
        // SAFETY: `pulled_header` checked the bounds.
        let l4 = unsafe { &*l4 };
        let (ports, rest) = (l4.ports, l4.rest);
        self.source_port = u16::from_be(ports[0]);
        self.destination_port = u16::from_be(ports[1]);
        let l4_header_len = match protocol {
            Protocol::Tcp => {
                let high = u32::from(u16::from_be(rest[0]));
                self.sequence = high << 16 | u32::from(u16::from_be(rest[1]));
                let offset = L2 + IPV4_LEN + size_of::<L4>();
                let Some(tail) = skb.pulled_header::<TcpTail>(offset) else {
                    return Err(DropReason::Malformed);
                };
                // SAFETY: as above.
                let tail = unsafe { &*tail };
                self.tcp_flags = tail.flags;
                self.checksum = tail.checksum;
                let header_len = u32::from(tail.offset >> 4) * 4;
                if header_len < 20 {
                    return Err(DropReason::Malformed);
                }
                header_len
            }
            Protocol::Udp => {
                let udp_len = u32::from(u16::from_be(rest[0]));
                if udp_len > l4_len || udp_len < 8 {
                    return Err(DropReason::Malformed);
                }
                self.checksum = rest[1];
                8
            }
            Protocol::Icmp => {
                self.icmp_type = ports[0].to_ne_bytes()[0];
                self.checksum = ports[1];
                self.source_port = u16::from_be(rest[0]);
                self.destination_port = self.source_port;
                8
            }
        };
        if l4_header_len > l4_len {
            return Err(DropReason::Malformed);
        }
        self.headers_len = IPV4_LEN as u32 + l4_header_len;
        Ok(())
    }

    /// What it counts as.
    #[inline(always)]
    pub(crate) fn segments(&self) -> Segments {
        segment::count(self.l3_len, self.headers_len, self.gso_size)
    }

    /// The largest packet it becomes, L3 bytes.
    #[inline(always)]
    pub(crate) fn largest(&self) -> u32 {
        segment::largest_packet(self.l3_len, self.headers_len, self.gso_size)
    }

    #[inline(always)]
    pub(crate) fn is_tcp(&self) -> bool {
        self.protocol == Protocol::Tcp as u8
    }

    #[inline(always)]
    pub(crate) fn is_udp(&self) -> bool {
        self.protocol == Protocol::Udp as u8
    }

    #[inline(always)]
    pub(crate) fn is_icmp(&self) -> bool {
        self.protocol == Protocol::Icmp as u8
    }
}
