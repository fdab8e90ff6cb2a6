//! HTTP/1 as far as it names a server: request line, Host, and where the next request begins (RFC
//! 9112).
//!
//! # Theory of operation
//! A head is read when it is whole. What two servers could read in two ways is refused rather than
//! read in one: line ends other than CRLF, folded fields, several Hosts, a target that names
//! another host than Host does, a length beside chunks, a chunk with an extension. So the place of
//! the next request is where every server sees it.
//!
//! After CONNECT, or an Upgrade that the server takes, a stream is HTTP no more; so neither is let
//! by where every request is held to the rules.
use httparse::{EMPTY_HEADER, Header, Status};

use super::{HostName, Refused};

mod body;

pub use body::Body;

/// Longest head, bytes.
pub const MAX_HEAD: usize = 16_384;
const MAX_FIELDS: usize = 128;

/// A request's head.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// The server that it is for.
    pub name: HostName,
    /// Its length with the empty line, bytes.
    pub len: usize,
    /// What follows it.
    pub body: Body,
    /// Whether the stream may become another protocol's: it asks for an upgrade.
    pub upgrades: bool,
}

/// Whether an octet may begin a request: methods are in capitals.
pub fn may_begin(octet: u8) -> bool {
    octet.is_ascii_uppercase()
}

/// Reads a head from the beginning of a stream; `None`: there is more to come.
pub fn parse(stream: &[u8]) -> Result<Option<Head>, Refused> {
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
    if method == "CONNECT" {
        return Err(Refused::Unsupported);
    }
    let host = only(fields, "host")?.ok_or(Refused::NoName)?;
    let host = host_of(host)?;
    if let Some(of_target) = host_of_target(method, target)?
        && of_target != host
    {
        return Err(Refused::Malformed);
    }
    Ok(Some(Head {
        name: host,
        len,
        body: Body::of(fields, minor)?,
        upgrades: only(fields, "upgrade")?.is_some(),
    }))
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

/// The value of a field that may be there once. A name that differs by `_` for `-` is refused:
/// gateways take it for the same.
fn only<'f>(fields: &'f [Header<'_>], name: &str) -> Result<Option<&'f [u8]>, Refused> {
    let mut found = None;
    for field in fields {
        if field.name.eq_ignore_ascii_case(name) {
            if found.is_some() {
                return Err(Refused::Malformed);
            }
            found = Some(field.value.trim_ascii());
        } else if field.name.contains('_')
            && field.name.replace('_', "-").eq_ignore_ascii_case(name)
        {
            return Err(Refused::Malformed);
        }
    }
    Ok(found)
}

/// `host[:port]`.
fn host_of(authority: &[u8]) -> Result<HostName, Refused> {
    let host = match authority.iter().position(|b| *b == b':') {
        Some(colon) if authority[colon + 1..].iter().all(u8::is_ascii_digit) => &authority[..colon],
        Some(_) => return Err(Refused::NoName),
        None => authority,
    };
    HostName::parse(host).ok_or(Refused::NoName)
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
