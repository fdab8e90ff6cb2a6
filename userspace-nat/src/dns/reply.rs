//! Builds DNS messages: queries to upstream resolvers, and replies to guests.

use super::{
    answer::Answer,
    message::{Bits, HEADER_LEN, PLAIN_UDP_LEN, Rcode, word},
    policy::ExtendedError,
    query::{Key, Query},
};

/// Largest UDP answer that the proxy announces to resolvers and guests, bytes. It fits any path
/// unfragmented (DNS flag day 2020).
pub const EDNS_UDP_LEN: u16 = 1232;
const OPT_LEN: usize = 11;
/// Option code of an Extended DNS Error (RFC 8914 section 2).
const OPTION_EXTENDED_ERROR: u16 = 15;
/// Longest EXTRA-TEXT in a reply, bytes.
const MAX_EXTRA_TEXT: usize = 400;

/// The fields of a guest's query that its reply needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Id of the query.
    pub id: u16,
    /// Second word of the query's header.
    pub bits: u16,
    /// The name as sent. The reply returns its case, which a client may check.
    pub name: Box<[u8]>,
    /// Whether DO is set; `None` if the query has no EDNS.
    pub edns: Option<bool>,
    /// Size that the reply must not exceed, bytes.
    pub limit: usize,
}

impl Asked {
    /// Fields of a query by UDP, over a link that carries datagrams of `link_len` bytes
    /// unfragmented.
    pub fn by_udp(query: &Query<'_>, link_len: usize) -> Self {
        let client = query.edns.map_or(PLAIN_UDP_LEN, |e| usize::from(e.udp_len));
        Self {
            limit: client.max(PLAIN_UDP_LEN).min(link_len),
            ..Self::by_tcp(query)
        }
    }

    /// Fields of a query by TCP.
    pub fn by_tcp(query: &Query<'_>) -> Self {
        Self {
            id: query.id,
            bits: query.bits,
            name: query.name.into(),
            edns: query.edns.map(|e| e.dnssec_ok),
            limit: usize::from(u16::MAX),
        }
    }
}

/// The upstream query for `key`, with `name` as the name in its chosen case.
pub fn query(id: u16, key: Key<'_>, name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + key.0.len() + OPT_LEN);
    push_header(&mut out, id, key.bits(), (1, key.edns().is_some()));
    out.extend_from_slice(name);
    out.extend_from_slice(key.kind());
    if let Some(dnssec_ok) = key.edns() {
        push_opt(&mut out, 0, dnssec_ok);
    }
    out
}

/// The reply to `asked` from an answer that is `age_s` seconds old. No TTL exceeds `ceiling_s`
/// seconds.
///
/// If the reply does not fit, it has no records, and TC is set (RFC 2181 section 9).
pub fn from_answer(asked: &Asked, answer: &Answer, age_s: u32, ceiling_s: u32) -> Vec<u8> {
    let message = &answer.message;
    let opt_len = if asked.edns.is_some() { OPT_LEN } else { 0 };
    let question_end = HEADER_LEN + asked.name.len() + 4;
    let room = asked.limit.saturating_sub(opt_len);
    let truncated = message.len() > room;
    let keep = match truncated {
        true => question_end.min(message.len()),
        false => message.len(),
    };
    let mut out = Vec::with_capacity(keep + opt_len);
    out.extend_from_slice(&message[..keep]);
    out[..2].copy_from_slice(&asked.id.to_be_bytes());
    out[HEADER_LEN..HEADER_LEN + asked.name.len()].copy_from_slice(&asked.name);
    for &at in &answer.ttls {
        let at = usize::from(at);
        let Some(ttl) = out.get_mut(at..at + 4) else {
            break;
        };
        let ttl_s = u32::from_be_bytes([ttl[0], ttl[1], ttl[2], ttl[3]]);
        // What a guest may keep for longer than we do would outlast what it opened.
        let left = ttl_s.saturating_sub(age_s).min(ceiling_s);
        ttl.copy_from_slice(&left.to_be_bytes());
    }
    if truncated {
        out[6..10].fill(0);
        out[2] |= (Bits::TC >> 8) as u8;
    }
    if let Some(dnssec_ok) = asked.edns {
        out[11] = 1;
        push_opt(&mut out, answer.extended_rcode, dnssec_ok);
    }
    out
}

/// A reply with this code and no records, to a query that was parsed.
pub fn from_rcode(asked: &Asked, key: Key<'_>, rcode: Rcode) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + key.0.len() + OPT_LEN);
    let bits = reply_bits(asked.bits) | rcode as u16 & Bits::RCODE;
    push_header(&mut out, asked.id, bits, (1, asked.edns.is_some()));
    out.extend_from_slice(&asked.name);
    out.extend_from_slice(key.kind());
    if let Some(dnssec_ok) = asked.edns {
        push_opt(&mut out, (rcode as u16 >> 4) as u8, dnssec_ok);
    }
    out
}

/// A refusal, with its reason as far as it fits if the client uses EDNS.
pub fn refused(asked: &Asked, key: Key<'_>, error: &ExtendedError) -> Vec<u8> {
    let mut out = from_rcode(asked, key, error.rcode);
    if asked.edns.is_none() {
        return out;
    }
    // Option code and length, and the INFO-CODE.
    let room = asked.limit.saturating_sub(out.len() + 6);
    let text = &error.text[..error.text.floor_char_boundary(room.min(MAX_EXTRA_TEXT))];
    let option_len = 2 + text.len() as u16;
    let at = out.len() - 2;
    out[at..].copy_from_slice(&(4 + option_len).to_be_bytes());
    for word in [OPTION_EXTENDED_ERROR, option_len, error.code] {
        out.extend_from_slice(&word.to_be_bytes());
    }
    out.extend_from_slice(text.as_bytes());
    out
}

/// A reply to a query of which only the header could be parsed: a header, and an OPT if the code
/// needs one.
pub fn to_unreadable(message: &[u8], rcode: Rcode) -> Vec<u8> {
    let id = word(message, 0).unwrap_or(0);
    let bits = reply_bits(word(message, 2).unwrap_or(0)) | rcode as u16 & Bits::RCODE;
    let extended = (rcode as u16 >> 4) as u8;
    let mut out = Vec::with_capacity(HEADER_LEN + OPT_LEN);
    push_header(&mut out, id, bits, (0, extended != 0));
    if extended != 0 {
        push_opt(&mut out, extended, false);
    }
    out
}

/// Header bits of a reply: opcode and RD are copied (RFC 1035 section 4.1.1), and CD (RFC 4035
/// section 3.2.2).
fn reply_bits(query: u16) -> u16 {
    Bits::QR | Bits::RA | query & (Bits::OPCODE | Bits::RD | Bits::CD)
}

fn push_header(out: &mut Vec<u8>, id: u16, bits: u16, (questions, opt): (u16, bool)) {
    for word in [id, bits, questions, 0, 0, opt.into()] {
        out.extend_from_slice(&word.to_be_bytes());
    }
}

/// Appends an OPT record without options (RFC 6891 section 6.1.2). Options are valid for one hop: a
/// guest's (cookies, client subnet) are not sent upstream, and the upstream's not to the guest.
fn push_opt(out: &mut Vec<u8>, extended_rcode: u8, dnssec_ok: bool) {
    let len = EDNS_UDP_LEN.to_be_bytes();
    let flags = if dnssec_ok { (Bits::DO >> 8) as u8 } else { 0 };
    out.extend_from_slice(&[0, 0, 41, len[0], len[1], extended_rcode, 0, flags, 0, 0, 0]);
}

#[cfg(test)]
#[path = "reply_test.rs"]
mod tests;
