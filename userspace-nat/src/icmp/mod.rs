//! Translation of ICMP errors (RFC 5508).
//!
//! # Theory of operation
//! An error quotes the packet that caused it, with the flow's tuple on the *link of the error's
//! sender*. So the quoted header is translated in reverse, then the outer address, then the
//! checksums from the inside out: that of the quoted IP header, that of the quoted transport if the
//! quote includes it, that of the ICMP message over all of this, and that of the outer IP header.
//! Type, code and the second word (an MTU, a pointer) stay unchanged (REQ-4, 5).
//!
//! The outer checksum is verified (REQ-3a); the quoted one is not (3b), it is updated by the
//! difference, so it stays correct or incorrect. A quote that is itself a fragment past the first,
//! or an ICMP error, belongs to no flow. An error refreshes no flow (REQ-6) and ends none (RFC 4787
//! REQ-12, RFC 5382 REQ-10): this module only reads slots.
use slipgate_abi::{Ip4, Protocol, Tuple};

use crate::packet::{
    Ipv4, Transport, build, checksum,
    icmp::{HEADER_LEN, REDIRECT, UNREACHABLE, Unreachable},
    ipv4::{self, End},
};

/// Longest translated error from a guest, bytes (RFC 1812 section 4.3.2.3).
const ERROR_MAX: usize = 576;

/// Reason for which an error is not translated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Untranslatable {
    /// The outer message contradicts itself, or its checksum is wrong.
    Malformed,
    /// The message is not an error, or one that is meaningful only on its link (redirect).
    Type,
    /// The quote is not a packet of a flow that could be looked up.
    Quote,
}

/// Addresses, ports and protocol of the packet that an error quotes.
#[derive(Clone, Copy, Debug)]
pub struct Quoted {
    /// Source address of the quoted packet.
    pub source: Ip4,
    /// Destination address of the quoted packet.
    pub destination: Ip4,
    /// Source port, or ICMP query id, host order.
    pub source_port: u16,
    /// Destination port, host order; for ICMP the query id again.
    pub destination_port: u16,
    /// Protocol of the quoted packet.
    pub protocol: Protocol,
}

impl Quoted {
    /// Parses the quote of an error. `verify` says that the frame's checksum is complete and must
    /// be checked.
    ///
    /// # Errors
    /// If the message is malformed, of another type, or quotes no packet of a flow.
    pub fn parse(outer: &Ipv4<'_>, verify: bool) -> Result<Self, Untranslatable> {
        let message = outer.payload();
        let Ok(Transport::Icmp(icmp)) = Transport::parse(1, message) else {
            return Err(Untranslatable::Malformed);
        };
        if !icmp.is_error() || icmp.kind == REDIRECT {
            return Err(Untranslatable::Type);
        }
        if verify && checksum::of(message) != 0 {
            return Err(Untranslatable::Malformed);
        }
        let inner =
            Ipv4::parse_truncated(&message[HEADER_LEN..]).map_err(|_| Untranslatable::Quote)?;
        // Eight bytes past the header are all that a quote must have (RFC 792).
        let l4: &[u8; 8] = inner.payload().first_chunk().ok_or(Untranslatable::Quote)?;
        let protocol = Protocol::from_ip(inner.protocol).ok_or(Untranslatable::Quote)?;
        if inner.fragment_offset != 0 {
            return Err(Untranslatable::Quote);
        }
        let word = |at: usize| u16::from_be_bytes([l4[at], l4[at + 1]]);
        let (source_port, destination_port) = match protocol {
            Protocol::Tcp | Protocol::Udp => (word(0), word(2)),
            Protocol::Icmp | Protocol::Icmpv6 => {
                let quoted = Transport::parse(1, l4).map_err(|_| Untranslatable::Quote)?;
                quoted.ports().ok_or(Untranslatable::Quote)?
            }
        };
        Ok(Self {
            source: inner.source,
            destination: inner.destination,
            source_port,
            destination_port,
            protocol,
        })
    }

    /// Tuple of the quoted packet's flow if the packet's *source* is the local side: the error
    /// comes from the world and concerns a packet that was sent there.
    pub fn tuple_as_sent(&self, scope: u32) -> Tuple {
        self.tuple(
            scope,
            self.source,
            self.destination,
            self.source_port,
            self.destination_port,
        )
    }

    /// Tuple of the quoted packet's flow if the packet's destination is the local side: the error
    /// comes from the guest and concerns a packet that was delivered to it.
    pub fn tuple_as_received(&self, scope: u32) -> Tuple {
        self.tuple(
            scope,
            self.destination,
            self.source,
            self.destination_port,
            self.source_port,
        )
    }

