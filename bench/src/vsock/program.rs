//! The program of the host at the other end of a stream.

use std::{
    io::{Read, Write},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

/// Bytes of a write to the guest.
pub(super) const WRITE_BYTES: usize = 64 << 10;
/// Bytes of a message, and of a read.
const MESSAGE_BYTES: usize = 64;
const READ_BYTES: usize = 256 << 10;

/// Sends messages to an echo, each after the answer to the one before. Returns their times, µs.
pub(super) fn exchanges(stream: &mut (impl Read + Write), count: usize) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    let mut answer = [0; MESSAGE_BYTES];
    for number in 0..count {
        let message = [number as u8; MESSAGE_BYTES];
        let begin = Instant::now();
        stream.write_all(&message).context("send a message")?;
        stream.read_exact(&mut answer).context("await the answer")?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        ensure!(answer == message, "message {number} came back changed");
    }
    Ok(times)
}

/// Writes so many bytes to a sink, and awaits its receipt.
pub(super) fn to_guest(stream: &mut (impl Read + Write), bytes: u64) -> Result<()> {
    let data = vec![0; WRITE_BYTES];
    let mut left = bytes;
    while left > 0 {
        let part = left.min(WRITE_BYTES as u64) as usize;
        stream.write_all(&data[..part]).context("write")?;
        left -= part as u64;
    }
    let mut receipt = [0; 8];
    stream.read_exact(&mut receipt).context("await a receipt")?;
    let taken = u64::from_le_bytes(receipt);
    ensure!(taken == bytes, "{taken} of {bytes} bytes were taken");
    Ok(())
}

/// Reads so many bytes of a source.
pub(super) fn from_guest(stream: &mut impl Read, bytes: u64) -> Result<()> {
    let mut data = vec![0; READ_BYTES];
    let mut left = bytes;
    while left > 0 {
        let read = stream.read(&mut data).context("read")? as u64;
        ensure!(read > 0, "the stream ended {left} bytes too early");
        ensure!(read <= left, "{} bytes too many came", read - left);
        left -= read;
    }
    Ok(())
}

#[cfg(test)]
#[path = "program_test.rs"]
mod tests;
