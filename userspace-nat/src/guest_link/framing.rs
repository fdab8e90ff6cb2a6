//! Ethernet frames on a stream: each is preceded by its length, 32 bits, big-endian. It is the framing of
//! QEMU's `-netdev stream` and of passt.
//!
//! # Theory of operation
//! Each direction has one buffer. [`FrameReader`] takes what one read gives, many frames or a part of
//! one, and returns whole frames; a length that no frame has is an error, after which nothing on the
//! stream has a meaning. [`FrameQueue`] holds frames for a peer that has not read them yet: contiguous,
//! so that one write sends many, and bounded.
use std::fmt;

use crate::port::ETHERNET_LEN;

/// Length of the length before each frame, bytes.
pub const PREFIX_LEN: usize = 4;
/// Longest frame: an Ethernet header and the longest IPv4 packet, bytes.
pub const MOST_FRAME: usize = ETHERNET_LEN + 65_535;
/// Length of a reader's buffer, bytes.
const READ_LEN: usize = 128 << 10;
/// Most bytes that a queue holds.
pub const MOST_QUEUED: usize = 512 << 10;
/// Sent bytes at the beginning of a queue that are removed, when there are so many.
const COMPACT_AT: usize = 128 << 10;

// What is left of a frame always fits, with room for more.
const _: () = assert!(READ_LEN > PREFIX_LEN + MOST_FRAME);

/// A length that no frame has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a frame of {0} bytes is announced; {MOST_FRAME} is the most")]
pub struct TooLong(pub u32);

/// Takes a stream apart into frames.
pub struct FrameReader {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self {
            buffer: vec![0; READ_LEN].into_boxed_slice(),
            begin: 0,
            end: 0,
        }
    }
}

impl FrameReader {
    /// Returns the part of the buffer to read into. It is not empty if no whole frame is held.
    pub fn room(&mut self) -> &mut [u8] {
        // Part of a frame at most, and once a frame.
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        &mut self.buffer[self.end..]
    }

    /// Notes that `len` bytes were read into [`FrameReader::room`].
    pub fn filled(&mut self, len: usize) {
        self.end = (self.end + len).min(self.buffer.len());
    }

    /// Returns the next whole frame; `None` if it is not there yet.
    ///
    /// # Errors
    /// No frame has the length that comes next.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, TooLong> {
        let Some(len) = self.next_len()? else {
            return Ok(None);
        };
        let at = self.begin + PREFIX_LEN;
        if self.end - at < len {
            return Ok(None);
        }
        self.begin = at + len;
        Ok(Some(&self.buffer[at..at + len]))
    }

    /// Returns the frame that [`FrameReader::next_frame`] returns next.
    pub fn peek_frame(&self) -> Option<&[u8]> {
        let len = self.next_len().ok()??;
        let at = self.begin + PREFIX_LEN;
        self.buffer[at..self.end].get(..len)
    }

    /// Whether [`FrameReader::next_frame`] has something to say.
    pub fn has_whole(&self) -> bool {
        match self.next_len() {
            Ok(Some(len)) => self.held() >= PREFIX_LEN + len,
            Ok(None) => false,
            Err(TooLong(_)) => true,
        }
    }

    /// Returns the number of bytes that are held: of frames that were not returned yet.
    pub fn held(&self) -> usize {
        self.end - self.begin
    }

    /// Forgets what is held.
    pub fn clear(&mut self) {
        (self.begin, self.end) = (0, 0);
    }

    fn next_len(&self) -> Result<Option<usize>, TooLong> {
        let held = &self.buffer[self.begin..self.end];
        let Some(prefix) = held.first_chunk::<PREFIX_LEN>() else {
            return Ok(None);
        };
        let announced = u32::from_be_bytes(*prefix);
        match announced as usize {
            len @ ..=MOST_FRAME => Ok(Some(len)),
            _ => Err(TooLong(announced)),
        }
    }
}

impl fmt::Debug for FrameReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameReader")
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}

/// Frames for a peer, with their lengths, as they go into the stream.
#[derive(Default)]
pub struct FrameQueue {
    bytes: Vec<u8>,
    sent: usize,
}

impl FrameQueue {
    /// Returns what is to be sent.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Returns the frames of [`FrameQueue::unsent`], if it begins with one.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.unsent();
        std::iter::from_fn(move || {
            let (len, behind) = rest.split_first_chunk::<PREFIX_LEN>()?;
            let frame;
            (frame, rest) = behind.split_at_checked(u32::from_be_bytes(*len) as usize)?;
            Some(frame)
        })
    }

    /// Whether `frames` more frames of `bytes` bytes together fit.
    pub fn has_room(&self, frames: usize, bytes: usize) -> bool {
        let needed = frames.saturating_mul(PREFIX_LEN).saturating_add(bytes);
        needed <= MOST_QUEUED.saturating_sub(self.unsent().len())
    }

    /// Adds a frame of two parts, for which there is room, and returns it to be completed.
    pub fn push(&mut self, headers: &[u8], payload: &[u8]) -> &mut [u8] {
        let len = headers.len() + payload.len();
        debug_assert!(len <= MOST_FRAME && self.has_room(1, len));
        self.bytes.extend_from_slice(&(len as u32).to_be_bytes());
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(headers);
        self.bytes.extend_from_slice(payload);
        &mut self.bytes[begin..]
    }

    /// Notes that `len` bytes of [`FrameQueue::unsent`] were sent.
    pub fn sent(&mut self, len: usize) {
        self.sent = (self.sent + len).min(self.bytes.len());
        if self.sent == self.bytes.len() {
            self.clear();
        } else if self.sent >= COMPACT_AT {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Forgets all frames that wait to be sent.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.sent = 0;
    }
}

impl fmt::Debug for FrameQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameQueue")
            .field("unsent", &self.unsent().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "framing_test.rs"]
mod tests;
