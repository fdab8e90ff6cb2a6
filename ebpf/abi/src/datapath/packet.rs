//! Headers of a packet, parsed once into a small struct.
use super::{Kernel, family::Family};
use crate::{
    DropReason, Protocol,
    segment::{self, Segments},
    tcp,
};

/// Length of an Ethernet header without tags, bytes.
pub const ETHERNET_LEN: usize = 14;
/// Length up to which a frame may be padded, bytes: that of the shortest Ethernet frame with its
/// FCS.
pub(super) const PADDED_LEN: u32 = 64;
/// Length of the header of an ICMP error, behind which the packet is quoted, bytes.
pub(super) const QUOTED: usize = 8;

/// EtherTypes (IANA and IEEE 802).
pub mod ether_type {
    /// Internet Protocol version 4.
    pub const IPV4: u16 = 0x0800;
    /// Address Resolution Protocol (RFC 826).
    pub const ARP: u16 = 0x0806;
    /// Internet Protocol version 6.
    pub const IPV6: u16 = 0x86dd;
    /// VLAN tag of IEEE 802.1Q.
    pub const VLAN: u16 = 0x8100;
    /// IEEE 802.1ad service tag.
    pub const SERVICE_VLAN: u16 = 0x88a8;
}

/// ICMP types (RFC 792).
pub(super) mod icmp {
    pub(crate) const UNREACHABLE: u8 = 3;
    pub(crate) const TIME_EXCEEDED: u8 = 11;
    pub(crate) const PARAMETER_PROBLEM: u8 = 12;
}

// Headers in wire format. Packets are 2-aligned: with `packed(2)` a 32-bit field is read as two
// halves, not as four bytes. Multi-byte fields are in network order.

/// Ethernet header. Both addresses are one array of 16-bit words, destination first, as they also
/// lie side by side in `NextHop` and `Vm`.
#[repr(C, packed(2))]
pub struct Ethernet {
    /// Destination and source MAC address.
    pub macs: Macs,
    /// EtherType of the payload, network order.
    pub ether_type: u16,
}

/// Destination and source MAC address, three 16-bit words each.
pub type Macs = [u16; 6];

/// First 8 bytes of an L4 header: half of a TCP header, or the whole of a UDP or ICMP echo header.
#[repr(C, packed(2))]
#[derive(Clone, Copy)]
pub struct L4 {
    /// TCP and UDP: source and destination port. ICMP: type with code, and checksum.
    pub ports: [u16; 2],
    /// TCP: sequence number. UDP: length and checksum. ICMP: query id and sequence number.
    pub rest: [u16; 2],
}

/// Ports of a quoted packet, host order; an echo has its query id as the first, and no second.
pub(super) struct Ports {
    pub(super) from: u16,
    pub(super) to: u16,
}

impl L4 {
    /// Ports of a packet that an ICMP error quotes; `None` if no flow can have it.
    #[inline(always)]
    pub(super) fn quoted_ports<F: Family>(&self, protocol: u8) -> Option<Ports> {
        let (ports, rest) = (self.ports, self.rest);
        let protocol = F::protocol(protocol)?;
        if !protocol.is_icmp() {
            let [from, to] = ports.map(u16::from_be);
            return Some(Ports { from, to });
        }
        (ports[0].to_ne_bytes()[0] == F::ECHO).then(|| Ports {
            from: u16::from_be(rest[0]),
            to: 0,
        })
    }

    /// Sets the port of the end that is ours, host order, or the query id.
    #[inline(always)]
    pub(super) fn set_port(&mut self, is_icmp: bool, from_guest: bool, port: u16) {
        if is_icmp {
            self.rest[0] = port.to_be();
        } else if from_guest {
            self.ports[0] = port.to_be();
        } else {
            self.ports[1] = port.to_be();
        }
    }
}

/// Second part of a TCP header, after the sequence number.
#[repr(C, packed(2))]
struct TcpTail {
    acknowledgement: u32,
    offset: u8,
    flags: u8,
    window: u16,
    checksum: u16,
    urgent: u16,
}

/// TCP header without options.
#[repr(C, packed(2))]
struct Tcp {
    ports: [u16; 2],
    sequence: u32,
    tail: TcpTail,
}

