//! Requests that the route crate does not support: dumps of nfnetlink and xfrm, and messages as
//! bytes.

use std::io;

use netlink_packet_core::{
    Emitable, NLA_HEADER_SIZE, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer,
    NetlinkHeader, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};

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
    // Sequence and port stay zero: there is one request on the socket.
    let len = NetlinkHeader::default().buffer_len() + payload.len();
    let mut request = vec![0; len];
    let mut message = NetlinkBuffer::new(&mut request);
    message.set_length(len as u32);
    message.set_message_type(message_type);
    message.set_flags(NLM_F_REQUEST | NLM_F_DUMP);
    message.payload_mut().copy_from_slice(payload);
    socket.send(&request, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        for message in split(&datagram) {
            let payload = message.payload();
            match message.message_type() {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    let code = payload.first_chunk().map_or(0, |c| i32::from_ne_bytes(*c));
                    return Err(io::Error::from_raw_os_error(-code));
                }
                kind => each(kind, payload),
            }
        }
    }
}

/// Splits a datagram into its messages.
pub(crate) fn split(datagram: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        let length = message.length() as usize;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(message)
    })
}

/// Returns the attributes in a payload: type and value.
pub(crate) fn attributes(payload: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(payload)
        .map_while(Result::ok)
        .map(|attribute| {
            let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
            (kind, &attribute.into_inner()[NLA_HEADER_SIZE..length])
        })
}
