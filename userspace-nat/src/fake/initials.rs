//! QUIC Initial packets for tests.
use crate::inspection::quic::{Keys, MIN_DATAGRAM, Version};

/// A CRYPTO frame with these bytes at an offset.
pub fn crypto(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![6];
    frame.extend(number(offset as u32));
    frame.extend(number(bytes.len() as u32));
    frame.extend(bytes);
    frame
}

/// A client's datagram with an Initial packet of the connection that began with the id `original`.
pub fn initial(
    version: Version,
    original: &[u8],
    destination: &[u8],
    packet_number: u32,
    payload: &[u8],
) -> Vec<u8> {
    // Padded, and with it the datagram (RFC 9000 section 14.1).
    let mut payload = payload.to_vec();
    payload.resize(payload.len().max(MIN_DATAGRAM), 0);
    let keys = Keys::of_client(version, original);
    sealed(&keys, version, [destination, b""], packet_number, &payload)
}

/// A datagram with an Initial packet of the minimum length that can be opened, shorter than a
/// client may send.
pub fn short_initial(original: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    payload.resize(payload.len().max(32), 0);
    let keys = Keys::of_client(Version::One, original);
    sealed(&keys, Version::One, [original, b""], 0, &payload)
}

/// The server's first answer in the connection that began with the id `original`; it calls itself
/// `source`.
pub fn answer(version: Version, original: &[u8], source: &[u8]) -> Vec<u8> {
    let keys = Keys::of_server(version, original);
    sealed(&keys, version, [b"", source], 0, &[1; 32])
}

fn sealed(
    keys: &Keys,
    version: Version,
    [destination, source]: [&[u8]; 2],
    packet_number: u32,
    payload: &[u8],
) -> Vec<u8> {
    let (first, version_number) = match version {
        Version::One => (0xc3, 1u32),
        Version::Two => (0xd3, 0x6b33_43cf),
    };
    let mut packet = vec![first];
    packet.extend(version_number.to_be_bytes());
    for id in [destination, source] {
        packet.push(id.len() as u8);
        packet.extend(id);
    }
    // No token.
    packet.push(0);
    packet.extend(number(payload.len() as u32 + 4 + 16));
    let number_at = packet.len();
    packet.extend(packet_number.to_be_bytes());
    let sealed = keys.seal(packet_number.into(), &packet, payload);
    packet.extend(sealed);
    let sample = packet[number_at + 4..].first_chunk().copied();
    let mask = keys.mask(sample.unwrap_or_default());
    packet[0] ^= mask[0] & 0x0f;
    for (byte, mask) in packet[number_at..number_at + 4].iter_mut().zip(&mask[1..]) {
        *byte ^= mask;
    }
    packet
}

/// A variable-length integer of four bytes.
fn number(n: u32) -> [u8; 4] {
    (n | 2 << 30).to_be_bytes()
}
