//! HTTP/1 as far as it names a server: request line, Host, and where the next request begins (RFC
//! 9112).
//!
//! # Theory of operation
//! A head is read when it is whole. What two servers could read in two ways is refused rather than
//! read in one, so that the place of the next request is where every server sees it:
//!
//! | | refused, since some |
//! | --- | --- |
//! | line ends other than CRLF, folded fields, an empty line before a request | see a line's end where others see none |
//! | several Hosts, a target that names another host than Host does, an address for a name | take the first, the last, the target |
//! | a length beside chunks, two lengths, any coding but `chunked`, one with HTTP/1.0 | follow the one or the other |
//! | a length that is no plain decimal number, a chunk of 2 GiB and more | read octal or signed numbers, or 32 bits |
//! | a chunk with an extension; a trailer that is no field, or one that frames or routes | read a line more or less |
//! | content where the method gives it no meaning: GET, HEAD, DELETE, TRACE (RFC 9110 section 9.3) | take it for the next request |
//! | content whose first line is a request's | take it for the next request |
//! | any expectation but `100-continue`; a Connection that takes away what frames or routes | pass on a request without its content |
//! | a field whose name differs from one of these by its punctuation | take it for that one |
//!
//! After CONNECT, or an Upgrade that the server takes, a stream is HTTP/1 no more, nor is it after
//! HTTP/2's preface; so none is let by where every request is held to the rules.
use httparse::{EMPTY_HEADER, Header, Status};

use crate::inspection::{HostName, Refused};

mod beginning;
mod body;
mod fields;

pub use beginning::Beginning;
pub use body::Body;

use fields::{lists, only};

/// Longest head that is parsed, bytes.
pub const MAX_HEAD: usize = 16_384;
const MAX_FIELDS: usize = 128;

/// Head of a request, parsed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// Name of the server that the request is for.
    pub name: HostName,
    /// Length with the empty line, bytes.
    pub len: usize,
    /// Body that follows the head.
    pub body: Body,
    /// Whether the request asks for an upgrade, after which the stream may use another protocol.
    pub upgrades: bool,
    /// Whether some servers could take the data after the head for another request.
    pub is_doubtful: bool,
}

/// Beginning of HTTP/2's connection preface (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2";
/// Methods whose content has no defined meaning.
const WITHOUT_CONTENT: [&str; 4] = ["GET", "HEAD", "DELETE", "TRACE"];

/// Whether an octet may begin a request: methods are upper-case.
pub fn may_begin(octet: u8) -> bool {
    octet.is_ascii_uppercase()
}

/// Parses a head at the beginning of a stream. `None` if more bytes are needed.
///
/// # Errors
/// If servers could interpret the head in different ways, or it has no host name.
pub fn parse(stream: &[u8]) -> Result<Option<Head>, Refused> {
    if stream.starts_with(PREFACE) {
        return Err(Refused::Unsupported);
    }
    if !has_clean_lines(&stream[..stream.len().min(MAX_HEAD)]) {
        return Err(Refused::Malformed);
    }
    let mut fields = [EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let len = match request.parse(stream) {
        Ok(Status::Complete(len)) if len <= MAX_HEAD => len,
        Ok(Status::Partial) if stream.len() < MAX_HEAD => return Ok(None),
        Ok(_) => return Err(Refused::TooLong),
        Err(_) => return Err(Refused::Malformed),
    };
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version)
    else {
        return Err(Refused::Malformed);
    };
    let fields = &*request.headers;
    if method.eq_ignore_ascii_case("CONNECT") {
        return Err(Refused::Unsupported);
    }
    let host = only(fields, "host")?.ok_or(Refused::NoName)?;
    let host = host_of(host)?;
    if let Some(of_target) = host_of_target(method, target)?
        && of_target != host
    {
        return Err(Refused::Malformed);
    }
    let body = Body::of(fields, minor)?;
    Ok(Some(Head {
        name: host,
        len,
        body,
        upgrades: only(fields, "upgrade")?.is_some(),
        is_doubtful: is_doubtful(method, fields, body)?,
    }))
}

/// Whether servers are known to differ in where a request with its content ends.
fn is_doubtful(method: &str, fields: &[Header<'_>], body: Body) -> Result<bool, Refused> {
    let has_content = body != Body::Length(0);
    let is_without = |name: &&str| method.eq_ignore_ascii_case(name);
    let expects = only(fields, "expect")?;
    let is_odd = expects.is_some_and(|value| !value.eq_ignore_ascii_case(b"100-continue"));
    let takes_away = ["host", "content-length", "transfer-encoding"]
        .into_iter()
        .any(|name| lists(fields, "connection", name));
    Ok(has_content && WITHOUT_CONTENT.iter().any(is_without) || is_odd || takes_away)
}

/// Up to the first empty line every CR is before an LF, every LF behind a CR, and the first line is
/// not empty.
fn has_clean_lines(head: &[u8]) -> bool {
    let end = head.windows(4).position(|four| four == b"\r\n\r\n");
    let head = end.map_or(head, |end| &head[..end + 4]);
    let mut before = 0;
    for &octet in head {
        if (before == b'\r') != (octet == b'\n') {
            return false;
        }
        before = octet;
    }
    !head.starts_with(b"\r")
}

/// Host name in an authority of the form `host[:port]`.
fn host_of(authority: &[u8]) -> Result<HostName, Refused> {
    let host = match authority.iter().position(|b| *b == b':') {
        Some(colon) if is_port(&authority[colon + 1..]) => &authority[..colon],
        Some(_) => return Err(Refused::NoName),
        None => authority,
    };
    HostName::parse(host).ok_or(Refused::NoName)
}

/// Whether the text is a port: digits, or empty (RFC 3986 section 3.2.3).
fn is_port(digits: &[u8]) -> bool {
    digits.len() <= 5 && digits.iter().all(u8::is_ascii_digit)
}

/// The host that a target names (RFC 9112 section 3.2); `None` in origin form.
fn host_of_target(method: &str, target: &str) -> Result<Option<HostName>, Refused> {
    if target.starts_with('/') || target == "*" && method == "OPTIONS" {
        return Ok(None);
    }
    let (scheme, rest) = target.split_once("://").ok_or(Refused::Malformed)?;
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(Refused::Malformed);
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    host_of(&rest.as_bytes()[..end]).map(Some)
}

#[cfg(test)]
#[path = "../http_test.rs"]
mod tests;
