//! Keys of Initial packets, which derive from the first of them (RFC 9001 section 5.2, RFC 9369
//! section 3.3).
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

/// A version whose Initial packets can be read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Version {
    /// QUIC version 1 (RFC 9000).
    One,
    /// QUIC version 2 (RFC 9369).
    Two,
}

impl Version {
    /// Returns the version of a long header's field; `None` if it is unknown.
    pub fn parse(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            0x6b33_43cf => Some(Self::Two),
            _ => None,
        }
    }

    const fn salt(self) -> [u8; 20] {
        match self {
            Self::One => [
                0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8,
                0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a,
            ],
            Self::Two => [
                0x0d, 0xed, 0xe3, 0xde, 0xf7, 0x00, 0xa6, 0xdb, 0x81, 0x93, 0x81, 0xbe, 0x6e, 0x26,
                0x9d, 0xcb, 0xf9, 0xbd, 0x2e, 0xd9,
            ],
        }
    }

    const fn labels(self) -> [&'static [u8]; 3] {
        match self {
            Self::One => [b"quic key", b"quic iv", b"quic hp"],
            Self::Two => [b"quicv2 key", b"quicv2 iv", b"quicv2 hp"],
        }
    }
}

#[cfg(test)]
thread_local! {
    /// Number of keys derived by this thread.
    pub(crate) static DERIVED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Protection keys of one side's Initial packets of a connection.
pub struct Keys {
    payload: Aes128Gcm,
    iv: [u8; 12],
    header: Aes128,
}

impl Keys {
    /// Derives the client's keys from the destination connection id of its first Initial packet.
    pub fn of_client(version: Version, destination: &[u8]) -> Self {
        Self::of(b"client in", version, destination)
    }

    /// Derives the server's keys of the same connection.
    pub fn of_server(version: Version, destination: &[u8]) -> Self {
        Self::of(b"server in", version, destination)
    }

    fn of(side: &[u8], version: Version, destination: &[u8]) -> Self {
        #[cfg(test)]
        DERIVED.set(DERIVED.get() + 1);
        let initial = Hkdf::<Sha256>::new(Some(&version.salt()), destination);
        let mut secret = [0; 32];
        expand(&initial, side, &mut secret);
        // It has the hash's length, so it is a key as good as any.
        let secret = Hkdf::<Sha256>::from_prk(&secret).unwrap_or(initial);
        let [key_label, iv_label, header_label] = version.labels();
        let (mut key, mut iv, mut header) = ([0; 16], [0; 12], [0; 16]);
        expand(&secret, key_label, &mut key);
        expand(&secret, iv_label, &mut iv);
        expand(&secret, header_label, &mut header);
        Self {
            payload: Aes128Gcm::new(&key.into()),
            iv,
            header: Aes128::new(&header.into()),
        }
    }

    /// Returns the mask of a header's first byte and packet number (RFC 9001 section 5.4.3).
    pub fn mask(&self, sample: [u8; 16]) -> [u8; 5] {
        let mut block = sample.into();
        self.header.encrypt_block(&mut block);
        std::array::from_fn(|at| block[at])
    }

    /// Decrypts a payload. `header` has its protection removed. Returns `None` if the payload does
    /// not authenticate under these keys.
    pub fn open(&self, number: u64, header: &[u8], payload: &[u8]) -> Option<Vec<u8>> {
        let payload = Payload {
            msg: payload,
            aad: header,
        };
        let nonce = self.nonce(number).into();
        self.payload.decrypt(&nonce, payload).ok()
    }

    fn nonce(&self, number: u64) -> [u8; 12] {
        let mut nonce = self.iv;
        for (byte, of_number) in nonce[4..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= of_number;
        }
        nonce
    }

    /// Encrypts a payload, for tests.
    #[cfg(any(test, feature = "fake"))]
    pub fn seal(&self, number: u64, header: &[u8], payload: &[u8]) -> Vec<u8> {
        let payload = Payload {
            msg: payload,
            aad: header,
        };
        let nonce = self.nonce(number).into();
        self.payload.encrypt(&nonce, payload).unwrap_or_default()
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

/// HKDF-Expand-Label with an empty context (RFC 8446 section 7.1).
fn expand(secret: &Hkdf<Sha256>, label: &[u8], out: &mut [u8]) {
    let len = (out.len() as u16).to_be_bytes();
    let label_len = [(6 + label.len()) as u8];
    let info: [&[u8]; 5] = [&len, &label_len, b"tls13 ", label, &[0]];
    // It fails for more than 255 hashes' length only.
    let _ = secret.expand_multi_info(&info, out);
}
