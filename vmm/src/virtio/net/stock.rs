//! The guest's empty buffers.
//!
//! Before a frame is read nobody knows how long it is, so each read of a batch is given more
//! buffers than most frames take. What a frame leaves over comes back here, to be first for the
//! next read: the driver never notices.
use std::collections::VecDeque;

use libc::iovec;

use super::{
    pieces::{Translation, total},
    ring::{Broken, Ring},
    tap::HEADER_BYTES,
    tx::MAX_PIECES,
};

/// Room for the pieces of buffers that came back, and of some more.
const ROOM: usize = 16 * 1024;
/// One system call takes no more pieces than these and the spill: the rest of a longer chain is
/// not used.
pub(super) const MAX_CHAIN_PIECES: usize = MAX_PIECES - 1;

/// A chain of buffers that the driver made available.
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
    /// Taken off the ring and not given back, here and elsewhere.
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

    /// Takes the next chain, from here or else from the ring, and lists its pieces. `None` when
    /// the driver has made no more available.
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

    /// Takes the next chain off the ring.
    fn fetch(
        &mut self,
        ring: &mut Ring,
        memory: &Translation,
        pieces: &mut Vec<iovec>,
    ) -> Result<Option<Chain>, Broken> {
        // More than the queue holds can't be in hand, but for a driver that lies.
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

    /// Takes chains back that hold nothing, in order; they are the next to be taken.
    pub(super) fn put_back(&mut self, chains: &[Chain], pieces: &[iovec]) {
        for chain in chains.iter().rev() {
            self.chains.push_front(*chain);
            self.bytes += u64::from(chain.bytes);
        }
        for piece in pieces.iter().rev() {
            self.pieces.push_front(*piece);
        }
    }

    /// Takes all from the ring that is needed to have so many bytes here; says whether there are.
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

    /// Whether the driver could yet make buffers available.
    pub(super) fn may_grow(&self, ring: &Ring) -> bool {
        self.in_hand < usize::from(ring.size())
    }

    /// A chain was given back to the driver.
    pub(super) fn used(&mut self) {
        self.in_hand -= 1;
    }
}