    fn tuple(&self, scope: u32, local: Ip4, remote: Ip4, lport: u16, rport: u16) -> Tuple {
        Tuple {
            scope,
            local,
            remote,
            local_port: lport,
            remote_port: if self.protocol == Protocol::Icmp {
                0
            } else {
                rport
            },
            protocol: self.protocol as u8,
            pad: [0; 3],
        }
    }
}

/// Rewrites one end of the quoted packet and of the outer header.
///
/// `packet` is the whole IPv4 packet, which [`Quoted::parse`] accepted. For an error from the
/// world, the quoted *source* and the outer *destination* become the guest's. For an error from the
/// guest, the quoted destination and the outer source become the translated address.
pub fn translate(packet: &mut [u8], inner_end: End, addr: Ip4, port: u16) {
    let Ok(outer) = Ipv4::parse(packet) else {
        return;
    };
    let (header_len, total) = (outer.header_len, outer.bytes.len());
    let Some(message) = packet.get_mut(header_len..total) else {
        return;
    };
    if let Some(quote) = message.get_mut(HEADER_LEN..) {
        translate_quote(quote, inner_end, addr, port);
    }
    build::fill_icmp_checksum(message);
    let outer_end = match inner_end {
        End::Source => End::Destination,
        End::Destination => End::Source,
    };
    ipv4::set_address(packet, outer_end, addr);
}

/// Length of the quote that an error keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quote {
    /// The IP header and eight bytes (RFC 792), which identify the flow.
    Least,
    /// As much as fits an error of 576 bytes (RFC 1812 section 4.3.2.3).
    Most,
}

/// Truncates an error's quote and removes extensions after it (RFC 4884). The ICMP checksum is
/// wrong afterwards, until the error is translated.
pub fn shorten(packet: &mut Vec<u8>, most: Quote) {
    let Ok(outer) = Ipv4::parse(packet) else {
        return;
    };
    let header_len = outer.header_len;
    let quote = outer.payload().get(HEADER_LEN..).unwrap_or_default();
    let Ok(inner) = Ipv4::parse_truncated(quote) else {
        return;
    };
    let len = match most {
        Quote::Least => header_len + HEADER_LEN + inner.header_len + 8,
        Quote::Most => ERROR_MAX,
    };
    if packet.len() <= len {
        return;
    }
    packet.truncate(len);
    packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    ipv4::fill_checksum(packet, header_len);
    // The quote's length, where extensions follow it.
    packet[header_len + 5] = 0;
}

/// MTU of the next hop in a "fragmentation needed" message, bytes (RFC 1191); `None` if the message
/// is too short for it.
pub fn next_hop_mtu(message: &[u8]) -> Option<u32> {
    let header: &[u8; HEADER_LEN] = message.first_chunk()?;
    let is_told = header[0] == UNREACHABLE && header[1] == Unreachable::FragmentationNeeded as u8;
    let mtu = u16::from_be_bytes([header[6], header[7]]);
    (is_told && mtu > 0).then_some(mtu.into())
}

fn translate_quote(quote: &mut [u8], end: End, addr: Ip4, port: u16) {
    let Ok(inner) = Ipv4::parse_truncated(quote) else {
        return;
    };
    let (header_len, protocol) = (inner.header_len, inner.protocol);
    let old = match end {
        End::Source => inner.source,
        End::Destination => inner.destination,
    };
    ipv4::set_address(quote, end, addr);
    let l4 = &mut quote[header_len..];
    // (where the port stands, where the checksum, whether the address is under it)
    let (port_at, sum_at, has_pseudo) = match (Protocol::from_ip(protocol), end) {
        (Some(Protocol::Tcp), End::Source) => (0, 16, true),
        (Some(Protocol::Tcp), End::Destination) => (2, 16, true),
        (Some(Protocol::Udp), End::Source) => (0, 6, true),
        (Some(Protocol::Udp), End::Destination) => (2, 6, true),
        (Some(Protocol::Icmp), _) => (4, 2, false),
        (Some(Protocol::Icmpv6) | None, _) => return,
    };
    let Some(field) = l4.get_mut(port_at..port_at + 2) else {
        return;
    };
    let old_port = u16::from_be_bytes([field[0], field[1]]);
    field.copy_from_slice(&port.to_be_bytes());
    let Some(field) = l4.get_mut(sum_at..sum_at + 2) else {
        return;
    };
    let mut sum = [field[0], field[1]];
    if protocol == Protocol::Udp as u8 && sum == [0, 0] {
        return;
    }
    if has_pseudo {
        checksum::replace_address(&mut sum, old, addr);
    }
    checksum::replace16(&mut sum, old_port, port);
    if protocol == Protocol::Udp as u8 && sum == [0, 0] {
        sum = [0xff, 0xff];
    }
    field.copy_from_slice(&sum);
}

#[cfg(test)]
mod tests;
