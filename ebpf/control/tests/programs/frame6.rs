//! IPv6 frames for the programs.
use std::net::Ipv6Addr;

use slipgate_abi::{Protocol, tcp::Flags};

use crate::{datapath::*, flow6::*, frame::sum16};

/// Builder of an IPv6 frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame6 {
    pub(crate) destination_mac: [u8; 6],
    pub(crate) source_mac: [u8; 6],
    pub(crate) source: Ipv6Addr,
    pub(crate) destination: Ipv6Addr,
    /// Number of the header that `l4` begins with.
    pub(crate) next_header: u8,
    pub(crate) hop_limit: u8,
    /// Payload behind the header. Its checksum is filled in.
    pub(crate) l4: Vec<u8>,
}

/// A fragment header, and this behind it.
pub(crate) fn fragment_of(next: u8, field: u16, id: u32, data: &[u8]) -> Vec<u8> {
    let mut l4 = vec![next, 0];
    l4.extend(field.to_be_bytes());
    l4.extend(id.to_be_bytes());
    l4.extend(data);
    l4
}

/// Header and payload of a flow's packet between two ports; of an echo, the first is the query id.
pub(crate) fn l4_of(
    protocol: Protocol,
    kind: u8,
    ports: (u16, u16),
    flags: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut l4 = Vec::new();
    match protocol {
        Protocol::Icmp | Protocol::Icmpv6 => {
            l4.extend([kind, 0, 0, 0]);
            l4.extend(ports.0.to_be_bytes());
            l4.extend([0, 1]);
        }
        Protocol::Tcp => {
            l4.extend(ports.0.to_be_bytes());
            l4.extend(ports.1.to_be_bytes());
            l4.extend([0, 0, 0, 1, 0, 0, 0, 7, 0x50, flags, 0x10, 0, 0, 0, 0, 0]);
        }
        Protocol::Udp => {
            l4.extend(ports.0.to_be_bytes());
            l4.extend(ports.1.to_be_bytes());
            l4.extend((payload.len() as u16 + 8).to_be_bytes());
            l4.extend([0, 0]);
        }
    }
    l4.extend(payload);
    l4
}

const PAYLOAD: &[u8] = b"twenty-one bytes long";

impl Frame6 {
    /// Returns a frame from the guest, on the flow of [`flow6`].
    pub(crate) fn tx(protocol: Protocol) -> Self {
        Self::tx_with(protocol, PAYLOAD)
    }

    pub(crate) fn tx_with(protocol: Protocol, payload: &[u8]) -> Self {
        let flow = flow6(protocol);
        let ports = (flow.guest_port, flow.remote_port);
        Self {
            destination_mac: GATEWAY_MAC,
            source_mac: GUEST_MAC,
            source: GUEST6,
            destination: REMOTE6,
            next_header: protocol as u8,
            hop_limit: 64,
            l4: l4_of(protocol, 128, ports, Flags::ACK, payload),
        }
    }

    /// Returns a frame from the world, on the flow of [`flow6`].
    pub(crate) fn rx(protocol: Protocol) -> Self {
        Self::rx_with(protocol, PAYLOAD)
    }

    pub(crate) fn rx_with(protocol: Protocol, payload: &[u8]) -> Self {
        let flow = flow6(protocol);
        let ports = match protocol {
            Protocol::Icmpv6 => (flow.nat_port, 0),
            _ => (flow.remote_port, flow.nat_port),
        };
        Self {
            destination_mac: HOST_MAC,
            source_mac: ROUTER_MAC,
            source: REMOTE6,
            destination: NAT6,
            l4: l4_of(protocol, 129, ports, Flags::ACK, payload),
            ..Self::tx(protocol)
        }
    }

    /// Returns a guest's frame in the form in which the world receives it.
    pub(crate) fn sent_on(&self) -> Self {
        Self {
            destination_mac: ROUTER_MAC,
            source_mac: UPLINK_MAC,
            source: NAT6,
            hop_limit: self.hop_limit - 1,
            ..self.with_port(61_001, 0)
        }
    }

    /// Returns a frame of the world in the form in which the guest receives it.
    pub(crate) fn delivered(&self) -> Self {
        Self {
            destination_mac: GUEST_MAC,
            source_mac: GATEWAY_MAC,
            destination: GUEST6,
            hop_limit: self.hop_limit - 1,
            ..self.with_port(40_000, 2)
        }
    }

    /// Replaces the port at this place of the ports, or the query id.
    fn with_port(&self, port: u16, at: usize) -> Self {
        let at = if self.next_header == 58 { 4 } else { at };
        let mut changed = self.clone();
        changed.l4[at..at + 2].copy_from_slice(&port.to_be_bytes());
        changed
    }

    /// Returns the bytes, with a correct checksum.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.without_checksum();
        if let Some(at) = self.checksum_offset() {
            let mut summed = self.pseudo_header();
            summed.extend(&bytes[54..]);
            let sum = match !sum16(&summed) {
                0 if self.next_header == 17 => 0xffff,
                sum => sum,
            };
            // A short header has none.
            if let Some(field) = bytes.get_mut(at..at + 2) {
                field.copy_from_slice(&sum.to_be_bytes());
            }
        }
        bytes
    }

    /// Returns the bytes with a partial checksum: the sum of the pseudo-header.
    pub(crate) fn partial(&self) -> Vec<u8> {
        let mut bytes = self.without_checksum();
        let at = self.checksum_offset().expect("a protocol with a checksum");
        bytes[at..at + 2].copy_from_slice(&sum16(&self.pseudo_header()).to_be_bytes());
        bytes
    }

    /// Offset of the checksum in the frame.
    pub(crate) fn checksum_offset(&self) -> Option<usize> {
        Some(
            54 + match self.next_header {
                6 => 16,
                17 => 6,
                58 => 2,
                _ => return None,
            },
        )
    }

    fn pseudo_header(&self) -> Vec<u8> {
        let mut pseudo = Vec::new();
        pseudo.extend(self.source.octets());
        pseudo.extend(self.destination.octets());
        pseudo.extend((self.l4.len() as u32).to_be_bytes());
        pseudo.extend([0, 0, 0, self.next_header]);
        pseudo
    }

    fn without_checksum(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.destination_mac);
        bytes.extend(self.source_mac);
        bytes.extend([0x86, 0xdd, 0x60, 0x0a, 0xbc, 0xde]);
        bytes.extend((self.l4.len() as u16).to_be_bytes());
        bytes.extend([self.next_header, self.hop_limit]);
        bytes.extend(self.source.octets());
        bytes.extend(self.destination.octets());
        bytes.extend(&self.l4);
        if let Some(at) = self.checksum_offset()
            && let Some(field) = bytes.get_mut(at..at + 2)
        {
            field.fill(0);
        }
        bytes
    }
}
