//! UDP datagrams over IPv4, as the services read and write them.
use std::net::{Ipv4Addr, SocketAddrV4};

use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{IpProtocol, Ipv4Packet, Ipv4Repr, UdpPacket, UdpRepr},
};

/// Length of the IPv4 and UDP headers before the payload, bytes.
pub const HEADERS_LEN: usize = 28;
/// Largest payload, bytes.
pub const MAX_PAYLOAD_LEN: usize = 65_535 - HEADERS_LEN;

/// A whole UDP datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'p> {
    /// Source address and port.
    pub from: SocketAddrV4,
    /// Destination address and port.
    pub to: SocketAddrV4,
    /// Payload of the datagram.
    pub payload: &'p [u8],
}

impl<'p> Datagram<'p> {
    /// Parses an IPv4 packet. Returns `None` for a fragment, another protocol, contradictory
    /// lengths, or a wrong header checksum. The UDP checksum is not verified: nothing can corrupt
    /// the datagram between the guest's memory and here, and with offloads the checksum is not
    /// filled in.
    pub fn parse(packet: &'p [u8]) -> Option<Self> {
        let ip = Ipv4Packet::new_checked(packet).ok()?;
        let whole = !ip.more_frags() && ip.frag_offset() == 0;
        let plain = ip.version() == 4 && ip.next_header() == IpProtocol::Udp;
        if !(whole && plain && ip.verify_checksum()) {
            return None;
        }
        let (source, destination) = (ip.src_addr(), ip.dst_addr());
        let inner = packet.get(usize::from(ip.header_len())..usize::from(ip.total_len()))?;
        let udp = UdpPacket::new_checked(inner).ok()?;
        Some(Self {
            from: SocketAddrV4::new(source, udp.src_port()),
            to: SocketAddrV4::new(destination, udp.dst_port()),
            payload: inner.get(8..usize::from(udp.len()))?,
        })
    }

    /// Builds the IPv4 packet with its checksums. The payload is truncated to [`MAX_PAYLOAD_LEN`].
    pub fn emit(&self) -> Vec<u8> {
        let payload = &self.payload[..self.payload.len().min(MAX_PAYLOAD_LEN)];
        let checksums = ChecksumCapabilities::default();
        let udp = UdpRepr {
            src_port: self.from.port(),
            dst_port: self.to.port(),
        };
        let ip = Ipv4Repr {
            src_addr: *self.from.ip(),
            dst_addr: *self.to.ip(),
            next_header: IpProtocol::Udp,
            payload_len: udp.header_len() + payload.len(),
            hop_limit: 64,
        };
        let mut packet = vec![0; HEADERS_LEN + payload.len()];
        ip.emit(&mut Ipv4Packet::new_unchecked(&mut packet), &checksums);
        udp.emit(
            &mut UdpPacket::new_unchecked(&mut packet[20..]),
            &ip.src_addr.into(),
            &ip.dst_addr.into(),
            payload.len(),
            |room| room.copy_from_slice(payload),
            &checksums,
        );
        packet
    }
}

/// Whether an address may be a unicast destination of a guest's question, and so the source of a
/// reply.
pub fn is_unicast(address: Ipv4Addr) -> bool {
    !(address.is_broadcast() || address.is_multicast() || address.octets()[0] == 0)
}

#[cfg(test)]
#[path = "datagram_test.rs"]
mod tests;
