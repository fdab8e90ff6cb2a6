//! Predictable bytes: byte `i` of a stream depends on its seed and `i` alone, so a receiver finds
//! the first byte that is wrong, missing, doubled or moved.
//!
//! Bytes `8 k` to `8 k + 7` are the little-endian output of SplitMix64 (Vigna) at state `seed + k`.
//! The testbed's stream servers generate and check the same bytes.

/// Generator or checker of an endless stream of predictable bytes.
#[derive(Clone, Debug)]
pub struct Pattern {
    seed: u64,
    position: u64,
}

impl Pattern {
    /// Returns the stream of `seed`, at its first byte.
    pub fn new(seed: u64) -> Self {
        Pattern { seed, position: 0 }
    }

    /// Returns the stream of `seed`, at this byte.
    pub fn at(seed: u64, position: u64) -> Self {
        Pattern { seed, position }
    }

    /// Returns the number of bytes written or checked so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Fills `out` with the next bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        let (head, rest) = out.split_at_mut(self.to_boundary(out.len()));
        head.copy_from_slice(&self.rest_of_word()[..head.len()]);
        self.position += head.len() as u64;
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.word(self.position));
            self.position += 8;
        }
        let tail = words.into_remainder();
        tail.copy_from_slice(&self.word(self.position)[..tail.len()]);
        self.position += tail.len() as u64;
    }

    /// Compares `bytes` with the next ones of the stream.
    ///
    /// # Errors
    /// A byte differs. The error is the stream offset of the first wrong byte.
    pub fn check(&mut self, bytes: &[u8]) -> Result<(), u64> {
        let (head, rest) = bytes.split_at(self.to_boundary(bytes.len()));
        self.compare(head, &self.rest_of_word())?;
        let mut words = rest.chunks_exact(8);
        for word in &mut words {
            self.compare(word, &self.word(self.position))?;
        }
        let tail = words.remainder();
        self.compare(tail, &self.word(self.position))
    }

    /// Compares `got` with `due`, and advances past it. `got` is no longer than `due`.
    fn compare(&mut self, got: &[u8], due: &[u8]) -> Result<(), u64> {
        if let Some(wrong) = got.iter().zip(due).position(|(got, due)| got != due) {
            return Err(self.position + wrong as u64);
        }
        self.position += got.len() as u64;
        Ok(())
    }

    /// Returns the number of bytes until a word begins, at most `len`.
    fn to_boundary(&self, len: usize) -> usize {
        (self.position.wrapping_neg() % 8).min(len as u64) as usize
    }

    /// Returns the rest of the word at the position, followed by bytes without meaning.
    fn rest_of_word(&self) -> [u8; 8] {
        let mut word = self.word(self.position);
        word.rotate_left((self.position % 8) as usize);
        word
    }

    /// Returns the word that holds byte `position`.
    fn word(&self, position: u64) -> [u8; 8] {
        split_mix_64(self.seed.wrapping_add(position / 8)).to_le_bytes()
    }
}

/// Returns the first output of Vigna's SplitMix64 from this state.
pub(crate) fn split_mix_64(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "pattern_test.rs"]
mod tests;
