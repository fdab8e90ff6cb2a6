//! Reading DNS messages (RFC 1035 section 4), as little of them as a forwarder needs.
//!
//! Nothing is decoded into records: a question becomes a cache key, an answer is copied record by
//! record ([`super::scrub`]). All reading is bounds-checked and ends after one pass. `hickory-proto`
//! decodes the same answer at a higher cost (see `measure` in the tests), and is the oracle that
//! this reader is tested against.
use std::ops::Range;

use super::name;

/// Length of a message's header, bytes.
pub const HEADER_LEN: usize = 12;
/// Largest answer that a client without EDNS takes by UDP, bytes (RFC 1035 section 4.2.1).
pub const PLAIN_UDP_LEN: usize = 512;

/// Bits of a header's second word.
#[derive(Debug)]
pub struct Bits;

impl Bits {
    /// Response.
    pub const QR: u16 = 0x8000;
    /// Kind of query; 0 is a plain one.
    pub const OPCODE: u16 = 0x7800;
    /// Authoritative answer.
    pub const AA: u16 = 0x0400;
    /// Truncated.
    pub const TC: u16 = 0x0200;
    /// Recursion desired.
    pub const RD: u16 = 0x0100;
    /// Recursion available.
    pub const RA: u16 = 0x0080;
    /// Authentic data (RFC 4035).
    pub const AD: u16 = 0x0020;
    /// Checking disabled (RFC 4035).
    pub const CD: u16 = 0x0010;
    /// Response code.
    pub const RCODE: u16 = 0x000f;
    /// DO, in an OPT record's flags (RFC 6891 section 6.1.4).
    pub const DO: u16 = 0x8000;
}

/// A response code (RFC 1035 section 4.1.1; `BADVERS` RFC 6891).
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rcode {
    /// The query was malformed.
    FormErr = 1,
    /// No answer could be had.
    ServFail = 2,
    /// The name does not exist.
    NxDomain = 3,
    /// The kind of query is not served.
    NotImp = 4,
    /// Refused by policy.
    Refused = 5,
    /// Unknown EDNS version.
    BadVers = 16,
}

/// Record types that the proxy must know.
#[derive(Debug)]
pub struct Type;

impl Type {
    /// IPv4 address.
    pub const A: u16 = 1;
    /// Another name for the owner.
    pub const CNAME: u16 = 5;
    /// Start of authority.
    pub const SOA: u16 = 6;
    /// Anything (RFC 1035 section 3.3.10).
    pub const NULL: u16 = 10;
    /// A name for an address (RFC 1035 section 3.3.12).
    pub const PTR: u16 = 12;
    /// Where mail goes (RFC 1035 section 3.3.9).
    pub const MX: u16 = 15;
    /// Text.
    pub const TXT: u16 = 16;
    /// IPv6 address.
    pub const AAAA: u16 = 28;
    /// Where a service is (RFC 2782).
    pub const SRV: u16 = 33;
    /// A rule to rewrite names (RFC 3403).
    pub const NAPTR: u16 = 35;
    /// Other names for all names beneath the owner (RFC 6672).
    pub const DNAME: u16 = 39;
    /// EDNS (RFC 6891).
    pub const OPT: u16 = 41;
    /// Signature (RFC 4034 section 3).
    pub const RRSIG: u16 = 46;
    /// What there is not (RFC 4034 section 4).
    pub const NSEC: u16 = 47;
    /// The same by hashes (RFC 5155).
    pub const NSEC3: u16 = 50;
    /// Where a service is, with addresses as hints (RFC 9460).
    pub const SVCB: u16 = 64;
    /// The same for HTTPS.
    pub const HTTPS: u16 = 65;
    /// Incremental zone transfer: many messages, not served.
    pub const IXFR: u16 = 251;
    /// Zone transfer: many messages, not served.
    pub const AXFR: u16 = 252;
    /// Any.
    pub const ANY: u16 = 255;
}

#[derive(Clone, Copy)]
pub(super) struct Header {
    pub(super) id: u16,
    pub(super) bits: u16,
    /// Questions, answers, authorities, additional records.
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

/// Where a record is, and what stands in its fixed part.
pub(super) struct Record {
    pub(super) owner: Range<usize>,
    pub(super) rtype: u16,
    pub(super) class: u16,
    /// Seconds; RFC 2181 section 8: with the top bit set, zero. (An OPT's is flags, kept as it is.)
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
}

/// The 16-bit word at an offset.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk::<2>()
        .map(|w| u16::from_be_bytes(*w))
}

#[cfg(test)]
#[path = "message_test.rs"]
mod tests;
