//! Receive direction: from the TAP to the guest.
//!
//! A batch of reads is prepared before any frame's length is known ([`Rx::prepare`]). With
//! MRG_RXBUF each read gets chains for the longest frame seen lately, without it one chain. Behind
//! them each read gets a piece of the VMM's own memory, the spill, so that no frame is cut short.
//! When the reads are done ([`Rx::complete`]), chains that hold nothing go back to the [`Stock`],
//! and frames are given to the driver in the order they came. The end of a frame that went into the
//! spill is copied into further chains: a second copy, of a frame longer than those before it.
//!
//! A spilled frame that lacks chains is held, with all frames behind it, until the driver adds
//! some. It is dropped, and counted, when the driver can't add enough, or has not within [`HOLD`].
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use libc::iovec;
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_CSUM;

use super::{
    DropReason,
    counters::PairCounters,
    features::Features,
    filter::Filter,
    frame_io::{Direction, Transfer},
    header::{self, ETHERNET_BYTES, MAX_FRAME_BYTES, NUM_BUFFERS_AT},
    limits::Limit,
    pieces::{self, Translation},
    ring::{Broken, Ring},
    stock::{Chain, MAX_CHAIN_PIECES, Stock},
    tap::HEADER_BYTES,
    tx::{BATCH_BYTES, MAX_PIECES},
};

/// Largest number of frames read in one batch.
pub(super) const BATCH: usize = 64;
/// Longest time that a frame waits for the driver to add the buffers it lacks.
pub(super) const HOLD: Duration = Duration::from_millis(100);
/// Length of the longest frame with a VLAN tag and a header, bytes. A read of one byte more is too
/// long.
const LONGEST_BYTES: usize = HEADER_BYTES + MAX_FRAME_BYTES + 4;
const SPILL_BYTES: usize = LONGEST_BYTES + 1;
/// Least room of a read: a frame of the usual MTU with its headers, bytes.
const USUAL_BYTES: usize = HEADER_BYTES + ETHERNET_BYTES + 1500;
/// Capacity for a batch's pieces, whatever the number of pieces of one read.
const ROOM: usize = 8 * 1024;

/// Receive queue, and the batch that is being read or delivered.
pub(super) struct Rx {
    pub(super) ring: Ring,
    features: Features,
    mergeable: bool,
    checksum_flags: bool,
    /// Receive filter; `None` passes all frames.
    filter: Option<Arc<Filter>>,
    stock: Stock,
    /// Room that a read gets, bytes with header.
    expected: usize,
    reads: Vec<Read>,
    chains: Vec<Chain>,
    pieces: Vec<iovec>,
    /// Pieces of one chain, reused for each.
    scratch: Vec<iovec>,
    spill: Vec<u8>,
    /// Index in `reads` of the next frame to deliver, and the time since which it lacks buffers.
    next: usize,
    held_since: Option<Instant>,
}

/// One read: the ranges of its chains and pieces, and its result.
#[derive(Clone, Copy, Debug)]
struct Read {
    chain: usize,
    /// Number of chains: all that it was given, then those that hold data.
    chains: usize,
    piece: usize,
    /// Number of pieces, without the spill.
    pieces: usize,
    room: usize,
    /// Bytes read, with the header; 0 if there is nothing to deliver.
    filled: usize,
}

impl Rx {
    pub(super) fn new(ring: Ring, features: Features) -> Rx {
        Rx {
            stock: Stock::new(ring.size()),
            ring,
            features,
            mergeable: features.mergeable(),
            checksum_flags: features.has(VIRTIO_NET_F_GUEST_CSUM),
            filter: None,
            expected: USUAL_BYTES,
            reads: Vec::with_capacity(BATCH),
            chains: Vec::with_capacity(2 * MAX_PIECES),
            pieces: Vec::with_capacity(ROOM),
            scratch: Vec::with_capacity(2 * MAX_PIECES),
            // The kernel zeroes it when it is first touched, which most of it never is.
            spill: vec![0; BATCH * SPILL_BYTES],
            next: 0,
            held_since: None,
        }
    }

