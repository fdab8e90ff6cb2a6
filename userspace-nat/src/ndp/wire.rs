//! Messages of neighbour discovery as bytes (RFC 4861 section 4), and what a guest says to
//! multicast routers.
use std::net::Ipv6Addr;

use slipgate_abi::Ip6;

use crate::packet::{Malformed, checksum::Sum};

/// All nodes on the link.
pub const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Length of an IPv6 header, bytes.
pub const HEADER_LEN: usize = 40;
/// Protocol number of ICMPv6.
pub const ICMPV6: u8 = 58;
/// Hop limit of every message: one that comes from another link has a lower one.
const HOP_LIMIT: u8 = 255;
/// Next header of the hop-by-hop options, which precede listener reports (RFC 3810 section 5).
const HOP_BY_HOP: u8 = 0;

/// Type numbers of the ICMPv6 messages that are read or sent.
pub mod kind {
    /// Multicast listener query, report and done (RFC 2710), and report of version 2 (RFC 3810).
    pub const LISTENERS: [u8; 4] = [130, 131, 132, 143];
    /// Router solicitation (RFC 4861 section 4.1).
    pub const ROUTER_SOLICITATION: u8 = 133;
    /// Router advertisement (RFC 4861 section 4.2).
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Neighbour solicitation (RFC 4861 section 4.3).
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// Neighbour advertisement (RFC 4861 section 4.4).
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// Redirect (RFC 4861 section 4.5).
    pub const REDIRECT: u8 = 137;
}

/// Type numbers of options.
pub(super) mod option {
    pub(crate) const SOURCE_MAC: u8 = 1;
    pub(crate) const TARGET_MAC: u8 = 2;
    pub(crate) const PREFIX: u8 = 3;
    pub(crate) const MTU: u8 = 5;
    pub(crate) const RESOLVERS: u8 = 25;
}

/// A message with its addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ndp {
    /// Source address; unspecified in duplicate address detection.
    pub source: Ipv6Addr,
    /// Destination address of the packet.
    pub destination: Ipv6Addr,
    /// The parsed message.
    pub message: Message,
}

/// Fields of a message that the engine uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// A host asks for advertisements.
    RouterSolicitation {
        /// MAC of the sender, if it says so.
        mac: Option<[u8; 6]>,
    },
    /// A router says what the link's configuration is.
    RouterAdvertisement,
    /// Asks for the MAC of a neighbour.
    NeighbourSolicitation {
        /// Address that is asked for.
        target: Ipv6Addr,
        /// MAC of the sender, if it says so.
        mac: Option<[u8; 6]>,
    },
    /// Tells the MAC of an address.
    NeighbourAdvertisement {
        /// The address that the MAC is of.
        target: Ipv6Addr,
    },
    /// A router says that a better one is there.
    Redirect,
    /// Which multicast groups somebody listens to.
    Listeners,
    /// Another ICMPv6 message, which is not handled here.
    Other,
}

/// Parses an IPv6 packet that is an ICMPv6 message, and validates it if it is of neighbour
/// discovery.
///
/// # Errors
/// The packet is no ICMPv6 message, or fails a check of RFC 4861 sections 6.1.1, 7.1.1 or 7.1.2.
pub fn parse(packet: &[u8]) -> Result<Ndp, Malformed> {
    let header: &[u8; HEADER_LEN] = packet.first_chunk().ok_or(Malformed)?;
    let payload_len = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let payload = packet.get(HEADER_LEN..HEADER_LEN + payload_len);
    let payload = payload.filter(|_| header[0] >> 4 == 6).ok_or(Malformed)?;
    let (source, destination) = (address(&header[8..24])?, address(&header[24..40])?);
    let icmp = match header[6] {
        ICMPV6 => payload,
        // One extension header is read; another one after it is nobody's.
        HOP_BY_HOP => {
            let [ICMPV6, units, ..] = *payload else {
                return Err(Malformed);
            };
            payload
                .get(8 * (usize::from(units) + 1)..)
                .ok_or(Malformed)?
        }
        _ => return Err(Malformed),
    };
    let [kind, code, ..] = *icmp else {
        return Err(Malformed);
    };
    let found = |message| {
        Ok(Ndp {
            source,
            destination,
            message,
        })
    };
    if kind::LISTENERS.contains(&kind) {
        return found(Message::Listeners);
    }
    // Only listener reports have options before them.
    let is_plain = header[6] == ICMPV6;
    if !(kind::ROUTER_SOLICITATION..=kind::REDIRECT).contains(&kind) {
        return found(Message::Other);
    }
    let is_valid = checksum(source, destination, icmp) == 0;
    if !is_plain || header[7] != HOP_LIMIT || code != 0 || !is_valid {
        return Err(Malformed);
    }
    let is_probe = source.is_unspecified();
    let message = match kind {
        kind::ROUTER_SOLICITATION => {
            let mac = mac_option(icmp, 8, option::SOURCE_MAC)?;
            if is_probe && mac.is_some() {
                return Err(Malformed);
            }
            Message::RouterSolicitation { mac }
        }
        kind::NEIGHBOUR_SOLICITATION => {
            let target = target(icmp)?;
            let mac = mac_option(icmp, 24, option::SOURCE_MAC)?;
            if is_probe && (mac.is_some() || destination != solicited_node(target)) {
                return Err(Malformed);
            }
            Message::NeighbourSolicitation { target, mac }
        }
        kind::NEIGHBOUR_ADVERTISEMENT => {
            const SOLICITED: u8 = 0x40;
            let target = target(icmp)?;
            mac_option(icmp, 24, option::TARGET_MAC)?;
            if icmp[4] & SOLICITED != 0 && destination.is_multicast() {
                return Err(Malformed);
            }
            Message::NeighbourAdvertisement { target }
        }
        kind::ROUTER_ADVERTISEMENT => Message::RouterAdvertisement,
        _ => Message::Redirect,
    };
    found(message)
}

