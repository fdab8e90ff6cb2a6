//! The guest's empty buffers.
//!
//! A frame's length is unknown before it is read, so each read of a batch gets more buffers than
//! most frames take. The buffers that a frame leaves over are put back here, and the next read
//! takes them first. The driver sees nothing of this.
use std::collections::VecDeque;

use libc::iovec;

use super::{
    pieces::{Translation, total},
    ring::{Broken, Ring},
    tap::HEADER_BYTES,
    tx::MAX_PIECES,
};

/// Capacity for the pieces of buffers that were put back or gathered.
const ROOM: usize = 16 * 1024;
/// Largest number of pieces used of one chain. One system call takes no more than these and the
/// spill; the rest of a longer chain is not used.
pub(super) const MAX_CHAIN_PIECES: usize = MAX_PIECES - 1;

/// Chain of buffers that the driver made available.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    pub(super) head: u16,
    pub(super) pieces: u32,
    pub(super) bytes: u32,
}

/// Chains taken off the ring that hold nothing yet.
#[derive(Debug)]
pub(super) struct Stock {
    chains: VecDeque<Chain>,
    pieces: VecDeque<iovec>,
    bytes: u64,
    /// Number of chains taken off the ring and not given back, in the stock or in a batch.
    in_hand: usize,
}

impl Stock {
    pub(super) fn new(queue_size: u16) -> Stock {
        Stock {
            chains: VecDeque::with_capacity(queue_size.into()),
            pieces: VecDeque::with_capacity(ROOM),
            bytes: 0,
            in_hand: 0,
        }
    }

    /// Returns the chains in the stock, by their first descriptors, in order.
    pub(super) fn heads(&self) -> impl Iterator<Item = u16> {
        self.chains.iter().map(|chain| chain.head)
    }

    /// Takes the next chain, from the stock or else from the ring, and appends its pieces. `None`
    /// when the driver has made no more available.
    pub(super) fn take(
        &mut self,
        ring: &mut Ring,
        memory: &Translation,
        pieces: &mut Vec<iovec>,
    ) -> Result<Option<Chain>, Broken> {
        let Some(chain) = self.chains.pop_front() else {
            return self.fetch(ring, memory, pieces);
        };
        self.bytes -= u64::from(chain.bytes);
        pieces.extend(self.pieces.drain(..chain.pieces as usize));
        Ok(Some(chain))
    }

    /// Takes the next chain off the ring. `None` when the driver has made no more available.
    fn fetch(
        &mut self,
        ring: &mut Ring,
        memory: &Translation,
        pieces: &mut Vec<iovec>,
    ) -> Result<Option<Chain>, Broken> {
        // Only a driver that breaks the protocol makes more chains available than the queue holds.
        if !self.may_grow(ring) {
            return Ok(None);
        }
        let Some(head) = ring.next()? else {
            return Ok(None);
        };
        let before = pieces.len();
        ring.walk(head, memory, |buffer| {
            if !buffer.writable {
                return Err(Broken::Direction);
            }
            memory.append(buffer.guest, buffer.bytes, pieces)
        })?;
        pieces.truncate(before + MAX_CHAIN_PIECES);
        let bytes = total(&pieces[before..]);
        if bytes < HEADER_BYTES {
            return Err(Broken::Header);
        }
        self.in_hand += 1;
        Ok(Some(Chain {
            head,
            pieces: (pieces.len() - before) as u32,
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
        }))
    }

    /// Puts back chains that hold nothing, in order. They are the next to be taken.
    pub(super) fn put_back(&mut self, chains: &[Chain], pieces: &[iovec]) {
        for chain in chains.iter().rev() {
            self.chains.push_front(*chain);
            self.bytes += u64::from(chain.bytes);
        }
        for piece in pieces.iter().rev() {
            self.pieces.push_front(*piece);
        }
    }

    /// Takes chains off the ring until the stock has `wanted` bytes. Returns whether it has them.
    pub(super) fn gather(
        &mut self,
        wanted: u64,
        ring: &mut Ring,
        memory: &Translation,
        scratch: &mut Vec<iovec>,
    ) -> Result<bool, Broken> {
        while self.bytes < wanted && self.pieces.len() + MAX_CHAIN_PIECES <= ROOM {
            scratch.clear();
            let Some(chain) = self.fetch(ring, memory, scratch)? else {
                break;
            };
            self.bytes += u64::from(chain.bytes);
            self.chains.push_back(chain);
            self.pieces.extend(scratch.iter());
        }
        Ok(self.bytes >= wanted)
    }

    /// Returns whether the driver could make more buffers available.
    pub(super) fn may_grow(&self, ring: &Ring) -> bool {
        self.in_hand < usize::from(ring.size())
    }

    /// Records that a chain was given back to the driver.
    pub(super) fn used(&mut self) {
        self.in_hand -= 1;
    }
}
