//! STUN messages (RFC 8489) with the attributes of NAT behaviour discovery (RFC 5780). No
//! authentication, no FINGERPRINT.
//!
//! ```text
//! 0                   2                   4                               8              20
//! type (binding       length of the       magic cookie                    transaction id
//! request, response)  attributes          0x2112A442                      12 bytes
//! then attributes: type (2), length (2), value, padded to 4 bytes
//! ```

use std::net::{IpAddr, SocketAddr};

/// Length of a message's header, bytes.
const HEADER: usize = 20;
const COOKIE: u32 = 0x2112_a442;
const REQUEST: u16 = 0x0001;
const RESPONSE: u16 = 0x0101;
/// Bits of the attribute CHANGE-REQUEST.
const CHANGE_IP: u32 = 4;
const CHANGE_PORT: u32 = 2;
const IPV4: u8 = 1;
const IPV6: u8 = 2;

/// Type numbers of STUN attributes.
mod attribute {
    pub(super) const CHANGE_REQUEST: u16 = 0x0003;
    pub(super) const XOR_MAPPED_ADDRESS: u16 = 0x0020;
    pub(super) const RESPONSE_ORIGIN: u16 = 0x802b;
    pub(super) const OTHER_ADDRESS: u16 = 0x802c;
}

/// Identifies a request and its response.
pub type TransactionId = [u8; 12];

/// A STUN binding request (RFC 8489).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Returned with the response.
    pub id: TransactionId,
    /// Whether the response is to come from the server's other address.
    pub changes_address: bool,
    /// Whether the response is to come from the server's other port.
    pub changes_port: bool,
}

/// A STUN binding response (RFC 8489).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// That of the request.
    pub id: TransactionId,
    /// Source of the request as the server saw it.
    pub mapped: SocketAddr,
    /// Address and port that the response was sent from.
    pub origin: SocketAddr,
    /// The server's other address and port.
    pub other: SocketAddr,
}

impl Request {
    /// Returns the message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut change = 0;
        if self.changes_address {
            change |= CHANGE_IP;
        }
        if self.changes_port {
            change |= CHANGE_PORT;
        }
        let mut attributes = Vec::new();
        if change != 0 {
            add(
                &mut attributes,
                attribute::CHANGE_REQUEST,
                &change.to_be_bytes(),
            );
        }
        message(REQUEST, &self.id, &attributes)
    }

    /// Parses a message; `None`: it is no binding request.
    pub fn parse(bytes: &[u8]) -> Option<Request> {
        let (kind, id, attributes) = parts(bytes)?;
        let change = find(attributes, attribute::CHANGE_REQUEST);
        let change = change.and_then(|value| Some(u32::from_be_bytes(value.try_into().ok()?)));
        let change = change.unwrap_or(0);
        (kind == REQUEST).then_some(Request {
            id,
            changes_address: change & CHANGE_IP != 0,
            changes_port: change & CHANGE_PORT != 0,
        })
    }
}

impl Response {
    /// Returns the message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut attributes = Vec::new();
        let mapped = address(xored(self.mapped, &self.id));
        add(&mut attributes, attribute::XOR_MAPPED_ADDRESS, &mapped);
        add(
            &mut attributes,
            attribute::RESPONSE_ORIGIN,
            &address(self.origin),
        );
        add(
            &mut attributes,
            attribute::OTHER_ADDRESS,
            &address(self.other),
        );
        message(RESPONSE, &self.id, &attributes)
    }

    /// Parses a message; `None`: it is no binding response with all three addresses.
    pub fn parse(bytes: &[u8]) -> Option<Response> {
        let (kind, id, attributes) = parts(bytes)?;
        let of = |kind| parse_address(find(attributes, kind)?);
        (kind == RESPONSE).then_some(())?;
        Some(Response {
            id,
            mapped: xored(of(attribute::XOR_MAPPED_ADDRESS)?, &id),
            origin: of(attribute::RESPONSE_ORIGIN)?,
            other: of(attribute::OTHER_ADDRESS)?,
        })
    }
}

fn message(kind: u16, id: &TransactionId, attributes: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_be_bytes().to_vec();
    bytes.extend((attributes.len() as u16).to_be_bytes());
    bytes.extend(COOKIE.to_be_bytes());
    bytes.extend(id);
    bytes.extend(attributes);
    bytes
}

/// Type, transaction id and attributes of a message.
fn parts(bytes: &[u8]) -> Option<(u16, TransactionId, &[u8])> {
    let (header, rest) = bytes.split_at_checked(HEADER)?;
    let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let cookie = u32::from(word(4)) << 16 | u32::from(word(6));
    let attributes = rest.get(..usize::from(word(2)))?;
    (cookie == COOKIE).then_some((word(0), header[8..].try_into().ok()?, attributes))
}

/// Adds an attribute, whose length is a multiple of four.
fn add(attributes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    attributes.extend(kind.to_be_bytes());
    attributes.extend((value.len() as u16).to_be_bytes());
    attributes.extend(value);
}

fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let Some((head, rest)) = attributes.split_at_checked(4) {
        let len = usize::from(u16::from_be_bytes([head[2], head[3]]));
        let value = rest.get(..len)?;
        if u16::from_be_bytes([head[0], head[1]]) == wanted {
            return Some(value);
        }
        attributes = rest.get(len.next_multiple_of(4)..)?;
    }
    None
}

fn address(address: SocketAddr) -> Vec<u8> {
    let family = if address.is_ipv4() { IPV4 } else { IPV6 };
    let mut value = vec![0, family];
    value.extend(address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => value.extend(ip.octets()),
        IpAddr::V6(ip) => value.extend(ip.octets()),
    }
    value
}

fn parse_address(value: &[u8]) -> Option<SocketAddr> {
    let (&[_, family, p, q], ip) = value.split_first_chunk()?;
    let ip: IpAddr = match family {
        IPV4 => <[u8; 4]>::try_from(ip).ok()?.into(),
        IPV6 => <[u8; 16]>::try_from(ip).ok()?.into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes([p, q])))
}

/// XORs an address with the magic cookie, and one of IPv6 with the transaction id behind it (RFC 8489
/// section 14.2), so that no NAT rewrites it.
fn xored(address: SocketAddr, id: &TransactionId) -> SocketAddr {
    let ip: IpAddr = match address.ip() {
        IpAddr::V4(ip) => (ip.to_bits() ^ COOKIE).to_be_bytes().into(),
        IpAddr::V6(ip) => {
            let mut mask = [0; 16];
            mask[..4].copy_from_slice(&COOKIE.to_be_bytes());
            mask[4..].copy_from_slice(id);
            (ip.to_bits() ^ u128::from_be_bytes(mask))
                .to_be_bytes()
                .into()
        }
    };
    SocketAddr::new(ip, address.port() ^ (COOKIE >> 16) as u16)
}

#[cfg(test)]
#[path = "stun_test.rs"]
mod tests;
