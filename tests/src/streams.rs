//! Streams of predictable bytes over TCP: the order a client sends, the bytes, and the receipt.
//!
//! An order is 17 bytes: `S` (the server sends) or `R` (it receives), length and seed as big-endian
//! u64; or `P` and `D`, unchecked bytes without end either way. A receipt, for `R`, is 8 bytes
//! received and a SHA-256 of them. The receiver checks each byte against the pattern as it comes.

use std::io::{self, Read, Write};

use sha2::{Digest, Sha256};

use crate::pattern::Pattern;

/// Bytes handed to the kernel, or asked of it, at a time.
pub(crate) const BUFFER: usize = 128 * 1024;

/// Order of a client to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Send {
        len: u64,
        seed: u64,
    },
    Receive {
        len: u64,
        seed: u64,
    },
    /// Zeroes until the client goes: for measurements, where making and checking bytes would cost.
    Pour,
    /// Discard all bytes until the client ends; the receipt has the length, with a zero hash.
    Drain,
}

impl Order {
    pub(crate) fn write(self, stream: &mut impl Write) -> io::Result<()> {
        let (what, len, seed) = match self {
            Order::Send { len, seed } => (b'S', len, seed),
            Order::Receive { len, seed } => (b'R', len, seed),
            Order::Pour => (b'P', 0, 0),
            Order::Drain => (b'D', 0, 0),
        };
        let mut bytes = [0; 17];
        bytes[0] = what;
        bytes[1..9].copy_from_slice(&len.to_be_bytes());
        bytes[9..].copy_from_slice(&seed.to_be_bytes());
        stream.write_all(&bytes)
    }

    pub(crate) fn read(stream: &mut impl Read) -> io::Result<Order> {
        let mut what = [0; 1];
        let (mut len, mut seed) = ([0; 8], [0; 8]);
        stream.read_exact(&mut what)?;
        stream.read_exact(&mut len)?;
        stream.read_exact(&mut seed)?;
        let (len, seed) = (u64::from_be_bytes(len), u64::from_be_bytes(seed));
        match what[0] {
            b'S' => Ok(Order::Send { len, seed }),
            b'R' => Ok(Order::Receive { len, seed }),
            b'P' => Ok(Order::Pour),
            b'D' => Ok(Order::Drain),
            other => Err(wrong(format!("an order of kind {other:#x}"))),
        }
    }
}

/// Length and hash of the bytes that the receiver of a stream has read and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Number of bytes received.
    pub bytes: u64,
    /// SHA-256 of the bytes.
    pub sha256: [u8; 32],
}

impl Receipt {
    /// Receipt that a receiver of `len` bytes of `seed` must return.
    pub fn expected(len: u64, seed: u64) -> Receipt {
        receive(&mut Endless(Pattern::new(seed)), len, Pattern::new(seed))
            .expect("no I/O, no error")
    }

    pub(crate) fn to_bytes(self) -> [u8; 40] {
        let mut out = [0; 40];
        out[..8].copy_from_slice(&self.bytes.to_be_bytes());
        out[8..].copy_from_slice(&self.sha256);
        out
    }

    pub(crate) fn read(stream: &mut impl Read) -> io::Result<Receipt> {
        let (mut bytes, mut sha256) = ([0; 8], [0; 32]);
        stream.read_exact(&mut bytes)?;
        stream.read_exact(&mut sha256)?;
        Ok(Receipt {
            bytes: u64::from_be_bytes(bytes),
            sha256,
        })
    }
}

struct Endless(Pattern);

impl Read for Endless {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.fill(out);
        Ok(out.len())
    }
}

/// Sends `len` bytes of the pattern.
pub(crate) fn send(stream: &mut impl Write, len: u64, mut pattern: Pattern) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut left = len;
    while left > 0 {
        let piece = &mut buffer[..left.min(BUFFER as u64) as usize];
        pattern.fill(piece);
        stream.write_all(piece)?;
        left -= piece.len() as u64;
    }
    Ok(())
}

/// Receives exactly `len` bytes and checks each against the pattern.
pub(crate) fn receive(
    stream: &mut impl Read,
    len: u64,
    mut pattern: Pattern,
) -> io::Result<Receipt> {
    let mut buffer = vec![0; BUFFER];
    let mut hash = Sha256::new();
    while pattern.position() < len {
        let room = (len - pattern.position()).min(BUFFER as u64) as usize;
        let got = stream.read(&mut buffer[..room])?;
        if got == 0 {
            return Err(wrong(format!(
                "the stream ended at {} of {len} bytes",
                pattern.position()
            )));
        }
        hash.update(&buffer[..got]);
        pattern
            .check(&buffer[..got])
            .map_err(|at| wrong(format!("byte {at} of {len} is not what was sent")))?;
    }
    Ok(Receipt {
        bytes: len,
        sha256: hash.finalize().into(),
    })
}

/// Sends zeroes until the receiver goes.
pub(crate) fn pour(stream: &mut impl Write) -> io::Result<()> {
    let zeroes = vec![0; BUFFER];
    loop {
        stream.write_all(&zeroes)?;
    }
}

/// Receives until the sender ends; the bytes it was.
pub(crate) fn drain(stream: &mut impl Read) -> io::Result<u64> {
    let (mut buffer, mut bytes) = (vec![0; BUFFER], 0);
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(bytes),
            len => bytes += len as u64,
        }
    }
}

/// Returns the bytes in hexadecimal, two digits each, as `sha256sum` prints them.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
