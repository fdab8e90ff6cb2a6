//! UDP datagrams over IPv4, as the services read and write them.
use std::net::{Ipv4Addr, SocketAddrV4};

use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{IpProtocol, Ipv4Packet, Ipv4Repr, UdpPacket, UdpRepr},
};

/// Headers before the payload, bytes.
pub const HEADERS_LEN: usize = 28;
/// Largest payload, bytes.
pub const MAX_PAYLOAD_LEN: usize = 65_535 - HEADERS_LEN;

/// A whole UDP datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'p> {
    /// Where it comes from.
    pub from: SocketAddrV4,
    /// Where it goes.
    pub to: SocketAddrV4,
    /// What it carries.
    pub payload: &'p [u8],
}

impl<'p> Datagram<'p> {
    /// Reads an IPv4 packet; `None` for a fragment, another protocol, lengths that contradict each
    /// other, or a wrong header checksum. UDP's own is not looked at: from a guest's memory to
    /// here nothing can garble it, and with offloads it is not filled in.
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

    /// The IPv4 packet, checksums filled in; the payload is cut at [`MAX_PAYLOAD_LEN`].
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
