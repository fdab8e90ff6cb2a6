//! Packets built by hand: a builder that can also build invalid packets, and a parser.

mod build;
mod parse;

use std::net::{IpAddr, Ipv4Addr};

pub use build::{Checksum, FrameBuilder, IntoAddress, tcp_flags};
pub use parse::{FlowKey, Packet};

use crate::tap::{VNET_HDR_LEN, VnetHdr};

/// An Ethernet (MAC) address.
pub type Mac = [u8; 6];

/// The Ethernet broadcast address.
pub const BROADCAST: Mac = [0xff; 6];

/// An ARP packet for IPv4 over Ethernet, with its Ethernet header; `operation` 1 asks, 2 answers.
pub fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let to = if operation == 1 { BROADCAST } else { target.0 };
    let mut out = [to, sender.0].concat();
    out.extend_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4]);
    out.extend_from_slice(&operation.to_be_bytes());
    for (mac, ip) in [sender, target] {
        out.extend_from_slice(&mac);
        out.extend_from_slice(&ip.octets());
    }
    out
}

/// A frame with its vnet header in front, as a TAP descriptor takes it.
pub fn with_vnet(vnet: VnetHdr, frame: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(VNET_HDR_LEN + frame.len());
    out.extend_from_slice(&vnet.to_bytes());
    out.extend_from_slice(frame);
    out
}

fn pseudo_sum(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> u64 {
    let sum = |address| match address {
        IpAddr::V4(address) => sum_of(&address.octets()),
        IpAddr::V6(address) => sum_of(&address.octets()),
    };
    sum(source) + sum(destination) + u64::from(protocol) + len as u64
}

/// Protocol number of ICMP.
const ICMP: u8 = 1;
/// Protocol number of ICMPv6.
const ICMPV6: u8 = 58;
/// Protocol number of IPv6's fragment header (RFC 8200, 4.5).
const FRAGMENT: u8 = 44;
/// Length of IPv6's header.
const IPV6_HEADER_BYTES: usize = 40;
/// Length of IPv6's fragment header.
const FRAGMENT_HEADER_BYTES: usize = 8;

/// The unfolded one's complement sum of RFC 1071.
fn sum_of(bytes: &[u8]) -> u64 {
    let mut pairs = bytes.chunks_exact(2);
    let sum: u64 = pairs
        .by_ref()
        .map(|p| u64::from(u16::from_be_bytes([p[0], p[1]])))
        .sum();
    sum + pairs
        .remainder()
        .first()
        .map_or(0, |last| u64::from(*last) << 8)
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests;
