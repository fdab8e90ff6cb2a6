//! Translation of ICMP and ICMPv6 errors (RFC 5508, RFC 4443 section 2.4).
//!
//! # Theory of operation
//! An error quotes the packet that caused it, with the flow's tuple on the *link of the error's
//! sender*. So the quoted header is translated in reverse, then the outer address, then the
//! checksums from the inside out: that of the quoted IP header, that of the quoted transport if the
//! quote includes it, that of the ICMP message over all of this, and that of the outer IP header.
//! IPv6 headers have none, and the sums of ICMPv6 cover the addresses. Type, code and the second
//! word (an MTU, a pointer) stay unchanged (REQ-4, 5): both links have the same header length.
//!
//! The outer checksum is verified (REQ-3a); the quoted one is not (3b), it is updated by the
//! difference, so it stays correct or incorrect. A quote that is itself a fragment past the first,
//! or an ICMP error, or that has another extension header than a fragment's, belongs to no flow. So does one with the ICMP
//! of the other family. An error refreshes no flow (REQ-6) and ends none (RFC 4787
//! REQ-12, RFC 5382 REQ-10): this module only reads slots.
use std::net::IpAddr;

use slipgate_model::FlowTuple;

use crate::packet::{
    Ip, Ipv4, Ipv6, Malformed, Transport, Version, build,
    icmp::{self, HEADER_LEN},
    ip::{self, End},
    ipv6::FRAGMENT_HEADER_LEN,
    translation::TransportFields,
};

/// Reason for which an error is not translated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Untranslatable {
    /// The outer message contradicts itself, or its checksum is wrong.
    Malformed,
    /// The message is not an error, or one that is meaningful only on its link (redirect), or of a
    /// type without a meaning.
    Type,
    /// The quote is not a packet of a flow that could be looked up.
    Quote,
}

/// Addresses, ports and protocol of the packet that an error quotes.
#[derive(Clone, Copy, Debug)]
pub struct Quoted {
    /// Source address of the quoted packet.
    pub source: IpAddr,
    /// Destination address of the quoted packet.
    pub destination: IpAddr,
    /// Source port, or ICMP query id, host order.
    pub source_port: u16,
    /// Destination port, host order; for ICMP the query id again.
    pub destination_port: u16,
    /// IP protocol number of the quoted packet.
    pub protocol: u8,
}

impl Quoted {
    /// Parses the quote of an error. `verify` says that the frame's checksum is complete and must
    /// be checked.
    ///
    /// # Errors
    /// If the message is malformed, of another type, or quotes no packet of a flow.
    pub fn parse(outer: &Ip<'_>, verify: bool) -> Result<Self, Untranslatable> {
        let message = outer.payload();
        let version = outer.version();
        let Ok(Transport::Icmp(icmp)) = Transport::parse(version, outer.protocol, message) else {
            return Err(Untranslatable::Malformed);
        };
        if !icmp.is_translated_error() {
            return Err(Untranslatable::Type);
        }
        if verify && build::icmp_checksum(outer.source, outer.destination, message) != 0 {
            return Err(Untranslatable::Malformed);
        }
        let inner = quoted_header(version, &message[HEADER_LEN..]);
        let inner = inner.map_err(|_| Untranslatable::Quote)?;
        // Eight bytes past the header are all that a quote must have (RFC 792).
        let l4: &[u8; 8] = inner.payload().first_chunk().ok_or(Untranslatable::Quote)?;
        let ports = match quoted_transport(&inner) {
            Some(QuotedTransport::Ports) => {
                let word = |at: usize| u16::from_be_bytes([l4[at], l4[at + 1]]);
                Some((word(0), word(2)))
            }
            Some(QuotedTransport::Icmp(icmp)) => icmp.is_echo().then_some((icmp.id, icmp.id)),
            None => None,
        };
        let (source_port, destination_port) = ports.ok_or(Untranslatable::Quote)?;
        Ok(Self {
            source: inner.source,
            destination: inner.destination,
            source_port,
            destination_port,
            protocol: inner.protocol,
        })
    }