/// Returns the group to which solicitations for an address are sent (RFC 4291 section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    Ip6::from(address).solicited_node().into()
}

/// A neighbour advertisement to be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Address whose MAC is told; also the source.
    pub target: Ipv6Addr,
    /// MAC of the address.
    pub mac: [u8; 6],
    /// Destination address of the packet.
    pub to: Ipv6Addr,
    /// Whether it answers a solicitation.
    pub is_solicited: bool,
    /// Whether it replaces what the receiver knows.
    pub overrides: bool,
}

/// Builds a neighbour advertisement of the router.
pub fn neighbour_advertisement(answer: Answer) -> Vec<u8> {
    const ROUTER: u8 = 0x80;
    const SOLICITED: u8 = 0x40;
    const OVERRIDE: u8 = 0x20;
    let mut flags = ROUTER;
    if answer.is_solicited {
        flags |= SOLICITED;
    }
    if answer.overrides {
        flags |= OVERRIDE;
    }
    let mut icmp = vec![kind::NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0];
    icmp.extend(answer.target.octets());
    icmp.extend([option::TARGET_MAC, 1]);
    icmp.extend(answer.mac);
    finish(answer.target, answer.to, icmp)
}

/// Puts the IPv6 header before an ICMPv6 message whose checksum is zero, and fills that in.
pub(super) fn finish(source: Ipv6Addr, to: Ipv6Addr, mut icmp: Vec<u8>) -> Vec<u8> {
    let sum = checksum(source, to, &icmp);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = header(source, to, ICMPV6, icmp.len(), HOP_LIMIT);
    packet.extend(icmp);
    packet
}

/// Checksum of an ICMPv6 message with its pseudo-header (RFC 8200 section 8.1).
fn checksum(source: Ipv6Addr, to: Ipv6Addr, icmp: &[u8]) -> u16 {
    let sum = Sum::default().bytes(&source.octets()).bytes(&to.octets());
    let sum = sum.bytes(&(icmp.len() as u32).to_be_bytes());
    sum.bytes(&[0, 0, 0, ICMPV6]).bytes(icmp).finish()
}

/// Returns an IPv6 header. `len`: of what follows, at most 65,535 bytes.
pub(crate) fn header(
    source: Ipv6Addr,
    to: Ipv6Addr,
    next_header: u8,
    len: usize,
    hop_limit: u8,
) -> Vec<u8> {
    let mut packet = Vec::with_capacity(HEADER_LEN + len);
    packet.extend([0x60, 0, 0, 0]);
    packet.extend((len as u16).to_be_bytes());
    packet.extend([next_header, hop_limit]);
    packet.extend(source.octets());
    packet.extend(to.octets());
    packet
}

fn address(octets: &[u8]) -> Result<Ipv6Addr, Malformed> {
    let octets: [u8; 16] = octets.try_into().map_err(|_| Malformed)?;
    Ok(octets.into())
}

fn target(icmp: &[u8]) -> Result<Ipv6Addr, Malformed> {
    let target = address(icmp.get(8..24).ok_or(Malformed)?)?;
    match target.is_multicast() {
        true => Err(Malformed),
        false => Ok(target),
    }
}

/// Returns the MAC in the first option of this type, of the options from `begin` on. Every option
/// must have a length and fit (RFC 4861 section 4.6).
fn mac_option(icmp: &[u8], begin: usize, wanted: u8) -> Result<Option<[u8; 6]>, Malformed> {
    let mut rest = icmp.get(begin..).ok_or(Malformed)?;
    let mut found = None;
    while let [kind, units, ..] = *rest {
        let len = 8 * usize::from(units);
        let option = rest.get(..len).filter(|_| len > 0).ok_or(Malformed)?;
        if kind == wanted && found.is_none() {
            // With Ethernet the option is eight octets long (RFC 2464 section 6).
            found = Some(option[2..].try_into().map_err(|_| Malformed)?);
        }
        rest = &rest[len..];
    }
    match rest.is_empty() {
        true => Ok(found),
        false => Err(Malformed),
    }
}

#[cfg(test)]
#[path = "wire_test.rs"]
pub(crate) mod tests;
