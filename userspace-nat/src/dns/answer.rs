//! Answers from upstream resolvers: validation, lifetime, and the records that are passed on.
use std::net::IpAddr;

use thiserror::Error;

use super::{
    message::{Bits, HEADER_LEN, Header, Record, Type, word},
    name,
    query::Key,
    scrub::{Omitted, scrub},
};

/// Reason for which an upstream's message is not an answer to the query.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AnswerError {
    /// The message has another id or question, or is no response. It is ignored, whoever sent it
    /// (RFC 5452 section 9.1), because the true answer may still come.
    #[error("not an answer to this question")]
    Mismatch,
    /// The message answers the query, but cannot be parsed to its end.
    #[error("the answer is malformed")]
    Malformed,
}

/// An upstream's answer, ready to be cached and sent: without id and OPT, and without records that
/// do not belong to the question ([`super::scrub`]).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The DNS message, with an id of zero.
    pub message: Box<[u8]>,
    /// Offsets of the TTL fields in the message, bytes.
    pub ttls: Box<[u16]>,
    /// Upper eight bits of the response code, from the OPT record.
    pub extended_rcode: u8,
    /// Time for which the answer may be cached, seconds; `None` if it may not.
    pub lifetime_s: Option<u32>,
}

/// Longest lifetime of a negative answer, seconds (RFC 2308 section 5).
const MAX_NEGATIVE_TTL_S: u32 = 3 * 3600;
/// Longest lifetime of a positive answer, seconds. RFC 8767 section 4 suggests days to weeks; hosts
/// move.
pub const MAX_TTL_S: u32 = 86_400;

impl Answer {
    /// Checks that `message` answers the question `key` under `id`, and parses it.
    ///
    /// # Errors
    /// If it does not answer the question, or is malformed.
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
        // RFC 2181 section 9: what came of a truncated answer is of no use. Some servers cut it in
        // the middle of a record.
        if header.bits & Bits::TC != 0 {
            return Ok(Self::bare(header.bits, key));
        }
        Self::read(message, &header, key, Omitted::default()).ok_or(AnswerError::Malformed)
    }

    /// Returns the same answer, marked as not to be cached.
    pub(super) fn not_kept(self) -> Self {
        Self {
            lifetime_s: None,
            ..self
        }
    }

    /// Returns the same answer without the parameter `ech` in SVCB and HTTPS records.
    pub fn without_ech(self, key: Key<'_>) -> Self {
        self.without(
            key,
            Omitted {
                ech: true,
                ..Omitted::default()
            },
        )
    }

    /// Returns the same answer without IPv6 addresses as hints in SVCB and HTTPS records.
    pub fn without_ipv6_hints(self, key: Key<'_>) -> Self {
        self.without(
            key,
            Omitted {
                ipv6_hints: true,
                ..Omitted::default()
            },
        )
    }

    fn without(self, key: Key<'_>, omitted: Omitted) -> Self {
        let Some(header) = Header::read(&self.message).filter(|_| self.has_services()) else {
            return self;
        };
        let extended_rcode = self.extended_rcode;
        let lifetime_s = self.lifetime_s;
        match Self::read(&self.message, &header, key, omitted) {
            Some(answer) => Self {
                extended_rcode,
                lifetime_s,
                ..answer
            },
            // It was read before, and what is left out makes it no longer.
            None => Self::bare(header.bits, key),
        }
    }

    /// Response code, without the extended bits.
    pub fn rcode(&self) -> u16 {
        word(&self.message, 2).unwrap_or(0) & Bits::RCODE
    }

    /// Whether the upstream truncated the answer (TC).
    pub fn is_truncated(&self) -> bool {
        word(&self.message, 2).unwrap_or(0) & Bits::TC != 0
    }

    /// Addresses in the A and AAAA records of the answer section, with their TTLs in seconds.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, u32)> {
        let records = self.records().filter(|record| record.class == 1);
        records.filter_map(|record| Some((record.address(&self.message)?, record.ttl)))
    }

    /// Records of the answer section.
    fn records(&self) -> impl Iterator<Item = Record> {
        let question = name::end_of_plain(&self.message, HEADER_LEN).map(|end| end + 4);
        let mut at = question.unwrap_or(self.message.len());
        let count = word(&self.message, 6).unwrap_or(0);
        (0..count).map_while(move |_| {
            let record = Record::read(&self.message, at)?;
            at = record.data.end;
            Some(record)
        })
    }

    /// An answer without records.
    fn bare(bits: u16, key: Key<'_>) -> Self {
        let mut message = vec![0; HEADER_LEN];
        message[2..4].copy_from_slice(&bits.to_be_bytes());
        message[5] = 1;
        key.write_question(&mut message);
        Self {
            message: message.into(),
            ttls: Box::default(),
            extended_rcode: 0,
            lifetime_s: None,
        }
    }

    fn read(message: &[u8], header: &Header, key: Key<'_>, omitted: Omitted) -> Option<Self> {
        let scrubbed = scrub(message, header, key, omitted)?;
        let answer_ttl = scrubbed.answer_ttl;
        let lifetime_s = match header.bits & Bits::RCODE {
            _ if scrubbed.extended_rcode != 0 => None,
            0 if scrubbed.answered => Some(answer_ttl.min(MAX_TTL_S)),
            0 | 3 => scrubbed
                .negative_ttl
                .map(|ttl| ttl.min(answer_ttl).min(MAX_NEGATIVE_TTL_S)),
            _ => None,
        };
        Some(Self {
            message: scrubbed.message.into(),
            ttls: scrubbed.ttls.into(),
            extended_rcode: scrubbed.extended_rcode,
            lifetime_s: lifetime_s.filter(|&ttl| ttl > 0),
        })
    }

    /// Whether the answer section has SVCB or HTTPS records.
    pub(super) fn has_services(&self) -> bool {
        self.records()
            .any(|record| matches!(record.rtype, Type::SVCB | Type::HTTPS))
    }
}
