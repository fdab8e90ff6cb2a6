//! Frames for the programs, and inspection of the resulting frames.
use std::net::Ipv4Addr;

use slipgate_abi::{Command, PortHeader, Protocol, tcp::Flags};

use crate::datapath::*;

/// Builder of an IPv4 frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) destination_mac: [u8; 6],
    pub(crate) source_mac: [u8; 6],
    pub(crate) source: Ipv4Addr,
    pub(crate) destination: Ipv4Addr,
    pub(crate) protocol: u8,
    pub(crate) ttl: u8,
    pub(crate) fragment: u16,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    pub(crate) tcp_flags: u8,
    pub(crate) sequence: u32,
    pub(crate) acknowledgement: u32,
    pub(crate) icmp_type: u8,
    pub(crate) payload: Vec<u8>,
    pub(crate) udp_checksum: bool,
}

impl Frame {
    /// Returns a frame from the guest, on the flow of [`Flow::new`].
    pub(crate) fn tx(protocol: Protocol) -> Self {
        let flow = Flow::new(protocol);
        Self {
            destination_mac: GATEWAY_MAC,
            source_mac: GUEST_MAC,
            source: GUEST,
            destination: REMOTE,
            protocol: protocol as u8,
            ttl: 64,
            fragment: 0x4000,
            source_port: flow.guest_port,
            destination_port: flow.remote_port,
            tcp_flags: Flags::ACK,
            sequence: 1,
            acknowledgement: 7,
            icmp_type: 8,
            payload: b"twenty-one bytes long".to_vec(),
            udp_checksum: true,
        }
    }

    /// Returns a frame from the world, on the flow of [`Flow::new`].
    pub(crate) fn rx(protocol: Protocol) -> Self {
        let flow = Flow::new(protocol);
        Self {
            destination_mac: HOST_MAC,
            source_mac: ROUTER_MAC,
            source: REMOTE,
            destination: NAT,
            source_port: flow.remote_port,
            destination_port: flow.nat_port,
            icmp_type: 0,
            ..Self::tx(protocol)
        }
    }

    /// Returns a frame from the world if `rx`, else from the guest.
    pub(crate) fn of(protocol: Protocol, rx: bool) -> Self {
        if rx {
            Self::rx(protocol)
        } else {
            Self::tx(protocol)
        }
    }

    /// Returns the ICMP id: the guest's or the translated port.
    fn id(&self) -> u16 {
        if self.icmp_type == 8 {
            self.source_port
        } else {
            self.destination_port
        }
    }

    /// Returns the bytes, with correct checksums.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut l4 = Vec::new();
        match Protocol::from_ip(self.protocol) {
            Some(Protocol::Tcp) => {
                l4.extend(self.source_port.to_be_bytes());
                l4.extend(self.destination_port.to_be_bytes());
                l4.extend(self.sequence.to_be_bytes());
                l4.extend(self.acknowledgement.to_be_bytes());
                l4.extend([0x50, self.tcp_flags, 0x10, 0, 0, 0, 0, 0]);
            }
            Some(Protocol::Udp) => {
                l4.extend(self.source_port.to_be_bytes());
                l4.extend(self.destination_port.to_be_bytes());
                l4.extend((self.payload.len() as u16 + 8).to_be_bytes());
                l4.extend([0, 0]);
            }
            Some(Protocol::Icmp | Protocol::Icmpv6) => {
                l4.extend([self.icmp_type, 0, 0, 0]);
                l4.extend(self.id().to_be_bytes());
                l4.extend([0, 1]);
            }
            None => {}
        }
        l4.extend(&self.payload);
        let total = 20 + l4.len() as u16;
        let mut ip = vec![0x45, 0];
        ip.extend(total.to_be_bytes());
        ip.extend([0x12, 0x34]);
        ip.extend(self.fragment.to_be_bytes());
        ip.extend([self.ttl, self.protocol, 0, 0]);
        ip.extend(self.source.octets());
        ip.extend(self.destination.octets());
        let sum = !sum16(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        if let Some((at, sum)) = l4_checksum(&ip, &l4)
            && (self.protocol != 17 || self.udp_checksum)
        {
            l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        let mut frame = Vec::new();
        frame.extend(self.destination_mac);
        frame.extend(self.source_mac);
        frame.extend([8, 0]);
        frame.extend(ip);
        frame.extend(l4);
        frame
    }
}

/// Returns the one's complement sum of 16-bit words.
pub(crate) fn sum16(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns the offset of the L4 checksum, and its correct value, computed with the field as zero.
pub(crate) fn l4_checksum(ip: &[u8], l4: &[u8]) -> Option<(usize, u16)> {
    let (at, pseudo) = match ip[9] {
        6 => (16, true),
        17 => (6, true),
        1 => (2, false),
        _ => return None,
    };
    let mut bytes = Vec::new();
    if pseudo {
        bytes.extend(&ip[12..20]);
        bytes.extend([0, ip[9]]);
        bytes.extend((l4.len() as u16).to_be_bytes());
    }
    let start = bytes.len() + at;
    bytes.extend(l4);
    bytes[start..start + 2].fill(0);
    let sum = !sum16(&bytes);
    Some((at, if ip[9] == 17 && sum == 0 { 0xffff } else { sum }))
}

/// Whether all checksums of a frame are correct (a UDP one may be absent).
pub(crate) fn checksums_right(frame: &[u8]) -> bool {
    let total = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
    let (ip, l4) = (&frame[14..34], &frame[34..14 + total]);
    let l4_right = match l4_checksum(ip, l4) {
        Some((at, sum)) => {
            let found = u16::from_be_bytes([l4[at], l4[at + 1]]);
            found == sum || (ip[9] == 17 && found == 0)
        }
        None => true,
    };
    sum16(ip) == 0xffff && l4_right
}

/// Returns the header of a frame on the engine port, and the frame from the EtherType on.
pub(crate) fn handed(frame: &[u8]) -> (PortHeader, &[u8]) {
    let header = PortHeader::decode(frame.first_chunk().expect("12 bytes")).expect("a header");
    (header, &frame[12..])
}

/// Returns a frame with a command of the engine in front.
pub(crate) fn command(command: Command, id: u32, frame: &Frame) -> Vec<u8> {
    with_header(
        PortHeader {
            code: command as u8,
            flags: 0,
            vm_row: ROW as u16,
            id,
        },
        frame.bytes(),
    )
}

/// Returns a frame with any header in front.
pub(crate) fn with_header(header: PortHeader, mut frame: Vec<u8>) -> Vec<u8> {
    frame[..12].copy_from_slice(&header.encode());
    frame
}

/// Returns an ARP frame from the guest, sent to broadcast.
pub(crate) fn arp(operation: u16, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST_MAC);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4]);
    frame.extend(operation.to_be_bytes());
    frame.extend(GUEST_MAC);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// Returns an ICMP error of the world about a translated packet.
pub(crate) fn icmp_error(icmp_type: u8, quoted: &Frame) -> Frame {
    let bytes = quoted.bytes();
    Frame {
        protocol: 1,
        source: Ipv4Addr::new(8, 0, 1, 1),
        icmp_type,
        payload: bytes[14..(14 + 28).min(bytes.len())].to_vec(),
        ..Frame::rx(Protocol::Icmp)
    }
}
