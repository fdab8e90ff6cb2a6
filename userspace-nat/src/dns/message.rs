//! Reading DNS messages (RFC 1035 section 4), as little of them as a forwarder needs.
//!
//! Nothing is decoded into records: a question becomes a cache key, an answer the offsets of its
//! TTLs and of what may be left out. All reading is bounds-checked and ends after one pass: no
//! compression pointer is followed, names are skipped. `hickory-proto` decodes the same answer at
//! several times the cost (see `measure` in the tests), and is the oracle that this reader is
//! tested against.
use std::ops::Range;

use thiserror::Error;

use super::name::{self, Name};

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
    /// Start of authority.
    pub const SOA: u16 = 6;
    /// IPv6 address.
    pub const AAAA: u16 = 28;
    /// EDNS (RFC 6891).
    pub const OPT: u16 = 41;
    /// Incremental zone transfer: many messages, not served.
    pub const IXFR: u16 = 251;
    /// Zone transfer: many messages, not served.
    pub const AXFR: u16 = 252;
    /// Any.
    pub const ANY: u16 = 255;
}

/// Why a guest's message was not taken as a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum QueryError {
    /// Too short for a header, or a response: nothing to answer.
    #[error("not a DNS query")]
    NotAQuery,
    /// To be answered with this code.
    #[error("DNS query to be answered with {0:?}")]
    Answer(Rcode),
}

/// EDNS as a query has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edns {
    /// Largest UDP answer the client takes, bytes.
    pub udp_len: u16,
    /// DO: send DNSSEC records.
    pub dnssec_ok: bool,
}

/// A guest's query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Query<'m> {
    /// Id.
    pub id: u16,
    /// The header's second word.
    pub bits: u16,
    /// The name asked for, as sent (wire form).
    pub name: &'m [u8],
    /// Type asked for.
    pub qtype: u16,
    /// Class asked for.
    pub qclass: u16,
    /// EDNS, if the client speaks it.
    pub edns: Option<Edns>,
}

impl<'m> Query<'m> {
    /// Reads a query with one question (RFC 9619), no records but an OPT.
    pub fn parse(message: &'m [u8]) -> Result<Self, QueryError> {
        let header = Header::read(message).ok_or(QueryError::NotAQuery)?;
        if header.bits & Bits::QR != 0 {
            return Err(QueryError::NotAQuery);
        }
        if header.bits & Bits::OPCODE != 0 {
            return Err(QueryError::Answer(Rcode::NotImp));
        }
        let form_err = QueryError::Answer(Rcode::FormErr);
        if header.counts[..3] != [1, 0, 0] {
            return Err(form_err);
        }
        let name_end = name::end_of_plain(message, HEADER_LEN).ok_or(form_err)?;
        let mut query = Self {
            id: header.id,
            bits: header.bits,
            name: &message[HEADER_LEN..name_end],
            qtype: word(message, name_end).ok_or(form_err)?,
            qclass: word(message, name_end + 2).ok_or(form_err)?,
            edns: None,
        };
        if matches!(query.qtype, Type::AXFR | Type::IXFR | Type::OPT) {
            return Err(QueryError::Answer(Rcode::NotImp));
        }
        let mut at = name_end + 4;
        for _ in 0..header.counts[3] {
            let record = Record::read(message, at).ok_or(form_err)?;
            at = record.data.end;
            if record.rtype != Type::OPT {
                // TSIG and SIG(0) sign the message as sent, which is not the one to go upstream.
                return Err(QueryError::Answer(Rcode::NotImp));
            }
            // RFC 6891 section 6.1.1: one OPT, owned by the root.
            if query.edns.is_some() || message[record.owner] != [0] {
                return Err(form_err);
            }
            if (record.ttl >> 16) & 0xff != 0 {
                return Err(QueryError::Answer(Rcode::BadVers));
            }
            query.edns = Some(Edns {
                udp_len: record.class,
                dnssec_ok: record.ttl as u16 & Bits::DO != 0,
            });
        }
        Ok(query)
    }

    /// Writes the cache key into `key`: what the answer depends on, and nothing else.
    /// The bits RD, AD, CD, EDNS and DO, the type, the class, and the name in lower case.
    pub fn write_key(&self, key: &mut Vec<u8>) {
        key.clear();
        let dnssec_ok = self.edns.is_some_and(|e| e.dnssec_ok);
        key.push(
            ((self.bits & Bits::RD) >> 8) as u8
                | (self.bits & (Bits::AD | Bits::CD)) as u8
                | u8::from(self.edns.is_some()) << 1
                | u8::from(dnssec_ok) << 2,
        );
        key.extend_from_slice(&self.qtype.to_be_bytes());
        key.extend_from_slice(&self.qclass.to_be_bytes());
        // Length octets are below 'A', so the name can be lowered as one string.
        key.extend(self.name.iter().map(u8::to_ascii_lowercase));
    }
}

