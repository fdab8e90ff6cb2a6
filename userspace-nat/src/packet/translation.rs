//! Translation of a whole packet by the engine, where it does what the programs do otherwise.
use std::net::IpAddr;

use super::{
    Packet, Transport,
    checksum::{self, Sum},
    ip::{self, End},
};
use crate::port::{ETHERNET_LEN, VirtioNetHdr};

/// Translates one end of a packet, decrements its TTL, and completes or updates its L4 checksum.
/// `bytes` is a copy of the packet, and `vnet` its offload header.
pub fn translate(
    bytes: &mut [u8],
    packet: &Packet<'_>,
    vnet: VirtioNetHdr,
    end: End,
    (addr, port): (IpAddr, u16),
) {
    let ip = packet.ip;
    let (old, source, destination) = match end {
        End::Source => (ip.source, addr, ip.destination),
        End::Destination => (ip.destination, ip.source, addr),
    };
    ip::set_address(bytes, end, addr);
    ip::decrement_ttl(bytes);
    let Some(place) = TransportFields::of(&packet.transport, end) else {
        return;
    };
    let Some(l4) = bytes.get_mut(ip.header_len..) else {
        return;
    };
    let is_complete = !vnet.needs_csum() || matches!(packet.transport, Transport::Icmp(_));
    let Some(old_port) = place.set_port(l4, port) else {
        return;
    };
    if is_complete {
        place.update_checksum(l4, (old, addr), (old_port, port));
        return;
    }
    let field = place.checksum..place.checksum + 2;
    l4[field.clone()].fill(0);
    let sum = Sum::default()
        .pseudo(source, destination, ip.protocol, l4.len())
        .bytes(l4)
        .finish();
    l4[field].copy_from_slice(&place.as_sent(sum.to_be_bytes()));
}

/// One end of a packet replaced in place: its checksum stays as complete or partial as it was, and its
/// TTL as it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readdressed {
    header_len: usize,
    place: TransportFields,
    end: End,
    addresses: (IpAddr, IpAddr),
    port: u16,
    is_partial: bool,
}

impl Readdressed {
    /// Returns the change for a packet with this offload header; `None` if its protocol has no
    /// flows, or its partial checksum is not where the protocol has it.
    pub(crate) fn of(
        packet: &Packet<'_>,
        vnet: VirtioNetHdr,
        end: End,
        (addr, port): (IpAddr, u16),
    ) -> Option<Self> {
        let (ip, place) = (packet.ip, TransportFields::of(&packet.transport, end)?);
        let is_partial = vnet.needs_csum();
        let at = (ETHERNET_LEN + ip.header_len, place.checksum);
        let is_in_place = at == (vnet.csum_start.into(), vnet.csum_offset.into());
        if is_partial && !(is_in_place && place.has_pseudo_header) {
            return None;
        }
        let old = match end {
            End::Source => ip.source,
            End::Destination => ip.destination,
        };
        Some(Self {
            header_len: ip.header_len,
            place,
            end,
            addresses: (old, addr),
            port,
            is_partial,
        })
    }

    /// Returns the length of the packet's IP header, bytes.
    pub(crate) const fn header_len(&self) -> usize {
        self.header_len
    }

    /// Whether the checksum is partial.
    pub(crate) const fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Writes the new address and port into the packet, and updates its checksums.
    pub(crate) fn apply(&self, packet: &mut [u8]) {
        let (old, new) = self.addresses;
        ip::set_address(packet, self.end, new);
        let Some(l4) = packet.get_mut(self.header_len..) else {
            return;
        };
        let Some(old_port) = self.place.set_port(l4, self.port) else {
            return;
        };
        if !self.is_partial {
            let ports = (old_port, self.port);
            return self.place.update_checksum(l4, self.addresses, ports);
        }
        // The sum of the pseudo-header, which is not complemented and has no ports.
        let at = self.place.checksum;
        if let Some(field) = l4.get_mut(at..at + 2) {
            let mut sum = [!field[0], !field[1]];
            checksum::replace_address(&mut sum, old, new);
            field.copy_from_slice(&sum.map(|octet| !octet));
        }
    }
}

/// Where the words of a transport header are that a translation changes, bytes from its beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransportFields {
    port: usize,
    checksum: usize,
    /// Whether the addresses are under the checksum.
    has_pseudo_header: bool,
    /// Whether a checksum of zero means that there is none (RFC 768).
    is_udp: bool,
}

impl TransportFields {
    /// Returns the places of one end's words in a TCP header.
    pub(crate) fn of_tcp(end: End) -> Self {
        Self {
            port: port_at(end),
            checksum: 16,
            has_pseudo_header: true,
            is_udp: false,
        }
    }

    /// Returns the places of one end's words in a UDP header.
    pub(crate) fn of_udp(end: End) -> Self {
        Self {
            port: port_at(end),
            checksum: 6,
            has_pseudo_header: true,
            is_udp: true,
        }
    }

    /// Returns the places of one end's words; `None` for a protocol without flows.
    pub(crate) fn of(transport: &Transport, end: End) -> Option<Self> {
        match transport {
            Transport::Tcp(_) => Some(Self::of_tcp(end)),
            Transport::Udp(_) => Some(Self::of_udp(end)),
            // An echo's id identifies both ends.
            Transport::Icmp(icmp) => Some(Self {
                port: 4,
                checksum: 2,
                has_pseudo_header: icmp.has_pseudo_header(),
                is_udp: false,
            }),
            Transport::Other => None,
        }
    }

    /// Replaces the port. Returns the old one; `None` if the header is too short for one.
    pub(crate) fn set_port(&self, l4: &mut [u8], port: u16) -> Option<u16> {
        let field = l4.get_mut(self.port..self.port + 2)?;
        let old = u16::from_be_bytes([field[0], field[1]]);
        field.copy_from_slice(&port.to_be_bytes());
        Some(old)
    }

    /// Updates the checksum, if the header reaches so far, after an address and the port changed:
    /// each from the first value to the second.
    pub(crate) fn update_checksum(
        &self,
        l4: &mut [u8],
        (old, addr): (IpAddr, IpAddr),
        (old_port, port): (u16, u16),
    ) {
        let Some(field) = l4.get_mut(self.checksum..self.checksum + 2) else {
            return;
        };
        let mut sum = [field[0], field[1]];
        if self.is_udp && sum == [0, 0] {
            return;
        }
        if self.has_pseudo_header {
            checksum::replace_address(&mut sum, old, addr);
        }
        checksum::replace16(&mut sum, old_port, port);
        field.copy_from_slice(&self.as_sent(sum));
    }

    /// A UDP checksum that comes out as zero is sent as all ones (RFC 768).
    fn as_sent(&self, sum: [u8; 2]) -> [u8; 2] {
        match sum {
            [0, 0] if self.is_udp => [0xff; 2],
            sum => sum,
        }
    }
}

/// Where TCP and UDP have an end's port.
fn port_at(end: End) -> usize {
    match end {
        End::Source => 0,
        End::Destination => 2,
    }
}
