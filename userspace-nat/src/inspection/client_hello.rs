//! The TLS ClientHello, of TCP and of QUIC alike (RFC 8446 section 4.1.2, RFC 5246 section
//! 7.4.1.2): the name of the server that a client asks for.
//!
//! A hello that servers could interpret in different ways is refused: inconsistent lengths, a
//! repeated extension, a server name list with other than exactly one host name (RFC 6066 section
//! 3).
use tls_parser::parse_tls_handshake_client_hello;

use crate::inspection::{HostName, Refused};

/// Longest hello that is parsed, bytes with its header. Hellos with post-quantum key shares have 2
/// KiB.
pub const MAX_LEN: usize = 16_384;

/// Length of a handshake message's header: its type and a 24-bit length.
const HEADER_LEN: usize = 4;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
/// Extensions of Encrypted ClientHello (RFC 9849), of its draft, and of its predecessors.
const ENCRYPTED: [u16; 4] = [0xfe0d, 0xff03, 0xffce, 0xfe0a];

/// Name and length of a parsed hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientHello {
    /// Name of the server that the hello is for.
    pub name: HostName,
    /// Length with the header, bytes.
    pub len: usize,
}

/// Parses a hello at the beginning of handshake bytes. `None` if more bytes are needed.
///
/// # Errors
/// If the bytes are not a hello with one plain server name.
pub fn parse(handshake: &[u8]) -> Result<Option<ClientHello>, Refused> {
    let Some(&kind) = handshake.first() else {
        return Ok(None);
    };
    if kind != CLIENT_HELLO {
        return Err(Refused::Malformed);
    }
    let Some(&[_, a, b, c]) = handshake.first_chunk::<HEADER_LEN>() else {
        return Ok(None);
    };
    let len = HEADER_LEN + u32::from_be_bytes([0, a, b, c]) as usize;
    if len > MAX_LEN {
        return Err(Refused::TooLong);
    }
    let Some(body) = handshake.get(HEADER_LEN..len) else {
        return Ok(None);
    };
    let name = server_name(body)?;
    Ok(Some(ClientHello { name, len }))
}

fn server_name(body: &[u8]) -> Result<HostName, Refused> {
    let (rest, hello) = parse_tls_handshake_client_hello(body).map_err(|_| Refused::Malformed)?;
    if !rest.is_empty() {
        return Err(Refused::Malformed);
    }
    let mut extensions = hello.ext.unwrap_or_default();
    let mut name = None;
    let mut encrypted = false;
    let mut seen = Vec::new();
    while !extensions.is_empty() {
        let (kind, content, rest) = extension(extensions).ok_or(Refused::Malformed)?;
        extensions = rest;
        if seen.contains(&kind) {
            return Err(Refused::Malformed);
        }
        seen.push(kind);
        if seen.len() > MAX_EXTENSIONS {
            return Err(Refused::Malformed);
        }
        encrypted |= ENCRYPTED.contains(&kind);
        if kind == SERVER_NAME {
            name = Some(only_host_name(content).ok_or(Refused::Malformed)?);
        }
    }
    if encrypted {
        return Err(Refused::Encrypted);
    }
    let name = name.ok_or(Refused::NoName)?;
    HostName::parse(name).ok_or(Refused::NoName)
}

/// Most extensions, more than any client sends: duplicates are found by linear search.
const MAX_EXTENSIONS: usize = 128;

/// Splits off one extension: its type, its content, and the rest.
fn extension(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (&[k1, k0, l1, l0], rest) = bytes.split_first_chunk()?;
    let (content, rest) = rest.split_at_checked(u16::from_be_bytes([l1, l0]).into())?;
    Some((u16::from_be_bytes([k1, k0]), content, rest))
}

/// The only element of a server name list, if it is a host name.
fn only_host_name(list: &[u8]) -> Option<&[u8]> {
    let (&[list_1, list_0, kind, name_1, name_0], name) = list.split_first_chunk()?;
    let fits = usize::from(u16::from_be_bytes([list_1, list_0])) + 2 == list.len()
        && usize::from(u16::from_be_bytes([name_1, name_0])) == name.len();
    (fits && kind == 0).then_some(name)
}

#[cfg(test)]
#[path = "client_hello_test.rs"]
mod tests;
