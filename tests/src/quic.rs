//! A QUIC client's Initial packets (RFC 9000, 17.2.2; RFC 9001, 5), made by hand, so that they
//! share no code with what reads them under test.

use aes::{
    Aes128,
    cipher::{BlockCipherEncrypt, KeyInit},
};
use aes_gcm::{
    Aes128Gcm,
    aead::{Aead, Payload},
};
use hkdf::Hkdf;
use sha2::Sha256;

/// Salt of version 1's initial secret (RFC 9001, 5.2).
const SALT: [u8; 20] = [
    0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad,
    0xcc, 0xbb, 0x7f, 0x0a,
];
/// Smallest datagram with an Initial packet, bytes (RFC 9000, 14.1).
const DATAGRAM_BYTES: usize = 1200;
const TAG_BYTES: usize = 16;
const SAMPLE_BYTES: usize = 16;

/// A datagram with one Initial packet of version 1.
#[derive(Clone, Debug)]
pub struct Initial {
    /// Destination connection id that the client chose first.
    pub connection: [u8; 8],
    /// Packet number, as sent.
    pub number: u32,
    /// CRYPTO data: offsets and pieces of the handshake, at most some 1,100 bytes in all.
    pub crypto: Vec<(u16, Vec<u8>)>,
}

impl Initial {
    /// Encodes and protects the datagram.
    pub fn datagram(&self) -> Vec<u8> {
        let id = self.connection;
        let mut header = vec![0xc3, 0, 0, 0, 1, id.len() as u8];
        header.extend(id);
        header.extend([0, 0]); // no id of the client's own, no token
        let number_at = header.len() + 2;
        let rest = DATAGRAM_BYTES - number_at;
        header.extend((0x4000 | rest as u16).to_be_bytes());
        header.extend(self.number.to_be_bytes());
        let mut frames = Vec::new();
        for (place, bytes) in &self.crypto {
            frames.push(6);
            frames.extend((0x8000_0000 | u32::from(*place)).to_be_bytes());
            frames.extend((0x4000 | bytes.len() as u16).to_be_bytes());
            frames.extend(bytes);
        }
        frames.resize(DATAGRAM_BYTES - header.len() - TAG_BYTES, 0);
        let keys = Keys::new(&id);
        let sealed = keys.seal(self.number, &header, &frames);
        let mut out = [header, sealed].concat();
        // As if the number had four bytes (RFC 9001, 5.4.2), which it has.
        let sample = *out[number_at + 4..]
            .first_chunk::<SAMPLE_BYTES>()
            .expect("a datagram is longer");
        let mask = keys.mask(sample);
        out[0] ^= mask[0] & 0x0f;
        for (octet, mask) in out[number_at..].iter_mut().zip(&mask[1..]) {
            *octet ^= mask;
        }
        out
    }
}

struct Keys {
    key: [u8; 16],
    iv: [u8; 12],
    header: [u8; 16],
}

impl Keys {
    /// The client's, for the first packets of a connection.
    fn new(connection: &[u8]) -> Keys {
        let initial = Hkdf::<Sha256>::new(Some(&SALT), connection);
        let secret: [u8; 32] = expand(&initial, "client in");
        let client = Hkdf::<Sha256>::from_prk(&secret).expect("a hash is long enough");
        Keys {
            key: expand(&client, "quic key"),
            iv: expand(&client, "quic iv"),
            header: expand(&client, "quic hp"),
        }
    }

    fn seal(&self, number: u32, header: &[u8], frames: &[u8]) -> Vec<u8> {
        let mut nonce = self.iv;
        for (octet, number) in nonce[8..].iter_mut().zip(number.to_be_bytes()) {
            *octet ^= number;
        }
        let payload = Payload {
            msg: frames,
            aad: header,
        };
        let sealed = Aes128Gcm::new(&self.key.into()).encrypt(&nonce.into(), payload);
        sealed.expect("a datagram is short enough")
    }

    fn mask(&self, sample: [u8; SAMPLE_BYTES]) -> [u8; 5] {
        let mut block = sample.into();
        Aes128::new(&self.header.into()).encrypt_block(&mut block);
        [block[0], block[1], block[2], block[3], block[4]]
    }
}

/// HKDF-Expand-Label of RFC 8446, 7.1, without a context.
fn expand<const LEN: usize>(from: &Hkdf<Sha256>, label: &str) -> [u8; LEN] {
    let label = [b"tls13 ", label.as_bytes()].concat();
    let info = [&[0, LEN as u8, label.len() as u8], &label[..], &[0]].concat();
    let mut out = [0; LEN];
    from.expand(&info, &mut out).expect("a short output");
    out
}

#[cfg(test)]
#[path = "quic_test.rs"]
mod tests;
