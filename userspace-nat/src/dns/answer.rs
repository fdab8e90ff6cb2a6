//! An upstream's answer: whether it is one, how long it may be kept, and what of it goes on.
use std::{net::IpAddr, ops::Range};

use thiserror::Error;

use super::{
    message::{Bits, HEADER_LEN, Header, Record, Type, word},
    name,
    query::Key,
};

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
pub(super) const MAX_TTL_S: u32 = 86_400;

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
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, u32)> {
        let count = word(&self.message, 6).unwrap_or(0);
        let question = name::end_of_plain(&self.message, HEADER_LEN).map(|end| end + 4);
        let mut at = question.unwrap_or(self.message.len());
        (0..count)
            .map_while(move |_| {
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
