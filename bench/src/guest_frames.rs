//! Frames of a guest, of either family, in the form in which its VMM writes them.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use slipgate_testbed::{
    frame::{FrameBuilder, Mac, tcp_flags, with_vnet},
    tap::VnetHdr,
};

use crate::contender::Link;

/// MSS 1460, SACK permitted, window scale 7.
const SYN_OPTIONS: [u8; 9] = [2, 4, 5, 180, 4, 2, 3, 3, 7];
const HOP_LIMIT: u8 = 64;

/// A packet of a flow that the guest opens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind<'a> {
    /// A datagram with this payload.
    Udp(&'a [u8]),
    /// A SYN with this sequence number.
    Syn(u32),
}

/// Makes a frame from a port of the guest to the world.
///
/// # Panics
/// The guest's address and the destination are of different families.
pub(crate) fn frame(link: Link, from: u16, to: SocketAddr, kind: Kind<'_>) -> Vec<u8> {
    match (SocketAddr::new(link.address, from), to) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            let frame = match kind {
                Kind::Udp(payload) => FrameBuilder::udp(source, destination).payload(payload),
                Kind::Syn(number) => FrameBuilder::tcp(source, destination)
                    .flags(tcp_flags::SYN)
                    .numbers(number, 0)
                    .tcp_options(&SYN_OPTIONS),
            };
            let (vnet, frame) = frame.macs(link.mac, link.gateway_mac).build();
            with_vnet(vnet, &frame)
        }
        (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
            let frame = frame6((link.mac, link.gateway_mac), source, destination, kind);
            with_vnet(VnetHdr::default(), &frame)
        }
        (source, to) => panic!("{source} and {to} are of different families"),
    }
}

/// Makes an IPv6 frame between two hosts, from the Ethernet header on.
pub(crate) fn frame6(
    macs: (Mac, Mac),
    source: SocketAddrV6,
    destination: SocketAddrV6,
    kind: Kind<'_>,
) -> Vec<u8> {
    let mut l4 = [
        source.port().to_be_bytes(),
        destination.port().to_be_bytes(),
    ]
    .concat();
    let (protocol, checksum_at) = match kind {
        Kind::Udp(payload) => {
            l4.extend((8 + payload.len() as u16).to_be_bytes());
            l4.extend([0; 2]);
            l4.extend(payload);
            (17, 6)
        }
        Kind::Syn(number) => {
            let mut options = SYN_OPTIONS.to_vec();
            options.resize(SYN_OPTIONS.len().next_multiple_of(4), 0);
            l4.extend(number.to_be_bytes());
            l4.extend([0; 4]);
            l4.extend([((20 + options.len()) as u8 / 4) << 4, tcp_flags::SYN]);
            l4.extend(u16::MAX.to_be_bytes());
            l4.extend([0; 4]);
            l4.extend(options);
            (6, 16)
        }
    };
    let sum = match checksum(&source, &destination, protocol, &l4) {
        // Zero would say that there is none (RFC 8200 section 8.1).
        0 => u16::MAX,
        sum => sum,
    };
    l4[checksum_at..checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
    let mut frame = [macs.1, macs.0].concat();
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    frame.extend((l4.len() as u16).to_be_bytes());
    frame.extend([protocol, HOP_LIMIT]);
    frame.extend(source.ip().octets());
    frame.extend(destination.ip().octets());
    frame.extend(l4);
    frame
}

/// Returns the transport checksum over the pseudo-header of IPv6 (RFC 8200 section 8.1).
fn checksum(source: &SocketAddrV6, destination: &SocketAddrV6, protocol: u8, l4: &[u8]) -> u16 {
    let mut bytes = [source.ip().octets(), destination.ip().octets()].concat();
    bytes.extend((l4.len() as u32).to_be_bytes());
    bytes.extend(u32::from(protocol).to_be_bytes());
    bytes.extend(l4);
    let words = bytes.chunks(2);
    let words = words.map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Length of a datagram's frame without payload, from the Ethernet header on, bytes.
pub(crate) const fn datagram_headers_len(address: &IpAddr) -> usize {
    match address {
        IpAddr::V4(_) => 14 + 20 + 8,
        IpAddr::V6(_) => 14 + 40 + 8,
    }
}

#[cfg(test)]
#[path = "guest_frames_test.rs"]
mod tests;
