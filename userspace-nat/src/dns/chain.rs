//! Chain of names in an answer: from the name asked for, through aliases, to addresses.
//!
//! The chain follows CNAMEs of the answer section from the name asked for. A and AAAA records count
//! if their owner is the last name of the chain. SVCB and HTTPS records (RFC 9460) continue it at
//! their target, and their address hints count as addresses of the target. No other record opens an
//! address.
use std::net::IpAddr;

use super::{
    answer::Answer,
    message::{HEADER_LEN, Record, Type, word},
    name::{self, Name},
};

/// Most records of an answer that are examined. An answer with more is rejected.
const MAX_RECORDS: u16 = 512;
/// Most names in a chain.
const MAX_STEPS: usize = 16;
/// SvcParamKey of IPv4 address hints (RFC 9460 section 14.3.2); `IPV6_HINT` is that of IPv6.
const IPV4_HINT: u16 = 4;
const IPV6_HINT: u16 = 6;

/// Names and addresses that an answer leads to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Chain {
    /// Names after the one asked for, in wire form and lower case.
    pub steps: Vec<Box<[u8]>>,
    /// Addresses, each with the smallest TTL on the chain to it, seconds.
    pub addresses: Vec<(IpAddr, u32)>,
}

impl Chain {
    /// Reads the chain that begins at `asked`, which is in lower case. `None` if it has a loop, or
    /// more names or records than the limits.
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
            match record.rtype {
                Type::A | Type::AAAA => {
                    chain.addresses.push((record.address(message)?, ttl));
                }
                Type::SVCB | Type::HTTPS => chain.service(message, record, ttl)?,
                _ => {}
            }
        }
        Some(chain)
    }

    /// Adds a service's target and address hints (RFC 9460 section 2.2).
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
                IPV4_HINT => self.hints::<4>(value, ttl)?,
                IPV6_HINT => self.hints::<16>(value, ttl)?,
                _ => {}
            }
            params = &params[4 + len..];
        }
        Some(())
    }

    fn hints<const LEN: usize>(&mut self, value: &[u8], ttl: u32) -> Option<()>
    where
        IpAddr: From<[u8; LEN]>,
    {
        let (hints, []) = value.as_chunks::<LEN>() else {
            return None;
        };
        let hints = hints.iter().map(|address| (IpAddr::from(*address), ttl));
        self.addresses.extend(hints);
        Some(())
    }
}

#[cfg(test)]
#[path = "chain_test.rs"]
pub(crate) mod tests;
