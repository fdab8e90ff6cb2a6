//! The part of the DNS wire format (RFC 1035, 4) that a test's server and client need. It is
//! written by hand, so that they share no parser with the code under test.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Types of DNS records.
#[allow(missing_docs, reason = "names of RFC 1035, 3596 and 9460")]
pub mod types {
    pub const A: u16 = 1;
    pub const CNAME: u16 = 5;
    pub const TXT: u16 = 16;
    pub const AAAA: u16 = 28;
    pub const HTTPS: u16 = 65;
}

/// A record of an answer. Data stays as it is on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Type of the record.
    pub kind: u16,
    /// Time to live, seconds.
    pub ttl: u32,
    /// Data of the record.
    pub data: Vec<u8>,
    /// Owner name of the record; `None`: the question's name. Not read from answers.
    pub owner: Option<String>,
}

impl Record {
    /// A record of any type.
    pub fn new(kind: u16, data: Vec<u8>, ttl: u32) -> Record {
        Record {
            kind,
            ttl,
            data,
            owner: None,
        }
    }

    /// Returns the same record with another owner name than the question's.
    pub fn of(self, owner: &str) -> Record {
        let owner = Some(owner.to_owned());
        Record { owner, ..self }
    }

    /// Makes an A record.
    pub fn a(address: Ipv4Addr, ttl: u32) -> Record {
        Record::new(types::A, address.octets().to_vec(), ttl)
    }

    /// Makes an A or AAAA record.
    pub fn of_address(address: impl Into<IpAddr>, ttl: u32) -> Record {
        match address.into() {
            IpAddr::V4(address) => Record::a(address, ttl),
            IpAddr::V6(address) => Record::new(types::AAAA, address.octets().to_vec(), ttl),
        }
    }

    /// A TXT record; text above 255 bytes is split into several strings.
    pub fn txt(text: &[u8], ttl: u32) -> Record {
        let data = text
            .chunks(255)
            .flat_map(|part| [&[part.len() as u8], part].concat())
            .collect();
        Record::new(types::TXT, data, ttl)
    }

    /// Makes a CNAME record.
    pub fn cname(name: &str, ttl: u32) -> Record {
        Record::new(types::CNAME, encode_name(name), ttl)
    }

    /// An HTTPS record (RFC 9460) of priority 1 with an ipv4hint or ipv6hint; the target `""` is the
    /// owner.
    pub fn https(target: &str, hint: impl Into<IpAddr>, ttl: u32) -> Record {
        const IPV4_HINT: [u8; 4] = [0, 4, 0, 4];
        const IPV6_HINT: [u8; 4] = [0, 6, 0, 16];
        let hint = match hint.into() {
            IpAddr::V4(address) => [&IPV4_HINT[..], &address.octets()].concat(),
            IpAddr::V6(address) => [&IPV6_HINT[..], &address.octets()].concat(),
        };
        let data = [&[0, 1], &encode_name(target)[..], &hint].concat();
        Record::new(types::HTTPS, data, ttl)
    }

    /// The address, if it is an A record.
    pub fn address(&self) -> Option<Ipv4Addr> {
        let octets: [u8; 4] = self.data.as_slice().try_into().ok()?;
        (self.kind == types::A).then(|| octets.into())
    }

    /// The address, if it is an A or AAAA record.
    pub fn ip(&self) -> Option<IpAddr> {
        let ipv6 = || <[u8; 16]>::try_from(self.data.as_slice()).ok();
        match self.kind {
            types::A => self.address().map(IpAddr::from),
            types::AAAA => ipv6().map(|octets| Ipv6Addr::from(octets).into()),
            _ => None,
        }
    }
}

/// A DNS question, with the relevant header fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Id of the transaction.
    pub id: u16,
    /// Name, in the case it was asked in, no dot at its end.
    pub name: String,
    /// Type of the wanted record.
    pub kind: u16,
}

