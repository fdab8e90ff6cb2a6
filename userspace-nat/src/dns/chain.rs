//! What an answer says of the name asked for: the names it leads through, and the addresses at
//! the end.
//!
//! From the name asked, CNAMEs of the answer section are followed; A and AAAA count where the
//! owner is the last name reached. SVCB and HTTPS records (RFC 9460) lead on to their target, and
//! their address hints count like addresses of it. Everything else in a message opens nothing.
use std::net::IpAddr;

use super::{
    answer::Answer,
    message::{HEADER_LEN, Record, Type, word},
    name::{self, Name},
};

/// Most records of an answer that are looked at; an answer with more is not understood.
const MAX_RECORDS: u16 = 512;
/// Most names that an answer may lead through.
const MAX_STEPS: usize = 16;
/// SvcParamKeys of address hints, RFC 9460 section 14.3.2.
const IPV4_HINT: u16 = 4;
const IPV6_HINT: u16 = 6;

/// The way of an answer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Chain {
    /// The names it leads to beside the one asked for, in wire form and lower case.
    pub steps: Vec<Box<[u8]>>,
    /// Addresses, with the least TTL on the way to them, seconds.
    pub addresses: Vec<(IpAddr, u32)>,
}

impl Chain {
    /// Reads the way from `asked` (in lower case). `None`: it leads in a circle, or has more names
    /// or records than an honest one.
    pub fn of(answer: &Answer, asked: Name<'_>) -> Option<Self> {
        let message = &*answer.message;
        let count = word(message, 6)?;
        if count > MAX_RECORDS {
            return None;
        }
        let mut at = name::end_of_plain(message, HEADER_LEN)? + 4;
        let mut records = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let record = Record::read(message, at)?;
            let owner = name::expand(message, at)?;
            at = record.data.end;
            if record.class == 1 {
                records.push((owner, record));
            }
        }
        let mut chain = Self::default();
        let mut ttl = u32::MAX;
        let mut current: Box<[u8]> = asked.0.into();
        let cname = |owner: &[u8]| {
            let fits = |(o, r): &&(Box<[u8]>, Record)| r.rtype == Type::CNAME && **o == *owner;
            records.iter().find(fits)
        };
        while let Some((_, record)) = cname(&current) {
            if chain.steps.len() == MAX_STEPS {
                return None;
            }
            ttl = ttl.min(record.ttl);
            current = name::expand(message, record.data.start)?;
            chain.steps.push(current.clone());
        }
        for (_, record) in records.iter().filter(|(owner, _)| *owner == current) {
            let ttl = ttl.min(record.ttl);
            let data = &message[record.data.clone()];
            match record.rtype {
                Type::A => {
                    let address = <[u8; 4]>::try_from(data).ok()?;
                    chain.addresses.push((address.into(), ttl));
                }
                Type::AAAA => {
                    let address = <[u8; 16]>::try_from(data).ok()?;
                    chain.addresses.push((address.into(), ttl));
                }
                Type::SVCB | Type::HTTPS => chain.service(message, record, ttl)?,
                _ => {}
            }
        }
        Some(chain)
    }

    /// Takes in a service's target and hints (RFC 9460 section 2.2).
    fn service(&mut self, message: &[u8], record: &Record, ttl: u32) -> Option<()> {
        let target_at = record.data.start + 2;
        let target = name::expand(message, target_at)?;
        // The root stands for the owner.
        if *target != [0] && !self.steps.contains(&target) {
            if self.steps.len() >= 2 * MAX_STEPS {
                return None;
            }
            self.steps.push(target);
        }
        let params_at = name::end(message, target_at)?;
        let mut params = message.get(params_at..record.data.end)?;
        while !params.is_empty() {
            let (key, len) = (word(params, 0)?, usize::from(word(params, 2)?));
            let value = params.get(4..4 + len)?;
            match key {
                IPV4_HINT => {
                    let (hints, rest) = value.as_chunks::<4>();
                    if !rest.is_empty() {
                        return None;
                    }
                    self.addresses
                        .extend(hints.iter().map(|a| (IpAddr::from(*a), ttl)));
                }
                IPV6_HINT => {
                    let (hints, rest) = value.as_chunks::<16>();
                    if !rest.is_empty() {
                        return None;
                    }
                    self.addresses
                        .extend(hints.iter().map(|a| (IpAddr::from(*a), ttl)));
                }
                _ => {}
            }
            params = &params[4 + len..];
        }
        Some(())
    }
}

#[cfg(test)]
#[path = "chain_test.rs"]
pub(crate) mod tests;
