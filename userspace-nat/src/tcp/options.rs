//! Options of a segment: what a SYN offers, timestamps (RFC 7323) and selective acknowledgements (RFC
//! 2018).
use slipgate_abi::tcp::Flags;

use crate::packet::transport::{OPTION_MSS, OPTION_TIMESTAMPS, Tcp, tcp_options};

/// Option kind of the window scale (RFC 7323 section 2).
const OPTION_WINDOW_SCALE: u8 = 3;
/// Option kinds of RFC 2018.
const OPTION_SACK_PERMITTED: u8 = 4;
const OPTION_SACK: u8 = 5;
const NO_OPERATION: u8 = 1;
/// Largest shift that is valid (RFC 7323 section 2.3).
const MOST_SCALE: u8 = 14;
/// Length of timestamps in a header, with the two octets that align them (RFC 7323 appendix A).
pub(super) const TIMESTAMPS_LEN: usize = 12;
/// Blocks of sequence numbers in one segment at most: four take 34 octets of the 40 that options have,
/// and three leave room for timestamps.
const MOST_BLOCKS: usize = 4;
const MOST_BLOCKS_WITH_TIMESTAMPS: usize = 3;

/// Options of a SYN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SynOptions {
    /// Largest segment that the sender takes, bytes of payload.
    pub mss: Option<u16>,
    /// Shift of the sender's later windows.
    pub window_scale: Option<u8>,
    /// Whether the sender takes selective acknowledgements.
    pub sack_permitted: bool,
}

/// Timestamps of a segment (RFC 7323 section 3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timestamps {
    /// The sender's time, in its own unit.
    pub value: u32,
    /// The newest time of the receiver's that the sender has seen.
    pub echo: u32,
}

/// Received blocks of sequence numbers behind a gap, each from its first number to the one behind its
/// last.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct SackBlocks {
    blocks: [(u32, u32); MOST_BLOCKS],
    len: u8,
}

impl SackBlocks {
    /// Adds a block behind the others. Returns whether there was room.
    pub fn push(&mut self, block: (u32, u32)) -> bool {
        let Some(place) = self.blocks.get_mut(usize::from(self.len)) else {
            return false;
        };
        *place = block;
        self.len += 1;
        true
    }

    /// Puts a block before the others, of which the last may be forgotten for it.
    pub(super) fn push_front(&mut self, block: (u32, u32)) {
        self.blocks.rotate_right(1);
        self.blocks[0] = block;
        self.len = (self.len + 1).min(MOST_BLOCKS as u8);
    }

    /// Keeps those for which `is_kept`.
    pub(super) fn retain(&mut self, is_kept: impl Fn((u32, u32)) -> bool) {
        let mut kept = Self::default();
        for block in self.iter().filter(|block| is_kept(*block)) {
            kept.push(block);
        }
        *self = kept;
    }

    /// Returns the blocks in their order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.blocks.into_iter().take(self.len.into())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for SackBlocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Options of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Options {
    pub(super) syn: SynOptions,
    pub(super) timestamps: Option<Timestamps>,
    pub(super) sack: SackBlocks,
}

impl Options {
    /// Reads the options of a segment. `header`: the bytes that `tcp` was parsed from.
    pub(super) fn read(tcp: &Tcp, header: &[u8]) -> Self {
        let is_syn = tcp.has(Flags::SYN);
        let header = &header[..tcp.header_len.min(header.len())];
        let mut options = Self::default();
        for (kind, at, len) in tcp_options(header) {
            let word = |at: usize| {
                let word = header.get(at..).and_then(|rest| rest.first_chunk());
                word.map_or(0, |word| u32::from_be_bytes(*word))
            };
            match (kind, len) {
                (OPTION_MSS, 4) if is_syn => {
                    options.syn.mss = Some(u16::from_be_bytes([header[at + 2], header[at + 3]]));
                }
                (OPTION_WINDOW_SCALE, 3) if is_syn => {
                    options.syn.window_scale = Some(header[at + 2].min(MOST_SCALE));
                }
                (OPTION_SACK_PERMITTED, 2) if is_syn => options.syn.sack_permitted = true,
                (OPTION_TIMESTAMPS, 10) => {
                    options.timestamps = Some(Timestamps {
                        value: word(at + 2),
                        echo: word(at + 6),
                    });
                }
                (OPTION_SACK, 10..) if !is_syn && len % 8 == 2 => {
                    options.sack = SackBlocks::default();
                    for block in (at + 2..at + len).step_by(8) {
                        options.sack.push((word(block), word(block + 4)));
                    }
                }
                _ => {}
            }
        }
        options
    }
}

/// Options of a segment to the guest, as they are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written<'h> {
    /// Of a SYN: our MSS, and window scale if it is told.
    pub(super) syn: Option<(u16, Option<u8>)>,
    pub(super) sack_permitted: bool,
    pub(super) timestamps: Option<Timestamps>,
    pub(super) sack: &'h SackBlocks,
}

impl Written<'_> {
    /// Number of blocks for which there is room.
    fn blocks(&self) -> usize {
        let most = match self.timestamps {
            Some(_) => MOST_BLOCKS_WITH_TIMESTAMPS,
            None => MOST_BLOCKS,
        };
        usize::from(self.sack.len).min(most)
    }

    /// Length of the options, a multiple of four bytes.
    pub(super) fn len(&self) -> usize {
        let blocks = match self.blocks() {
            0 => 0,
            some => 4 + 8 * some,
        };
        let permitted = match (self.sack_permitted, self.timestamps) {
            // In the two octets that align timestamps.
            (true, None) => 4,
            _ => 0,
        };
        let syn = if self.syn.is_some() { 8 } else { 0 };
        let timestamps = self.timestamps.map_or(0, |_| TIMESTAMPS_LEN);
        syn + permitted + timestamps + blocks
    }

    /// Writes the options; `into` is as long as they are.
    pub(super) fn write(&self, into: &mut [u8]) {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            into[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        if let Some((mss, scale)) = self.syn {
            let [high, low] = mss.to_be_bytes();
            put(&[OPTION_MSS, 4, high, low]);
            put(&match scale {
                Some(scale) => [NO_OPERATION, OPTION_WINDOW_SCALE, 3, scale],
                None => [NO_OPERATION; 4],
            });
        }
        if self.sack_permitted {
            put(&[OPTION_SACK_PERMITTED, 2]);
        }
        if let Some(Timestamps { value, echo }) = self.timestamps {
            if !self.sack_permitted {
                put(&[NO_OPERATION; 2]);
            }
            put(&[OPTION_TIMESTAMPS, 10]);
            put(&value.to_be_bytes());
            put(&echo.to_be_bytes());
        } else if self.sack_permitted {
            put(&[NO_OPERATION; 2]);
        }
        let blocks = self.blocks();
        if blocks > 0 {
            put(&[
                NO_OPERATION,
                NO_OPERATION,
                OPTION_SACK,
                2 + 8 * blocks as u8,
            ]);
            for (first, end) in self.sack.iter().take(blocks) {
                put(&first.to_be_bytes());
                put(&end.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
#[path = "options_test.rs"]
mod tests;