    /// Tuple of the quoted packet's flow if the packet's *source* is the local side: the error
    /// comes from the world and concerns a packet that was sent there.
    pub fn tuple_as_sent(&self, scope: u32) -> FlowTuple {
        let local = (self.source, self.source_port);
        self.tuple(scope, local, (self.destination, self.destination_port))
    }

    /// Tuple of the quoted packet's flow if the packet's destination is the local side: the error
    /// comes from the guest and concerns a packet that was delivered to it.
    pub fn tuple_as_received(&self, scope: u32) -> FlowTuple {
        let local = (self.destination, self.destination_port);
        self.tuple(scope, local, (self.source, self.source_port))
    }

    fn tuple(&self, scope: u32, local: (IpAddr, u16), remote: (IpAddr, u16)) -> FlowTuple {
        let is_icmp = self.protocol == Version::of(local.0).icmp();
        FlowTuple {
            scope,
            local: local.0,
            remote: remote.0,
            local_port: local.1,
            remote_port: if is_icmp { 0 } else { remote.1 },
            protocol: self.protocol,
        }
    }
}

/// Parses a quoted header, of a packet that is not a fragment past the first. A quote is of the
/// family of its error.
fn quoted_header(version: Version, quote: &[u8]) -> Result<Ip<'_>, Malformed> {
    match version {
        Version::V4 => {
            let inner = Ipv4::parse_truncated(quote)?;
            match inner.fragment_offset {
                0 => Ok(inner.into()),
                _ => Err(Malformed),
            }
        }
        Version::V6 => {
            let inner = Ipv6::parse_truncated(quote)?;
            match inner.is_fragment() {
                true => behind_fragment_header(inner),
                false => Ok(inner.into()),
            }
        }
    }
}

/// The header of a quoted first fragment, with its fragment header: what a host sends in fragments is
/// quoted as it was sent.
fn behind_fragment_header(inner: Ipv6<'_>) -> Result<Ip<'_>, Malformed> {
    let header: &[u8; FRAGMENT_HEADER_LEN] = inner.payload().first_chunk().ok_or(Malformed)?;
    let [protocol, _, high, low, ..] = *header;
    if u16::from_be_bytes([high, low]) & !7 != 0 {
        return Err(Malformed);
    }
    let mut ip = Ip::from(inner);
    ip.header_len += FRAGMENT_HEADER_LEN;
    ip.protocol = protocol;
    Ok(ip)
}

/// Transport of a quoted packet, of which eight bytes may be all that is there.
enum QuotedTransport {
    /// TCP or UDP: ports come first.
    Ports,
    Icmp(icmp::Icmp),
}

fn quoted_transport(inner: &Ip<'_>) -> Option<QuotedTransport> {
    match inner.protocol {
        6 | 17 => Some(QuotedTransport::Ports),
        number if number == inner.version().icmp() => {
            let icmp = icmp::Icmp::parse(inner.version(), inner.payload()).ok()?;
            Some(QuotedTransport::Icmp(icmp))
        }
        _ => None,
    }
}

/// Rewrites one end of the quoted packet and of the outer header.
///
/// `packet` is the whole packet, which [`Quoted::parse`] accepted. For an error from the world, the
/// quoted *source* and the outer *destination* become the guest's. For an error from the guest, the
/// quoted destination and the outer source become the translated address.
pub fn translate(packet: &mut [u8], inner_end: End, addr: IpAddr, port: u16) {
    let Ok(outer) = Ip::parse(packet) else {
        return;
    };
    let (header_len, total, version) = (outer.header_len, outer.bytes.len(), outer.version());
    ip::set_address(packet, inner_end.other(), addr);
    let Ok(outer) = Ip::parse(packet) else {
        return;
    };
    let (source, destination) = (outer.source, outer.destination);
    let Some(message) = packet.get_mut(header_len..total) else {
        return;
    };
    if message.len() < HEADER_LEN {
        return;
    }
    if let Some(quote) = message.get_mut(HEADER_LEN..) {
        translate_quote(version, quote, inner_end, addr, port);
    }
    build::fill_icmp_checksum(source, destination, message);
}

/// Length of the quote that an error keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quote {
    /// The IP header and eight bytes (RFC 792), which identify the flow.
    Least,
    /// As much as fits an error of 576 bytes (RFC 1812 section 4.3.2.3), or in IPv6 of 1,280.
    Most,
}

