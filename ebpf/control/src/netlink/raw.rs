//! Dumps of netlink families that the route crate does not support: nfnetlink and xfrm.

use std::io;

use netlink_sys::{Socket, SocketAddr};

/// Length of a netlink header, bytes.
const HEADER: usize = 16;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// Requests a dump, and calls `each` with the type and payload of each answer.
pub(crate) fn dump(
    protocol: isize,
    message_type: u16,
    payload: &[u8],
    mut each: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut request = Vec::with_capacity(HEADER + payload.len());
    request.extend(((HEADER + payload.len()) as u32).to_ne_bytes());
    request.extend(message_type.to_ne_bytes());
    request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // Sequence and port: there is one request on the socket.
    request.extend([0; 8]);
    request.extend(payload);
    socket.send(&request, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        while let Some((kind, payload, after)) = split(rest, HEADER, |bytes| {
            Some((word(bytes, 0)? as usize, half(bytes, 4)?))
        }) {
            match kind {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    let code = word(payload, 0).unwrap_or_default() as i32;
                    return Err(io::Error::from_raw_os_error(-code));
                }
                _ => each(kind, payload),
            }
            rest = after;
        }
    }
}

/// Returns the attributes in a payload: type (without the nested bit) and value.
pub(crate) fn attributes(payload: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const NESTED: u16 = 0x8000;
    let mut rest = payload;
    std::iter::from_fn(move || {
        let (kind, value, after) = split(rest, 4, |bytes| {
            Some((half(bytes, 0)?.into(), half(bytes, 2)?))
        })?;
        rest = after;
        Some((kind & !NESTED, value))
    })
}

/// Splits off the first element. `read` returns the length (of the whole element) and the type from
/// its header.
fn split(
    bytes: &[u8],
    header: usize,
    read: impl FnOnce(&[u8]) -> Option<(usize, u16)>,
) -> Option<(u16, &[u8], &[u8])> {
    let (length, kind) = read(bytes)?;
    let body = bytes.get(header..length)?;
    let after = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    Some((kind, body, after))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|word| u32::from_ne_bytes(*word))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|half| u16::from_ne_bytes(*half))
}
