//! Empty answers to AAAA questions of a guest that reaches nothing by IPv6: it has none, or its
//! uplink leads to none now.
//!
//! No resolver is asked, so a slow one delays no client that asks for both families and waits for
//! both answers (getaddrinfo does, Happy Eyeballs for 50 ms), and no client receives an address
//! that it cannot reach.
//!
//! The answer is NODATA (RFC 2308 section 2.2), also for a name that does not exist: that is for
//! the answer about A to say. Its SOA makes caches in the guest keep it, and briefly, for the guest
//! may continue where there is IPv6.
//!
//! A client that sets both DO and CD validates DNSSEC itself. It would find an answer without proof
//! bogus, so its question goes to a resolver (RFC 6147 section 5.5 does likewise).
use super::{
    answer::Answer,
    message::{Bits, HEADER_LEN, Type},
    query::Key,
};

/// TTL of the negative answer, seconds.
const TTL_S: u32 = 60;

/// The empty answer, if the question is one of those that no resolver is asked.
pub(super) fn answer(key: Key<'_>) -> Option<Answer> {
    (key.qtype() == Type::AAAA && !validates(key)).then(|| no_data(key))
}

/// Whether the client validates DNSSEC itself: what is left out of an answer breaks its signatures.
pub(super) fn validates(key: Key<'_>) -> bool {
    key.edns() == Some(true) && key.bits() & Bits::CD != 0
}

fn no_data(key: Key<'_>) -> Answer {
    /// Pointer to the name of the question.
    const OWNER: u16 = 0xc000 | HEADER_LEN as u16;
    /// MNAME and RNAME, both the root; serial number, refresh, retry, expire and minimum.
    const DATA_LEN: u16 = 2 + 5 * 4;
    let bits = Bits::QR | Bits::RA | key.bits() & (Bits::RD | Bits::CD);
    let mut out = Vec::new();
    for word in [0, bits, 1, 0, 1, 0] {
        out.extend(word.to_be_bytes());
    }
    key.write_question(&mut out);
    for word in [OWNER, Type::SOA, key.qclass()] {
        out.extend(word.to_be_bytes());
    }
    let ttl_at = out.len() as u16;
    out.extend(TTL_S.to_be_bytes());
    out.extend(DATA_LEN.to_be_bytes());
    out.extend([0; 2]);
    for number in [1, TTL_S, TTL_S, TTL_S, TTL_S] {
        out.extend(number.to_be_bytes());
    }
    Answer {
        message: out.into(),
        ttls: [ttl_at].into(),
        extended_rcode: 0,
        // It costs less to make than to look up.
        lifetime_s: None,
    }
}

#[cfg(test)]
#[path = "no_ipv6_test.rs"]
mod tests;
