//! The TLS ClientHello, of TCP and of QUIC alike (RFC 8446 section 4.1.2, RFC 5246 section
//! 7.4.1.2): what server a client says that it wants.
//!
//! Whatever a server could read in another way is refused: lengths that do not add up, an
//! extension twice, a server name list with any but one host name (RFC 6066 section 3).
use tls_parser::parse_tls_handshake_client_hello;

use crate::inspection::{HostName, Refused};

/// Longest hello that is read, bytes with its header. Those with post-quantum key shares have 2 KiB.
pub const MAX_LEN: usize = 16_384;

/// Length of a handshake message's header: its type and a 24-bit length.
const HEADER_LEN: usize = 4;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
/// Encrypted ClientHello (RFC 9849), its draft, and what came before it.
const ENCRYPTED: [u16; 4] = [0xfe0d, 0xff03, 0xffce, 0xfe0a];

/// What a hello says, and how long it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientHello {
    /// The server that it is for.
    pub name: HostName,
    /// Its length with its header, bytes.
    pub len: usize,
}

/// Reads a hello from the beginning of handshake bytes. `None`: there is more to come.
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

/// More than any client has: what is twice is sought by going through them.
const MAX_EXTENSIONS: usize = 128;

/// One extension: type, content, and what follows.
fn extension(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (&[k1, k0, l1, l0], rest) = bytes.split_first_chunk()?;
    let (content, rest) = rest.split_at_checked(u16::from_be_bytes([l1, l0]).into())?;
    Some((u16::from_be_bytes([k1, k0]), content, rest))
}

/// A list's only element, which is a host name's.
fn only_host_name(list: &[u8]) -> Option<&[u8]> {
    let (&[list_1, list_0, kind, name_1, name_0], name) = list.split_first_chunk()?;
    let fits = usize::from(u16::from_be_bytes([list_1, list_0])) + 2 == list.len()
        && usize::from(u16::from_be_bytes([name_1, name_0])) == name.len();
    (fits && kind == 0).then_some(name)
}

#[cfg(test)]
#[path = "client_hello_test.rs"]
mod tests;