/// Truncates an error's quote and removes extensions after it (RFC 4884). The ICMP checksum is
/// wrong afterwards, until the error is translated.
pub fn shorten(packet: &mut Vec<u8>, most: Quote) {
    let Ok(outer) = Ip::parse(packet) else {
        return;
    };
    let (header_len, version) = (outer.header_len, outer.version());
    let message = outer.payload();
    let Some((header, quote)) = message.split_first_chunk::<HEADER_LEN>() else {
        return;
    };
    let kind = header[0];
    let Ok(inner) = quoted_header(version, quote) else {
        return;
    };
    let len = match most {
        Quote::Least => header_len + HEADER_LEN + inner.header_len + 8,
        Quote::Most => version.least_mtu() as usize,
    };
    if packet.len() <= len {
        return;
    }
    ip::truncate(packet, header_len, len);
    // The quote's length, where extensions follow it. ICMPv6 has none beside an MTU or a pointer.
    match version {
        Version::V4 => packet[header_len + 5] = 0,
        Version::V6 => {
            if matches!(kind, icmp::v6::UNREACHABLE | icmp::v6::TIME_EXCEEDED) {
                packet[header_len + 4] = 0;
            }
        }
    }
}

/// Whether a message says that its destination refuses what it quotes: "destination unreachable",
/// but for "fragmentation needed".
pub fn is_unreachable(version: Version, message: &[u8]) -> bool {
    let Some(&[kind, code]) = message.first_chunk() else {
        return false;
    };
    match version {
        Version::V4 => kind == icmp::v4::UNREACHABLE && code != icmp::FRAGMENTATION_NEEDED,
        Version::V6 => kind == icmp::v6::UNREACHABLE,
    }
}

/// MTU of the next hop in an ICMP "fragmentation needed" (RFC 1191) or ICMPv6 "packet too big"
/// message, bytes. The latter is 1,280 at least: a smaller one changes nothing (RFC 8201 section 4).
/// `None` for other messages.
pub fn next_hop_mtu(version: Version, message: &[u8]) -> Option<u32> {
    let header: &[u8; HEADER_LEN] = message.first_chunk()?;
    let [kind, code, _, _, word @ ..] = *header;
    match version {
        Version::V4 => {
            let is_told = (kind, code) == (icmp::v4::UNREACHABLE, icmp::FRAGMENTATION_NEEDED);
            let mtu = u32::from(u16::from_be_bytes([word[2], word[3]]));
            (is_told && mtu > 0).then_some(mtu)
        }
        Version::V6 => {
            let mtu = u32::from_be_bytes(word).max(version.least_mtu());
            (kind == icmp::v6::TOO_BIG).then_some(mtu)
        }
    }
}

fn translate_quote(version: Version, quote: &mut [u8], end: End, addr: IpAddr, port: u16) {
    let Ok(inner) = quoted_header(version, quote) else {
        return;
    };
    let header_len = inner.header_len;
    let old = match end {
        End::Source => inner.source,
        End::Destination => inner.destination,
    };
    let place = match (quoted_transport(&inner), inner.protocol) {
        (Some(QuotedTransport::Icmp(icmp)), _) => TransportFields::of(&Transport::Icmp(icmp), end),
        (Some(QuotedTransport::Ports), 6) => Some(TransportFields::of_tcp(end)),
        (Some(QuotedTransport::Ports), _) => Some(TransportFields::of_udp(end)),
        (None, _) => None,
    };
    ip::set_address(quote, end, addr);
    let (Some(place), Some(l4)) = (place, quote.get_mut(header_len..)) else {
        return;
    };
    if let Some(old_port) = place.set_port(l4, port) {
        place.update_checksum(l4, (old, addr), (old_port, port));
    }
}

#[cfg(test)]
mod tests;