/// A packet, with or without its L4 header parsed.
#[derive(Clone, Copy, Debug)]
pub struct Packet<F: Family> {
    pub(super) source: F::Address,
    pub(super) destination: F::Address,
    /// Source port, host order; 0 before [`Packet::parse_transport`].
    pub(super) source_port: u16,
    /// Destination port, host order; 0 before [`Packet::parse_transport`]. An ICMP echo has its
    /// query id here and in `source_port`.
    pub(super) destination_port: u16,
    /// Number of the IP protocol.
    pub(super) protocol: u8,
    /// TTL or hop limit.
    pub(super) ttl: u8,
    pub(super) tcp_flags: u8,
    pub(super) icmp_type: u8,
    /// TCP sequence number, host order.
    pub(super) sequence: u32,
    /// L4 checksum as it appears in the packet.
    pub(super) checksum: u16,
    /// Length from the IP header to the end, bytes.
    pub(super) l3_len: u32,
    /// Length of the L3 and L4 headers, which each segment repeats, bytes.
    pub(super) headers_len: u32,
    /// L4 payload per segment, bytes; 0 if the frame is one packet.
    pub(super) gso_size: u32,
}

/// The TCP segment in a frame that was parsed as TCP and has an Ethernet header. `payload_len` is
/// that of the whole frame, bytes. `None` if the header cannot be read.
#[inline(always)]
pub(super) fn segment<K: Kernel, F: Family>(kernel: K, payload_len: u32) -> Option<tcp::Segment> {
    let header = kernel.header::<Tcp>(ETHERNET_LEN + F::IP_LEN)?;
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

impl<F: Family> Packet<F> {
    /// A packet whose IP header was parsed: its addresses, its protocol and its TTL.
    #[inline(always)]
    pub(super) fn of_network(
        (source, destination): (F::Address, F::Address),
        (protocol, ttl): (u8, u8),
        l3_len: u32,
        gso_size: u32,
    ) -> Self {
        Self {
            source,
            destination,
            source_port: 0,
            destination_port: 0,
            protocol,
            ttl,
            tcp_flags: 0,
            icmp_type: 0,
            sequence: 0,
            checksum: 0,
            l3_len,
            headers_len: F::IP_LEN as u32,
            gso_size,
        }
    }

    /// Parses the L4 header.
    ///
    /// # Errors
    /// `Malformed` or `IpProtocol`.
    #[inline(always)]
    pub(super) fn parse_transport<K: Kernel, const L2: usize>(
        &mut self,
        kernel: K,
    ) -> Result<(), DropReason> {
        let l4_len = self.l3_len - F::IP_LEN as u32;
        let Some(protocol) = F::protocol(self.protocol) else {
            return Err(DropReason::IpProtocol);
        };
        if l4_len < size_of::<L4>() as u32 {
            return Err(DropReason::Malformed);
        }
        let Some(l4) = kernel.pulled_header::<L4>(L2 + F::IP_LEN) else {
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
                let offset = L2 + F::IP_LEN + size_of::<L4>();
                let Some(tail) = kernel.pulled_header::<TcpTail>(offset) else {
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
            Protocol::Icmp | Protocol::Icmpv6 => {
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
        self.headers_len = F::IP_LEN as u32 + l4_header_len;
        Ok(())
    }

    /// Packets and bytes of the frame after segmentation.
    #[inline(always)]
    pub(super) fn segments(&self) -> Segments {
        segment::count(self.l3_len, self.headers_len, self.gso_size)
    }

    /// Length of the largest L3 packet in the frame after segmentation, bytes.
    #[inline(always)]
    pub(super) fn largest(&self) -> u32 {
        segment::largest_packet(self.l3_len, self.headers_len, self.gso_size)
    }

    #[inline(always)]
    pub(super) fn is_tcp(&self) -> bool {
        self.protocol == Protocol::Tcp as u8
    }

    #[inline(always)]
    pub(super) fn is_udp(&self) -> bool {
        self.protocol == Protocol::Udp as u8
    }

    #[inline(always)]
    pub(super) fn is_icmp(&self) -> bool {
        self.protocol == F::ICMP as u8
    }
}
