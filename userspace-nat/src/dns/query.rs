//! A guest's query, and the cache key of its answer.
use thiserror::Error;

use super::{
    message::{Bits, HEADER_LEN, Header, Rcode, Record, Type, word},
    name::{self, Name},
};

/// Class of the Internet (RFC 1035 section 3.2.4).
const CLASS_IN: u16 = 1;

/// Reason for which a guest's message is not accepted as a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum QueryError {
    /// The message is too short for a header, or is a response. It gets no reply.
    #[error("not a DNS query")]
    NotAQuery,
    /// The message gets a reply with this code.
    #[error("DNS query to be answered with {0:?}")]
    Answer(Rcode),
}

/// EDNS fields of a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edns {
    /// Largest UDP answer that the client accepts, bytes.
    pub udp_len: u16,
    /// Whether the client wants DNSSEC records (DO).
    pub dnssec_ok: bool,
}

/// A guest's query, parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Query<'m> {
    /// Id of the message.
    pub id: u16,
    /// Second word of the header: flags, opcode and response code.
    pub bits: u16,
    /// The name asked for, as sent (wire form).
    pub name: &'m [u8],
    /// Record type asked for.
    pub qtype: u16,
    /// Record class asked for.
    pub qclass: u16,
    /// EDNS fields; `None` if the client does not use EDNS.
    pub edns: Option<Edns>,
}

impl<'m> Query<'m> {
    /// Parses a query with one question (RFC 9619) and no records except an OPT.
    ///
    /// # Errors
    /// If the message is not such a query; the error tells whether it gets a reply.
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
        // Other classes than IN have nothing for a guest, and two octets to say something by.
        let transfer = matches!(query.qtype, Type::AXFR | Type::IXFR | Type::OPT);
        if transfer || query.qclass != CLASS_IN {
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

    /// Writes the cache key into `key`. It contains exactly the fields on which the answer depends:
    /// the view, the bits RD, AD, CD, EDNS and DO, the type, the class, and the name in lower case.
    pub fn write_key(&self, view: u32, key: &mut Vec<u8>) {
        key.clear();
        let dnssec_ok = self.edns.is_some_and(|e| e.dnssec_ok);
        key.extend_from_slice(&view.to_be_bytes());
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

/// Name, as people write it, and type of the first question of a message that need not be a query
/// otherwise; `None` if there is none that can be read.
pub(super) fn question_of(message: &[u8]) -> Option<(String, u16)> {
    let header = Header::read(message).filter(|header| header.counts[0] > 0)?;
    let is_query = header.bits & Bits::OPCODE == 0;
    let end = name::end_of_plain(message, HEADER_LEN).filter(|_| is_query)?;
    let name = message[HEADER_LEN..end].to_ascii_lowercase();
    Some((Name(&name).without_dot(), word(message, end)?))
}

/// Offsets of a key's parts: view, flags, type, class, name.
const FLAGS: usize = 4;
const QTYPE: usize = 5;
const QCLASS: usize = 7;
const NAME: usize = 9;

/// A cache key, which also describes the upstream query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key<'k>(pub &'k [u8]);

impl<'k> Key<'k> {
    /// The name in lower case.
    pub fn name(self) -> Name<'k> {
        Name(self.0.get(NAME..).unwrap_or(&[0]))
    }

    /// Record type asked for.
    pub fn qtype(self) -> u16 {
        word(self.0, QTYPE).unwrap_or(0)
    }

    /// Record class asked for.
    pub fn qclass(self) -> u16 {
        word(self.0, QCLASS).unwrap_or(0)
    }

    /// The part of the key that determines the upstream query: all but the view.
    pub fn question(self) -> &'k [u8] {
        self.0.get(FLAGS..).unwrap_or(&[])
    }

    /// Header bits of the upstream query.
    pub fn bits(self) -> u16 {
        let b = u16::from(self.flags());
        (b & 1) << 8 | b & (Bits::AD | Bits::CD)
    }

    /// Whether the upstream query has DO set; `None` if it has no OPT.
    pub fn edns(self) -> Option<bool> {
        (self.flags() & 2 != 0).then_some(self.flags() & 4 != 0)
    }

    /// Appends the question section: name in lower case, type and class.
    pub fn write_question(self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.name().0);
        out.extend_from_slice(self.kind());
    }

    /// Type and class, in the format of a question section.
    pub(super) fn kind(self) -> &'k [u8] {
        self.0.get(QTYPE..NAME).unwrap_or(&[0; NAME - QTYPE])
    }

    /// Whether the question section of a message is this key's question.
    pub(super) fn is_question_of(self, message: &[u8]) -> bool {
        let name = self.name().0;
        let end = HEADER_LEN + name.len();
        message
            .get(HEADER_LEN..end)
            .is_some_and(|n| n.eq_ignore_ascii_case(name))
            && message.get(end..end + 4) == Some(self.kind())
    }

    fn flags(self) -> u8 {
        self.0.get(FLAGS).copied().unwrap_or(0)
    }
}
