//! Predictable bytes: byte `i` of a stream follows from its seed and `i` alone, so a receiver that
//! knows both can tell the first byte that is wrong, missing, doubled or moved.

use crate::impairment::SplitMix64;

/// An endless stream of predictable bytes, or the check of one.
#[derive(Clone, Debug)]
pub struct Pattern {
    seed: u64,
    position: u64,
}

impl Pattern {
    /// The stream of `seed`, from its first byte.
    pub fn new(seed: u64) -> Self {
        Pattern { seed, position: 0 }
    }

    /// Returns the number of bytes written or checked so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Fills `out` with the next bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.words(out.len(), |at, expected| {
            out[at..at + expected.len()].copy_from_slice(expected);
            true
        });
        self.position += out.len() as u64;
    }

    /// Compares `bytes` with the next ones.
    ///
    /// # Errors
    /// The stream offset of the first wrong byte.
    pub fn check(&mut self, bytes: &[u8]) -> Result<(), u64> {
        let mut wrong = None;
        self.words(bytes.len(), |at, expected| {
            let got = &bytes[at..at + expected.len()];
            if got != expected {
                wrong = got
                    .iter()
                    .zip(expected)
                    .position(|(a, b)| a != b)
                    .map(|byte| at + byte);
            }
            wrong.is_none()
        });
        match wrong {
            Some(at) => Err(self.position + at as u64),
            None => {
                self.position += bytes.len() as u64;
                Ok(())
            }
        }
    }

    /// Calls `each` with the offset into the caller's buffer and the bytes due there, in pieces of
    /// up to 8, until `len` bytes are done or it returns false.
    fn words(&self, len: usize, mut each: impl FnMut(usize, &[u8]) -> bool) {
        let mut at = 0;
        while at < len {
            let position = self.position + at as u64;
            let word = SplitMix64(self.seed.wrapping_add(position / 8))
                .next()
                .to_le_bytes();
            let skip = (position % 8) as usize;
            let piece = &word[skip..(skip + len - at).min(8)];
            if !each(at, piece) {
                return;
            }
            at += piece.len();
        }
    }
}

#[cfg(test)]
#[path = "pattern_test.rs"]
mod tests;