/// A cache key, read back: the question as it goes upstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key<'k>(pub &'k [u8]);

impl<'k> Key<'k> {
    /// The name, in lower case.
    pub fn name(self) -> Name<'k> {
        Name(self.0.get(5..).unwrap_or(&[0]))
    }

    /// Type asked for.
    pub fn qtype(self) -> u16 {
        word(self.0, 1).unwrap_or(0)
    }

    /// The header bits that the query carries upstream.
    pub fn bits(self) -> u16 {
        let b = u16::from(self.0[0]);
        (b & 1) << 8 | b & (Bits::AD | Bits::CD)
    }

    /// Whether the query carries an OPT upstream, and with DO.
    pub fn edns(self) -> Option<bool> {
        (self.0[0] & 2 != 0).then_some(self.0[0] & 4 != 0)
    }

    /// Name, type and class as in a question section, the name in lower case.
    pub fn write_question(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0[5..]);
        out.extend_from_slice(&self.0[1..5]);
    }

    /// Whether the question section at the header's end is this key's question.
    fn is_question_of(self, message: &[u8]) -> bool {
        let name = self.name().0;
        let end = HEADER_LEN + name.len();
        message.get(HEADER_LEN..end).is_some_and(|n| n.eq_ignore_ascii_case(name))
            && message.get(end..end + 4) == self.0.get(1..5)
    }
}

/// Why a datagram or message from an upstream is no answer to the question sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AnswerError {
    /// Another id, another question, or no response: not for us, whoever sent it (RFC 5452
    /// section 9.1). The true answer may still come.
    #[error("not an answer to this question")]
    Mismatch,
    /// Ours, but it can't be read to its end.
    #[error("the answer is malformed")]
    Malformed,
}

/// An upstream's answer, ready to be kept and sent on: without id and OPT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The message. Its id is zero, its OPT is gone.
    pub message: Box<[u8]>,
    /// Where its TTLs are.
    pub ttls: Box<[u16]>,
    /// Where the additional section starts.
    pub additional: u16,
    /// The upper eight bits of the response code, from the OPT.
    pub extended_rcode: u8,
    /// Seconds that it may be cached; `None`: not at all.
    pub lifetime_s: Option<u32>,
}

/// RFC 2308 section 5: a negative answer lives at most this long, seconds.
const MAX_NEGATIVE_TTL_S: u32 = 3 * 3600;
/// A positive one (RFC 8767 section 4 suggests days to weeks; hosts move).
const MAX_TTL_S: u32 = 86_400;

impl Answer {
    /// Checks that `message` answers `key` under `id`, and reads it.
    pub fn parse(message: &[u8], id: u16, key: Key<'_>) -> Result<Self, AnswerError> {
        let header = Header::read(message).ok_or(AnswerError::Mismatch)?;
        if header.id != id || header.bits & (Bits::QR | Bits::OPCODE) != Bits::QR {
            return Err(AnswerError::Mismatch);
        }
        let rcode = header.bits & Bits::RCODE;
        // Servers that can't or won't read a query may leave the question out of the refusal.
        if header.counts == [0; 4] && matches!(rcode, 1 | 2 | 4 | 5) {
            return Ok(Self::bare(header.bits, key));
        }
        if header.counts[0] != 1 || !key.is_question_of(message) {
            return Err(AnswerError::Mismatch);
        }
        let truncated = header.bits & Bits::TC != 0;
        Self::read(message, header, key)
            // Some servers cut a truncated message in the middle of a record.
            .or_else(|| truncated.then(|| Self::bare(header.bits, key)))
            .ok_or(AnswerError::Malformed)
    }

    /// The response code, without the extended bits.
    pub fn rcode(&self) -> u16 {
        word(&self.message, 2).unwrap_or(0) & Bits::RCODE
    }

    /// Whether it was truncated upstream.
    pub fn is_truncated(&self) -> bool {
        word(&self.message, 2).unwrap_or(0) & Bits::TC != 0
    }

    /// Addresses (A, AAAA) in the answer section with their TTL, seconds.
    pub fn addresses(&self) -> impl Iterator<Item = (std::net::IpAddr, u32)> {
        let count = word(&self.message, 6).unwrap_or(0);
        let question = name::end_of_plain(&self.message, HEADER_LEN).map(|end| end + 4);
        let mut at = question.unwrap_or(self.message.len());
        (0..count).map_while(move |_| {
            let record = Record::read(&self.message, at)?;
            at = record.data.end;
            let data = &self.message[record.data];
            let address = match (record.rtype, record.class) {
                (Type::A, 1) => <[u8; 4]>::try_from(data).ok().map(Into::into),
                (Type::AAAA, 1) => <[u8; 16]>::try_from(data).ok().map(Into::into),
                _ => None,
            };
            Some(address.map(|a| (a, record.ttl)))
        })
        .flatten()
    }

