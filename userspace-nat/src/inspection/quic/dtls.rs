//! Detection of DTLS in a QUIC flow: a server may serve both on one port (RFC 9443).
//!
//! # Theory of operation
//! In every version, a DTLS connection begins with a ClientHello in unencrypted handshake records.
//! Servers skip invalid records at the beginning of a datagram, each in its own way, and read on
//! after them. So such a record is searched for at every offset of a datagram. Other records begin
//! no connection without it. They are recognized by the datagram's first octets:
//!
//! | | first octet | then |
//! | --- | --- | --- |
//! | a record of DTLS 1.0 to 1.3, and of OpenSSL's before them: change_cipher_spec, alert, handshake, application data, heartbeat, with a connection id (RFC 9146), ACK | 20 to 26 | the version, 0xfeff, 0xfefd or 0x0100 |
//! | an encrypted record of DTLS 1.3 (RFC 9147 section 4) that says its length and has no connection id | 001xxxxx | records up to the datagram's end |
//!
//! Another encrypted record of DTLS 1.3 is like any packet of QUIC whose fixed bit is greased (RFC
//! 9287). A packet of QUIC is taken for one of these by chance, once in some ten thousand
//! connections that do grease it; for a ClientHello never.

/// Length of a record's header, bytes: type, version, epoch, sequence number, length.
const HEADER_LEN: usize = 13;
/// Length of the header of a handshake message's fragment, bytes: type, length, message number,
/// offset and fragment length.
const PART_LEN: usize = 12;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;

/// Whether a datagram contains DTLS.
pub(super) fn is_in(datagram: &[u8]) -> bool {
    is_record(datagram) || are_encrypted(datagram) || has_client_hello(datagram)
}

/// Whether the bytes begin with a record that gives its version.
fn is_record(bytes: &[u8]) -> bool {
    const CHANGE_CIPHER_SPEC: u8 = 20;
    const ACK: u8 = 26;
    matches!(bytes, [CHANGE_CIPHER_SPEC..=ACK, rest @ ..] if is_version(rest))
}

/// Whether the bytes begin with a known version of DTLS, or 0xfefc, which a later version would
/// have.
fn is_version(bytes: &[u8]) -> bool {
    matches!(bytes, [0xfe, 0xfc..=0xff, ..] | [1, 0, ..])
}

/// Whether it is a chain of encrypted records of DTLS 1.3 up to its end, or to a record that says
/// its version.
fn are_encrypted(datagram: &[u8]) -> bool {
    let mut rest = datagram;
    while let [first @ 0x20..=0x3f, ..] = *rest {
        const WITH_ID: u8 = 0x10;
        const LONG_NUMBER: u8 = 0x08;
        const WITH_LENGTH: u8 = 0x04;
        if first & (WITH_ID | WITH_LENGTH) != WITH_LENGTH {
            return false;
        }
        let length_at = if first & LONG_NUMBER == 0 { 2 } else { 3 };
        let Some([l1, l0]) = rest.get(length_at..length_at + 2) else {
            return false;
        };
        let len = usize::from(u16::from_be_bytes([*l1, *l0]));
        rest = match rest.get(length_at + 2 + len..) {
            Some([]) => return true,
            Some(rest) => rest,
            None => return false,
        };
    }
    is_record(rest) && rest.len() < datagram.len()
}

/// Whether the datagram contains, at any offset, an unencrypted handshake record with a part of a
/// ClientHello.
fn has_client_hello(datagram: &[u8]) -> bool {
    /// Length of the chunks that are searched for the octet, bytes. Most chunks do not contain it,
    /// which one vectorized search finds.
    const STRETCH: usize = 64;
    let begins = (0..).step_by(STRETCH).zip(datagram.chunks(STRETCH));
    let mut begins = begins.filter(|(_, stretch)| stretch.contains(&HANDSHAKE));
    begins.any(|(begin, stretch)| {
        let mut octets = (begin..).zip(stretch);
        octets.any(|(at, octet)| *octet == HANDSHAKE && is_client_hello(&datagram[at..]))
    })
}

fn is_client_hello(record: &[u8]) -> bool {
    let Some((header, content)) = record.split_at_checked(HEADER_LEN) else {
        return false;
    };
    let len = usize::from(u16::from_be_bytes([header[11], header[12]]));
    let epoch = &header[3..5];
    is_version(&header[1..])
        && epoch == [0, 0]
        && (PART_LEN..=content.len()).contains(&len)
        && content.first() == Some(&CLIENT_HELLO)
}

#[cfg(test)]
#[path = "../dtls_test.rs"]
mod tests;
