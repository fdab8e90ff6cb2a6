//! TLS over TCP: the records before encryption (RFC 8446 section 5.1).
//!
//! # Theory of operation
//! A client begins with a ClientHello, in one record or several. After it nothing is sent to the
//! server until it begins to answer. A HelloRetryRequest asks for a second ClientHello, whose
//! server name some servers use instead of the first. The rules apply to it as to the first, and
//! data that the client sent in between (early data, which such a server does not read) passes with
//! it. Any other ServerHello means that no further name follows. A server that answers with
//! anything else does not speak TLS, and might read a name elsewhere in the data: such a connection
//! is ended.
use crate::inspection::{
    Refused,
    client_hello::{self, ClientHello},
};

const HEADER_LEN: usize = 5;
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
/// Longest record, bytes without its header: that of an encrypted one (RFC 8446 section 5.2), as
/// early data is.
const MAX_RECORD: usize = 16_384 + 256;

/// First octet of a stream that may be TLS.
pub const FIRST_OCTET: u8 = HANDSHAKE;

/// Parses a hello at the beginning of a client's stream. `None` if more bytes are needed.
///
/// # Errors
/// If the stream does not begin with an acceptable hello.
pub fn client_hello(stream: &[u8]) -> Result<Option<ClientHello>, Refused> {
    let mut handshake = Vec::new();
    let mut at = 0;
    while let Some(record) = Record::parse(&stream[at..])? {
        if record.kind != HANDSHAKE || record.len == 0 {
            return Err(Refused::Malformed);
        }
        handshake.extend_from_slice(record.content);
        if let Some(hello) = client_hello::parse(&handshake)? {
            // Nothing may stand behind it in its last record.
            if hello.len != handshake.len() || record.whole().is_none() {
                return Err(Refused::Malformed);
            }
            let len = at + HEADER_LEN + record.len;
            return Ok(Some(ClientHello { len, ..hello }));
        }
        let Some(len) = record.whole() else { break };
        at += len;
    }
    Ok(None)
}

/// Whether the stream continues with a record that may precede a second hello: the rest of early
/// data, or a record for compatibility with middleboxes (RFC 8446 appendix D.4). If so, the number
/// of its bytes that are there, and the number that follow.
///
/// # Errors
/// If the record is malformed.
pub fn before_second_hello(stream: &[u8]) -> Result<Option<(usize, usize)>, Refused> {
    let Some(record) = Record::parse(stream)? else {
        return Ok(None);
    };
    let skipped = matches!(record.kind, CHANGE_CIPHER_SPEC | APPLICATION_DATA);
    let here = record.content.len();
    Ok(skipped.then_some((HEADER_LEN + here, record.len - here)))
}

/// A server's answer to a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The server asks for another hello.
    Retry,
    /// The server continues the handshake.
    Hello,
    /// The server does not speak TLS, or answers out of order.
    Other,
}

/// Most bytes of a server's stream that are examined.
pub const MAX_ANSWER: usize = 512;

/// Parses the answer at the beginning of a server's stream; `None` if more bytes are needed.
/// `again` says that it answers a second hello.
pub fn server_answer(stream: &[u8], again: bool) -> Option<Answer> {
    let mut at = 0;
    let mut may_change = again;
    while let Ok(Some(record)) = Record::parse(&stream[at..]) {
        // Old servers warn of names they do not know before they answer.
        if record.kind == ALERT && record.len == 2 && at + HEADER_LEN + 2 < MAX_ANSWER {
            at += record.whole()?;
            continue;
        }
        // What is there for old middleboxes comes behind the first answer (RFC 8446 appendix D.4).
        if record.kind == CHANGE_CIPHER_SPEC && record.len == 1 && may_change {
            may_change = false;
            at += record.whole()?;
            continue;
        }
        return answer(&record);
    }
    // A header cut short, or none of TLS.
    let cut = stream.len() - at < HEADER_LEN && stream.len() < MAX_ANSWER;
    (!cut).then_some(Answer::Other)
}

/// Whether a server's stream begins with alerts of which one is fatal (RFC 8446 section 6).
pub fn ends_by_alert(stream: &[u8]) -> bool {
    let mut at = 0;
    while let Ok(Some(record)) = Record::parse(&stream[at..]) {
        match (record.kind, record.len, record.content, record.whole()) {
            (ALERT, 2, [2, _], _) => return true,
            (ALERT, 2, _, Some(len)) => at += len,
            _ => return false,
        }
    }
    false
}

fn answer(record: &Record<'_>) -> Option<Answer> {
    /// Random value of a ServerHello that is a HelloRetryRequest (RFC 8446 section 4.1.3).
    const RETRY: [u8; 32] = [
        0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8,
        0x91, 0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8,
        0x33, 0x9c,
    ];
    const SERVER_HELLO: u8 = 2;
    // Behind type, length and version.
    const RANDOM_AT: usize = 6;
    let content = record.content;
    if record.kind != HANDSHAKE || content.first().is_some_and(|kind| *kind != SERVER_HELLO) {
        return Some(Answer::Other);
    }
    match content.get(RANDOM_AT..RANDOM_AT + RETRY.len()) {
        Some(random) if random == RETRY => Some(Answer::Retry),
        Some(_) => Some(Answer::Hello),
        // One cut over records: nobody does, but a first part that could be a retry's is not let by.
        None if content.len() < record.len => None,
        None => Some(Answer::Retry),
    }
}

struct Record<'s> {
    kind: u8,
    /// Length as the header says, bytes.
    len: usize,
    /// The part of the content that is there.
    content: &'s [u8],
}

impl<'s> Record<'s> {
    /// Parses a record; `None` if its header is incomplete.
    fn parse(stream: &'s [u8]) -> Result<Option<Self>, Refused> {
        let Some((&[kind, major, _minor, l1, l0], rest)) = stream.split_first_chunk() else {
            return Ok(None);
        };
        let len = usize::from(u16::from_be_bytes([l1, l0]));
        if major != 3 || len > MAX_RECORD {
            return Err(Refused::Malformed);
        }
        let content = &rest[..rest.len().min(len)];
        Ok(Some(Self { kind, len, content }))
    }

    /// Length of the record with its header, if it is complete.
    fn whole(&self) -> Option<usize> {
        (self.content.len() == self.len).then_some(HEADER_LEN + self.len)
    }
}

#[cfg(test)]
#[path = "tls_test.rs"]
mod tests;
