//! Parser of DNS messages (RFC 1035 section 4), limited to what a forwarder needs.
//!
//! It does not decode records: a question becomes a cache key, and an answer is copied record by
//! record ([`super::scrub`]). All reads are bounds-checked and end after one pass. `hickory-proto`
//! decodes the same answer at a higher cost (see `measure` in the tests), and is the oracle of this
//! parser's tests.
use std::{net::IpAddr, ops::Range};

use super::name;

/// Length of a message's header, bytes.
pub const HEADER_LEN: usize = 12;
/// Largest answer that a client without EDNS takes by UDP, bytes (RFC 1035 section 4.2.1).
pub const PLAIN_UDP_LEN: usize = 512;

/// Bits of the header's second word.
#[derive(Debug)]
pub struct Bits;

impl Bits {
    /// The message is a response.
    pub const QR: u16 = 0x8000;
    /// Mask of the kind of query; 0 is a standard query.
    pub const OPCODE: u16 = 0x7800;
    /// The message was truncated.
    pub const TC: u16 = 0x0200;
    /// The client desires recursion.
    pub const RD: u16 = 0x0100;
    /// The server offers recursion.
    pub const RA: u16 = 0x0080;
    /// The data are authentic (RFC 4035).
    pub const AD: u16 = 0x0020;
    /// The client disables checking (RFC 4035).
    pub const CD: u16 = 0x0010;
    /// Mask of the response code.
    pub const RCODE: u16 = 0x000f;
    /// DNSSEC OK, in the flags of an OPT record (RFC 6891 section 6.1.4).
    pub const DO: u16 = 0x8000;
}

/// Response code (RFC 1035 section 4.1.1; `BADVERS`: RFC 6891).
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rcode {
    /// The query was malformed.
    FormErr = 1,
    /// The resolver could not obtain an answer.
    ServFail = 2,
    /// The name does not exist.
    NxDomain = 3,
    /// The kind of query is not supported.
    NotImp = 4,
    /// The policy refuses an answer.
    Refused = 5,
    /// The EDNS version is not supported.
    BadVers = 16,
}

/// Record types that the proxy handles.
#[derive(Debug)]
pub struct Type;

impl Type {
    /// IPv4 address (RFC 1035 section 3.4.1).
    pub const A: u16 = 1;
    /// Canonical name: the owner is an alias of it.
    pub const CNAME: u16 = 5;
    /// Start of authority (RFC 1035 section 3.3.13).
    pub const SOA: u16 = 6;
    /// Arbitrary data (RFC 1035 section 3.3.10).
    pub const NULL: u16 = 10;
    /// Pointer from an address to a name (RFC 1035 section 3.3.12).
    pub const PTR: u16 = 12;
    /// Mail exchange (RFC 1035 section 3.3.9).
    pub const MX: u16 = 15;
    /// Text strings (RFC 1035 section 3.3.14).
    pub const TXT: u16 = 16;
    /// IPv6 address (RFC 3596).
    pub const AAAA: u16 = 28;
    /// Location of a service (RFC 2782).
    pub const SRV: u16 = 33;
    /// Rule to rewrite names (RFC 3403).
    pub const NAPTR: u16 = 35;
    /// Alias for all names below the owner (RFC 6672).
    pub const DNAME: u16 = 39;
    /// Pseudo-record of EDNS (RFC 6891).
    pub const OPT: u16 = 41;
    /// DNSSEC signature (RFC 4034 section 3).
    pub const RRSIG: u16 = 46;
    /// Proof that a name or type does not exist (RFC 4034 section 4).
    pub const NSEC: u16 = 47;
    /// Proof of non-existence by hashed names (RFC 5155).
    pub const NSEC3: u16 = 50;
    /// Location of a service, with address hints (RFC 9460).
    pub const SVCB: u16 = 64;
    /// As SVCB, for HTTPS (RFC 9460).
    pub const HTTPS: u16 = 65;
    /// Incremental zone transfer, which takes many messages; not supported.
    pub const IXFR: u16 = 251;
    /// Zone transfer, which takes many messages; not supported.
    pub const AXFR: u16 = 252;
    /// Query for records of any type.
    pub const ANY: u16 = 255;
}

#[derive(Clone, Copy)]
pub(super) struct Header {
    pub(super) id: u16,
    pub(super) bits: u16,
    /// Number of questions, answers, authority records and additional records.
    pub(super) counts: [u16; 4],
}

impl Header {
    pub(super) fn read(message: &[u8]) -> Option<Self> {
        let h = message.first_chunk::<HEADER_LEN>()?;
        let w = |i: usize| u16::from_be_bytes([h[i], h[i + 1]]);
        Some(Self {
            id: w(0),
            bits: w(2),
            counts: [w(4), w(6), w(8), w(10)],
        })
    }
}

/// Position of a record in the message, and its fixed fields.
pub(super) struct Record {
    pub(super) owner: Range<usize>,
    pub(super) rtype: u16,
    pub(super) class: u16,
    /// TTL, seconds; zero if the top bit is set (RFC 2181 section 8). In an OPT record this field
    /// holds flags, which are kept unchanged.
    pub(super) ttl: u32,
    pub(super) data: Range<usize>,
}

impl Record {
    pub(super) fn read(message: &[u8], at: usize) -> Option<Self> {
        let fixed = name::end(message, at)?;
        let f = message.get(fixed..)?.first_chunk::<10>()?;
        let rtype = u16::from_be_bytes([f[0], f[1]]);
        let ttl = u32::from_be_bytes([f[4], f[5], f[6], f[7]]);
        let data = fixed + 10..fixed + 10 + usize::from(u16::from_be_bytes([f[8], f[9]]));
        message.get(data.clone())?;
        Some(Self {
            owner: at..fixed,
            rtype,
            class: u16::from_be_bytes([f[2], f[3]]),
            ttl: if rtype != Type::OPT && ttl > i32::MAX as u32 {
                0
            } else {
                ttl
            },
            data,
        })
    }

    /// Address in an A or AAAA record; `None` in another, or if its length is wrong.
    pub(super) fn address(&self, message: &[u8]) -> Option<IpAddr> {
        let data = message.get(self.data.clone())?;
        match self.rtype {
            Type::A => <[u8; 4]>::try_from(data).ok().map(Into::into),
            Type::AAAA => <[u8; 16]>::try_from(data).ok().map(Into::into),
            _ => None,
        }
    }
}

/// The big-endian 16-bit word at an offset; `None` if it is out of bounds.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk::<2>()
        .map(|w| u16::from_be_bytes(*w))
}

#[cfg(test)]
#[path = "message_test.rs"]
mod tests;