impl Question {
    /// The query, recursion desired.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.id.to_be_bytes().to_vec();
        out.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&encode_name(&self.name));
        out.extend_from_slice(&self.kind.to_be_bytes());
        out.extend_from_slice(&[0, 1]);
    }

    /// Reads a query; `None` when it is none, or not of one question.
    pub fn parse(message: &[u8]) -> Option<Question> {
        let header: &[u8; 12] = message.first_chunk()?;
        if header[2] & 0x80 != 0 || header[4..6] != [0, 1] {
            return None;
        }
        parse_question(message).map(|(question, _)| question)
    }
}

/// Answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The question, with its id.
    pub question: Question,
    /// Response code: 0 NOERROR, 2 SERVFAIL, 3 NXDOMAIN, 5 REFUSED.
    pub code: u8,
    /// The TC bit: ask again over TCP.
    pub truncated: bool,
    /// Records of the answer section.
    pub records: Vec<Record>,
}

impl Reply {
    /// Encodes the answer as a DNS message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.question.id.to_be_bytes().to_vec();
        let truncated = if self.truncated { 2 } else { 0 };
        out.extend_from_slice(&[0x81 | truncated, 0x80 | self.code & 0xf, 0, 1]);
        out.extend_from_slice(&(self.records.len() as u16).to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        self.question.write(&mut out);
        for record in &self.records {
            match &record.owner {
                Some(owner) => out.extend_from_slice(&encode_name(owner)),
                None => out.extend_from_slice(&[0xc0, 12]), // the name of the question
            }
            out.extend_from_slice(&record.kind.to_be_bytes());
            out.extend_from_slice(&[0, 1]);
            out.extend_from_slice(&record.ttl.to_be_bytes());
            out.extend_from_slice(&(record.data.len() as u16).to_be_bytes());
            out.extend_from_slice(&record.data);
        }
        out
    }

    /// Reads an answer; `None` when it is none or is cut short.
    pub fn parse(message: &[u8]) -> Option<Reply> {
        let header: &[u8; 12] = message.first_chunk()?;
        if header[2] & 0x80 == 0 || header[4..6] != [0, 1] {
            return None;
        }
        let (question, mut at) = parse_question(message)?;
        let count = u16::from_be_bytes([header[6], header[7]]);
        let mut records = Vec::new();
        for _ in 0..count {
            at = skip_name(message, at)?;
            let fixed: &[u8; 10] = message.get(at..)?.first_chunk()?;
            let len = usize::from(u16::from_be_bytes([fixed[8], fixed[9]]));
            let data = message.get(at + 10..at + 10 + len)?.to_vec();
            let kind = u16::from_be_bytes([fixed[0], fixed[1]]);
            let ttl = u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]);
            records.push(Record::new(kind, data, ttl));
            at += 10 + len;
        }
        Some(Reply {
            question,
            code: header[3] & 0xf,
            truncated: header[2] & 2 != 0,
            records,
        })
    }
}

/// Labels with their lengths and the root.
fn encode_name(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        out.push(label.len().min(63) as u8);
        out.extend_from_slice(&label.as_bytes()[..label.len().min(63)]);
    }
    out.push(0);
    out
}

fn parse_question(message: &[u8]) -> Option<(Question, usize)> {
    let (mut at, mut labels) = (12, Vec::new());
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1;
        match len {
            0 => break,
            1..=63 => labels.push(String::from_utf8_lossy(message.get(at..at + len)?).into_owned()),
            _ => return None,
        }
        at += len;
    }
    let kind = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
    let id = u16::from_be_bytes([message[0], message[1]]);
    Some((
        Question {
            id,
            name: labels.join("."),
            kind,
        },
        at + 4,
    ))
}

fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            len @ 1..=63 => at += 1 + usize::from(len),
            0xc0.. => return Some(at + 2),
            _ => return None,
        }
    }
}

#[cfg(test)]
#[path = "dns_wire_test.rs"]
mod tests;
