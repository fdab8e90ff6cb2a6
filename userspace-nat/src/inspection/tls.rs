//! TLS over TCP: the records before anything is encrypted (RFC 8446 section 5.1).
//!
//! # Theory of operation
//! A client begins with a ClientHello, in one record or cut over many. After it nothing goes on
//! until the server has begun to answer: what answers by HelloRetryRequest asks for a second
//! ClientHello, whose server name is as good to some servers as the first's. That one is held to
//! the rules like the first, and what a client sent in between (early data, which such a server
//! leaves unread) passes with it. Another ServerHello means that all names are said. A server that
//! answers by anything else does not read TLS, and a name may lie where it looks for one: such a
//! connection is ended.
use crate::inspection::{HostName, Refused, client_hello};

const HEADER_LEN: usize = 5;
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
/// Longest record, bytes without its header: an encrypted one's (RFC 8446 section 5.2), which
/// early data is.
const MAX_RECORD: usize = 16_384 + 256;

/// The first octet of what may be TLS.
pub const FIRST_OCTET: u8 = HANDSHAKE;

/// A hello within records.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The server that it is for.
    pub name: HostName,
    /// The records' length with all that they hold, bytes.
    pub len: usize,
}

/// Reads a hello from the beginning of a client's stream, `None`: there is more to come.
pub fn client_hello(stream: &[u8]) -> Result<Option<Hello>, Refused> {
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
            return Ok(Some(Hello {
                name: hello.name,
                len,
            }));
        }
        let Some(len) = record.whole() else { break };
        at += len;
    }
    Ok(None)
}

/// Whether a stream goes on with a record that may come before a second hello: the rest of early
/// data, and what is there for old middleboxes (RFC 8446 appendix D.4). If so, how many bytes of it
/// are there, and how many are still to come.
pub fn before_second_hello(stream: &[u8]) -> Result<Option<(usize, usize)>, Refused> {
    let Some(record) = Record::parse(stream)? else {
        return Ok(None);
    };
    let skipped = matches!(record.kind, CHANGE_CIPHER_SPEC | APPLICATION_DATA);
    let here = record.content.len();
    Ok(skipped.then_some((HEADER_LEN + here, record.len - here)))
}

/// How a server answered a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It wants another hello.
    Retry,
    /// It goes on.
    Hello,
    /// It speaks no TLS, or not in turn.
    Other,
}

/// As much of a server's stream is looked at, bytes.
pub const MAX_ANSWER: usize = 512;

/// Reads a server's answer from the beginning of its stream; `None`: there is more to come.
/// `again`: to a second hello.
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

/// Whether a server's stream begins with alerts, and a fatal one is among them (RFC 8446 section 6).
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
    /// The random of a ServerHello that is a HelloRetryRequest (RFC 8446 section 4.1.3).
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
    /// As much of it as is there.
    content: &'s [u8],
}

impl<'s> Record<'s> {
    /// `None`: the header is not whole.
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

    /// Its length with its header, if it is whole.
    fn whole(&self) -> Option<usize> {
        (self.content.len() == self.len).then_some(HEADER_LEN + self.len)
    }
}

#[cfg(test)]
#[path = "tls_test.rs"]
mod tests;