    /// No records.
    fn bare(bits: u16, key: Key<'_>) -> Self {
        let mut message = vec![0; HEADER_LEN];
        message[2..4].copy_from_slice(&bits.to_be_bytes());
        message[5] = 1;
        key.write_question(&mut message);
        Self {
            additional: message.len() as u16,
            message: message.into(),
            ttls: Box::default(),
            extended_rcode: 0,
            lifetime_s: None,
        }
    }

    fn read(message: &[u8], header: Header, key: Key<'_>) -> Option<Self> {
        let mut at = HEADER_LEN + key.name().0.len() + 4;
        let mut ttls = Vec::new();
        let mut answer_ttl = u32::MAX;
        let mut answered = false;
        let mut soa_ttl = None;
        let mut opt: Option<(Range<usize>, u32)> = None;
        let mut additional = at;
        for section in 1..4 {
            if section == 3 {
                additional = at;
            }
            for _ in 0..header.counts[section] {
                let record = Record::read(message, at)?;
                let ttl = record.ttl;
                match (section, record.rtype) {
                    (_, Type::OPT) => {
                        if section != 3 || opt.is_some() {
                            return None;
                        }
                        opt = Some((at..record.data.end, ttl));
                        at = record.data.end;
                        continue;
                    }
                    (1, rtype) => {
                        answer_ttl = answer_ttl.min(ttl);
                        answered |= rtype == key.qtype() || key.qtype() == Type::ANY;
                    }
                    (2, Type::SOA) => {
                        let data = &message[record.data.clone()];
                        // RFC 2308 section 5: the lesser of the SOA's TTL and its last field.
                        let minimum = data.last_chunk::<4>().filter(|_| data.len() >= 22)?;
                        soa_ttl = Some(ttl.min(u32::from_be_bytes(*minimum)));
                    }
                    _ => {}
                }
                ttls.push(u16::try_from(record.ttl_at).ok()?);
                at = record.data.end;
            }
        }
        let mut out = message[..at].to_vec();
        out[..2].fill(0);
        for &at in &ttls {
            // RFC 2181 section 8: a TTL with its top bit set is zero.
            let at = usize::from(at);
            if out[at] & 0x80 != 0 {
                out[at..at + 4].fill(0);
            }
        }
        let mut extended_rcode = 0;
        if let Some((range, ttl)) = opt {
            extended_rcode = (ttl >> 24) as u8;
            let records = header.counts[3] - 1;
            if range.end == at {
                out.truncate(range.start);
                out[10..12].copy_from_slice(&records.to_be_bytes());
            } else {
                // Compression pointers behind the OPT would dangle: leave the section out, which
                // is only ever a courtesy.
                out.truncate(additional);
                out[10..12].fill(0);
                ttls.retain(|&t| usize::from(t) < additional);
            }
        }
        let rcode = header.bits & Bits::RCODE;
        let whole = header.bits & Bits::TC == 0 && extended_rcode == 0;
        let lifetime_s = match rcode {
            _ if !whole => None,
            0 if answered => Some(answer_ttl.min(MAX_TTL_S)),
            0 | 3 => soa_ttl.map(|ttl| ttl.min(answer_ttl).min(MAX_NEGATIVE_TTL_S)),
            _ => None,
        };
        Some(Self {
            message: out.into(),
            ttls: ttls.into(),
            additional: u16::try_from(additional).ok()?,
            extended_rcode,
            lifetime_s: lifetime_s.filter(|&ttl| ttl > 0),
        })
    }
}

#[derive(Clone, Copy)]
struct Header {
    id: u16,
    bits: u16,
    /// Questions, answers, authorities, additional records.
    counts: [u16; 4],
}

impl Header {
    fn read(message: &[u8]) -> Option<Self> {
        let h = message.first_chunk::<HEADER_LEN>()?;
        let w = |i: usize| u16::from_be_bytes([h[i], h[i + 1]]);
        Some(Self { id: w(0), bits: w(2), counts: [w(4), w(6), w(8), w(10)] })
    }
}

struct Record {
    owner: Range<usize>,
    rtype: u16,
    class: u16,
    ttl_at: usize,
    /// Seconds; RFC 2181 section 8: with the top bit set, zero. (An OPT's is flags, kept as it is.)
    ttl: u32,
    data: Range<usize>,
}

impl Record {
    fn read(message: &[u8], at: usize) -> Option<Self> {
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
            ttl_at: fixed + 4,
            ttl: if rtype != Type::OPT && ttl > i32::MAX as u32 { 0 } else { ttl },
            data,
        })
    }
}

/// The 16-bit word at an offset.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk::<2>().map(|w| u16::from_be_bytes(*w))
}

#[cfg(test)]
#[path = "message_test.rs"]
mod tests;
