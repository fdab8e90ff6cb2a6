//! QUIC Initial packets for tests.
use crate::inspect::quic::{Keys, Version};

/// A CRYPTO frame.
pub fn crypto(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![6];
    frame.extend(number(offset as u32));
    frame.extend(number(bytes.len() as u32));
    frame.extend(bytes);
    frame
}

/// A client's Initial packet of the connection that began with the id `original`.
pub fn initial(
    version: Version,
    original: &[u8],
    destination: &[u8],
    packet_number: u32,
    payload: &[u8],
) -> Vec<u8> {
    let (first, version_number) = match version {
        Version::One => (0xc3, 1u32),
        Version::Two => (0xd3, 0x6b33_43cf),
    };
    // Padded, so that there is something to sample.
    let mut payload = payload.to_vec();
    payload.resize(payload.len().max(32), 0);
    let mut packet = vec![first];
    packet.extend(version_number.to_be_bytes());
    packet.push(destination.len() as u8);
    packet.extend(destination);
    packet.extend([0, 0]);
    packet.extend(number(payload.len() as u32 + 4 + 16));
    let number_at = packet.len();
    packet.extend(packet_number.to_be_bytes());
    let keys = Keys::of_client(version, original);
    let sealed = keys.seal(packet_number.into(), &packet, &payload);
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