    pub(super) fn set_filter(&mut self, filter: Option<Arc<Filter>>) {
        self.filter = filter;
    }

    /// Returns the time since which a frame has been waiting for buffers; `None` if none is.
    pub(super) fn held_since(&self) -> Option<Instant> {
        self.held_since
    }

    /// Returns the length of the longest frame seen lately, bytes without header.
    pub(super) fn expected(&self) -> usize {
        self.expected - HEADER_BYTES
    }

    /// Returns the chains that were taken and not given back, in order. Frames in them that the
    /// driver has not been given are not part of a snapshot: they are lost as on any network.
    pub(super) fn taken(&self) -> Vec<u16> {
        let reads = self.reads.iter().skip(self.next);
        let read = reads.flat_map(|read| &self.chains[read.chain..read.chain + read.chains]);
        read.map(|chain| chain.head)
            .chain(self.stock.heads())
            .collect()
    }

    /// Prepares reads, at most `wanted`. Returns their number: fewer when the driver has no more
    /// buffers.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub(super) fn prepare(&mut self, wanted: usize, memory: &Translation) -> Result<usize, Broken> {
        debug_assert!(self.reads.is_empty(), "the last batch was delivered");
        let wanted = wanted.min(BATCH).min(BATCH_BYTES.div_ceil(self.expected));
        while self.reads.len() < wanted && self.pieces.len() + 2 * MAX_PIECES <= ROOM {
            let (chain, piece) = (self.chains.len(), self.pieces.len());
            let room = self.lay_out(memory)?;
            let short = self.mergeable && room < self.expected;
            if room == 0 || (short && !self.reads.is_empty()) {
                // The reads before it must do with the buffers they have.
                self.stock
                    .put_back(&self.chains[chain..], &self.pieces[piece..]);
                self.chains.truncate(chain);
                self.pieces.truncate(piece);
                break;
            }
            let read = Read {
                chain,
                chains: self.chains.len() - chain,
                piece,
                pieces: self.pieces.len() - piece,
                room,
                filled: 0,
            };
            let spill = &mut self.spill[self.reads.len() * SPILL_BYTES..][..SPILL_BYTES];
            self.pieces.push(iovec {
                iov_base: spill.as_mut_ptr().cast(),
                iov_len: spill.len(),
            });
            self.reads.push(read);
        }
        Ok(self.reads.len())
    }

    /// Takes chains for one read. Returns their length in bytes.
    fn lay_out(&mut self, memory: &Translation) -> Result<usize, Broken> {
        let piece = self.pieces.len();
        let mut room = 0;
        while room == 0 || (self.mergeable && room < self.expected) {
            let taken = self.stock.take(&mut self.ring, memory, &mut self.pieces)?;
            let Some(taken) = taken else { break };
            if self.pieces.len() - piece > MAX_CHAIN_PIECES {
                let from = self.pieces.len() - taken.pieces as usize;
                self.stock.put_back(&[taken], &self.pieces[from..]);
                self.pieces.truncate(from);
                break;
            }
            self.chains.push(taken);
            room += taken.bytes as usize;
        }
        Ok(room)
    }

    /// Appends a transfer for each prepared read.
    pub(super) fn transfers(&self, transfers: &mut Vec<Transfer>) {
        transfers.extend(self.reads.iter().map(|read| Transfer {
            pieces: &raw const self.pieces[read.piece],
            count: read.pieces as u32 + 1,
            direction: Direction::Read,
            result: -libc::EAGAIN,
        }));
    }

    /// Takes the results of the reads, charges the limit, and delivers the frames that have room.
    /// Returns the number of reads that had a frame.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub(super) fn complete(
        &mut self,
        results: &[Transfer],
        memory: &Translation,
        limit: &Limit,
        counters: &PairCounters,
    ) -> Result<usize, Broken> {
        let (mut frames, mut longest) = (0, 0);
        // Backwards, so that chains go back in order.
        for (index, transfer) in results.iter().enumerate().rev() {
            let Some(read) = self.reads.get(index).copied() else {
                continue;
            };
            let mut filled = 0;
            if let Ok(bytes) = usize::try_from(transfer.result)
                && bytes > 0
            {
                frames += 1;
                longest = longest.max(bytes);
                if limit.is_set() {
                    self.charge(limit, &read, bytes);
                }
                match self.refuse(&read, bytes) {
                    Some(reason) => counters.dropped(reason),
                    None => filled = bytes,
                }
            }
            let held = self.chains_for(&read, filled);
            self.put_back_of(index, held);
            self.reads[index].filled = filled;
        }
        if frames > 0 {
            // The estimate rises at once and falls slowly.
            let slowly = self.expected - self.expected / 8;
            self.expected = longest.max(slowly).max(USUAL_BYTES);
        }
        self.deliver(memory, counters)?;
        Ok(frames)
    }

    /// Charges a limit for a frame of `bytes` in the pieces of `read`.
    fn charge(&self, limit: &Limit, read: &Read, bytes: usize) {
        let pieces = &self.pieces[read.piece..=read.piece + read.pieces];
        let mut header = [0; HEADER_BYTES];
        // SAFETY: `prepare` listed these pieces: the guest's, which the translation keeps mapped,
        // and the spill.
        unsafe { pieces::read(pieces, 0, &mut header) };
        let frame_bytes = bytes.saturating_sub(HEADER_BYTES);
        limit.charge(frame_bytes as u64, header::packets(&header, frame_bytes));
    }

    /// Returns the reason to drop a frame of `bytes` in the pieces of `read`; `None` to deliver it.
    fn refuse(&self, read: &Read, bytes: usize) -> Option<DropReason> {
        if bytes < HEADER_BYTES + ETHERNET_BYTES {
            return Some(DropReason::RxShort);
        }
        if bytes > LONGEST_BYTES {
            return Some(DropReason::RxLong);
        }
        if !self.mergeable && bytes > read.room {
            return Some(DropReason::RxBufferSize);
        }
        let pieces = &self.pieces[read.piece..=read.piece + read.pieces];
        let mut header = [0; 2];
        // SAFETY: `prepare` listed these pieces: the guest's, which the translation keeps mapped,
        // and the spill.
        unsafe { pieces::read(pieces, 0, &mut header) };
        if !header::may_receive(header, self.features) {
            return Some(DropReason::RxOffload);
        }
        let filter = self.filter.as_deref()?;
        let mut to = [0; 6];
        // SAFETY: as above.
        unsafe { pieces::read(pieces, HEADER_BYTES, &mut to) };
        (!filter.wants(&to)).then_some(DropReason::RxFiltered)
    }

    /// Returns the number of a read's chains that hold its first `bytes`.
    fn chains_for(&self, read: &Read, bytes: usize) -> usize {
        let mut left = bytes;
        let chains = &self.chains[read.chain..read.chain + read.chains];
        let taken = chains.iter().take_while(|chain| {
            let needed = left > 0;
            left = left.saturating_sub(chain.bytes as usize);
            needed
        });
        taken.count()
    }

    /// Keeps the first `keep` chains of a read and puts the others back.
    fn put_back_of(&mut self, index: usize, keep: usize) {
        let read = &mut self.reads[index];
        let kept = &self.chains[read.chain..read.chain + keep];
        let pieces: usize = kept.iter().map(|chain| chain.pieces as usize).sum();
        self.stock.put_back(
            &self.chains[read.chain + keep..read.chain + read.chains],
            &self.pieces[read.piece + pieces..read.piece + read.pieces],
        );
        read.chains = keep;
    }

    /// Delivers frames in order, until all are delivered or one lacks buffers.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub(super) fn deliver(
        &mut self,
        memory: &Translation,
        counters: &PairCounters,
    ) -> Result<(), Broken> {
        while let Some(read) = self.reads.get(self.next).copied() {
            if read.filled > 0 {
                let spilled = read.filled.saturating_sub(read.room);
                if spilled == 0 || self.has_room_for(spilled, memory)? {
                    self.give(&read, spilled, memory, counters)?;
                } else if self.is_hopeless() {
                    counters.dropped(DropReason::RxRingSize);
                    self.put_back_of(self.next, 0);
                } else {
                    self.held_since.get_or_insert_with(Instant::now);
                    return Ok(());
                }
                self.held_since = None;
            }
            self.next += 1;
        }
        self.next = 0;
        self.reads.clear();
        self.chains.clear();
        self.pieces.clear();
        Ok(())
    }

    fn has_room_for(&mut self, bytes: usize, memory: &Translation) -> Result<bool, Broken> {
        let (ring, scratch) = (&mut self.ring, &mut self.scratch);
        self.stock.gather(bytes as u64, ring, memory, scratch)
    }

    /// Returns whether the driver can add no more buffers, or the time for it is over.
    fn is_hopeless(&self) -> bool {
        let late = |since: Instant| since.elapsed() >= HOLD;
        !self.stock.may_grow(&self.ring) || self.held_since.is_some_and(late)
    }

    /// Delivers one frame to the driver.
    fn give(
        &mut self,
        read: &Read,
        spilled: usize,
        memory: &Translation,
        counters: &PairCounters,
    ) -> Result<(), Broken> {
        let mut left = read.filled;
        let mut count: u16 = 0;
        for at in read.chain..read.chain + read.chains {
            let chain = self.chains[at];
            let bytes = left.min(chain.bytes as usize);
            self.use_up(chain, bytes);
            left -= bytes;
            count += 1;
        }
        let spill_at = self.next * SPILL_BYTES;
        while left > 0 {
            self.scratch.clear();
            let taken = self.stock.take(&mut self.ring, memory, &mut self.scratch)?;
            let Some(chain) = taken else { break };
            let bytes = left.min(chain.bytes as usize);
            let from = &self.spill[spill_at + spilled - left..][..bytes];
            // SAFETY: the pieces are the guest's, writable and kept mapped by the translation.
            unsafe { pieces::write(&self.scratch, 0, from) };
            self.use_up(chain, bytes);
            left -= bytes;
            count += 1;
        }
        let listed = &self.pieces[read.piece..read.piece + read.pieces];
        // SAFETY: as above.
        unsafe {
            // The kernel does not write the number of buffers (`tun_put_user`).
            pieces::write(listed, NUM_BUFFERS_AT, &count.to_le_bytes());
            if !self.checksum_flags {
                pieces::write(listed, 0, &[0]);
            }
        }
        counters.rx_frames.add(1);
        counters.rx_bytes.add((read.filled - HEADER_BYTES) as u64);
        counters.rx_buffers.add(count.into());
        if spilled > 0 {
            counters.rx_spilled_frames.add(1);
            counters.rx_spilled_bytes.add(spilled as u64);
        }
        Ok(())
    }

    fn use_up(&mut self, chain: Chain, bytes: usize) {
        self.ring.push_used(chain.head, bytes as u32);
        self.stock.used();
    }

    /// Drops and counts the frames that were not delivered, and puts all chains back.
    pub(super) fn abandon(&mut self, counters: &PairCounters) {
        for index in (self.next..self.reads.len()).rev() {
            if self.reads[index].filled > 0 {
                counters.dropped(DropReason::RxReset);
            }
            self.put_back_of(index, 0);
        }
        self.next = 0;
        self.held_since = None;
        self.reads.clear();
        self.chains.clear();
        self.pieces.clear();
    }
}
