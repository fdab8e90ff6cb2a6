//! Transmit direction: from the guest to the TAP.
use std::time::Instant;

use libc::iovec;

use super::{
    DropReason,
    counters::PairCounters,
    features::Features,
    frame_io::{Direction, Transfer},
    header,
    limits::Limit,
    pieces::{self, Translation},
    ring::{Broken, Ring},
    tap::HEADER_BYTES,
};

/// Largest number of frames in one batch. Above 64 the cost per frame falls no further.
pub(super) const BATCH: usize = 64;
/// Bytes after which a batch takes no more frames: long frames are copied while they are in the
/// cache, and the driver has the first ones back while the next are in flight.
pub(super) const BATCH_BYTES: usize = 256 << 10;
/// Largest number of pieces that readv and writev take (`UIO_MAXIOV`).
pub(super) const MAX_PIECES: usize = 1024;
/// Capacity for a batch of usual frames (Linux: 19 pieces) and one of any length, each of its
/// buffers across two regions of memory.
const ROOM: usize = BATCH * 20 + 2 * MAX_PIECES + 1;

/// Transmit queue, and the batch that is being written.
pub(super) struct Tx {
    pub(super) ring: Ring,
    features: Features,
    /// Pieces of each frame, in order: one for the header's copy, then the guest's.
    pieces: Vec<iovec>,
    headers: Box<[[u8; HEADER_BYTES]; BATCH]>,
    batch: Vec<Frame>,
    /// Number of frames of the batch that the TAP has not taken yet.
    left: usize,
}

/// Result of [`Tx::gather`]: which frames it found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gathered {
    /// Whether there were frames.
    pub(super) any: bool,
    /// Time until which the frames that are in the ring wait for the limit; `None`: none do.
    pub(super) until: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    head: u16,
    first: u32,
    count: u32,
    bytes: u32,
    done: bool,
}

impl Tx {
    pub(super) fn new(ring: Ring, features: Features) -> Tx {
        Tx {
            ring,
            features,
            pieces: Vec::with_capacity(ROOM),
            headers: Box::new([[0; HEADER_BYTES]; BATCH]),
            batch: Vec::with_capacity(BATCH),
            left: 0,
        }
    }

    /// Returns the chains that were taken and not given back, in order: those of frames that the TAP
    /// has not taken yet.
    pub(super) fn taken(&self) -> Vec<u16> {
        let left = self.batch.iter().filter(|frame| !frame.done);
        left.map(|frame| frame.head).collect()
    }

    /// Returns whether frames of the batch are left, because the TAP took fewer than it was given.
    pub(super) fn is_stalled(&self) -> bool {
        self.left > 0
    }

    /// Takes frames off the ring, unless some are left from before, as many as the limit lets pass.
    /// Invalid ones are counted and given back.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub(super) fn gather(
        &mut self,
        memory: &Translation,
        limit: &Limit,
        counters: &PairCounters,
    ) -> Result<Gathered, Broken> {
        let mut gathered = Gathered::default();
        if self.left > 0 {
            return Ok(gathered);
        }
        self.pieces.clear();
        self.batch.clear();
        let mut bytes = 0;
        for _ in 0..BATCH {
            if bytes >= BATCH_BYTES {
                break;
            }
            if self.pieces.len() + 2 * usize::from(self.ring.size()) + 1 > ROOM {
                break;
            }
            if let Some(until) = limit.closed_until() {
                // With nothing in the ring, the driver has to notify.
                gathered.until = (self.ring.waiting()? > 0).then_some(until);
                break;
            }
            let Some(head) = self.ring.next()? else { break };
            gathered.any = true;
            match self.take(head, memory)? {
                Ok(frame) => {
                    bytes += frame.bytes as usize;
                    if limit.is_set() {
                        let header = &self.headers[self.batch.len()];
                        let packets = header::packets(header, frame.bytes as usize);
                        limit.charge(frame.bytes.into(), packets);
                    }
                    self.batch.push(frame);
                }
                Err(reason) => {
                    // It took time as well.
                    limit.charge(0, 1);
                    counters.dropped(reason);
                    self.ring.push_used(head, 0);
                }
            }
        }
        self.left = self.batch.len();
        Ok(gathered)
    }

    /// Appends a chain's pieces behind a checked copy of its header.
    fn take(
        &mut self,
        head: u16,
        memory: &Translation,
    ) -> Result<Result<Frame, DropReason>, Broken> {
        let start = self.pieces.len();
        // Reserves a piece for the header's copy, in case the guest's header has no piece of its
        // own.
        self.pieces.push(piece(&mut []));
        let list = &mut self.pieces;
        let mut bytes: u64 = 0;
        self.ring.walk(head, memory, |buffer| {
            if buffer.writable {
                return Err(Broken::Direction);
            }
            bytes += u64::from(buffer.bytes);
            memory.append(buffer.guest, buffer.bytes, list)
        })?;
        let checked = self.check(start, bytes);
        if checked.is_err() {
            self.pieces.truncate(start);
        }
        Ok(checked.map(|(first, bytes)| Frame {
            head,
            first: first as u32,
            count: (self.pieces.len() - first) as u32,
            bytes,
            done: false,
        }))
    }

    /// Replaces the header by its checked copy. Returns the index of the frame's first piece, and
    /// the frame's length without the header.
    fn check(&mut self, start: usize, bytes: u64) -> Result<(usize, u32), DropReason> {
        let frame_bytes = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| bytes.checked_sub(HEADER_BYTES))
            .ok_or(DropReason::TxShort)?;
        let copy = &mut self.headers[self.batch.len()];
        // SAFETY: `Translation` gave the pieces, which it keeps mapped.
        unsafe { pieces::read(&self.pieces[start + 1..], 0, copy) };
        header::check(copy, frame_bytes, self.features)?;
        // Cut off the guest's header. The copy takes the place of the header's last whole piece.
        let mut first = start;
        let mut left = HEADER_BYTES;
        while let Some(next) = self.pieces.get_mut(first + 1).filter(|_| left > 0) {
            if next.iov_len <= left {
                left -= next.iov_len;
                first += 1;
            } else {
                next.iov_base = next.iov_base.wrapping_byte_add(left);
                next.iov_len -= left;
                left = 0;
            }
        }
        self.pieces[first] = piece(copy);
        if self.pieces.len() - first > MAX_PIECES {
            return Err(DropReason::TxPieces);
        }
        Ok((first, frame_bytes as u32))
    }

    /// Appends a transfer for each frame that is not written yet.
    pub(super) fn transfers(&self, transfers: &mut Vec<Transfer>) {
        let left = self.batch.iter().filter(|frame| !frame.done);
        transfers.extend(left.map(|frame| Transfer {
            pieces: &raw const self.pieces[frame.first as usize],
            count: frame.count,
            direction: Direction::Write,
            result: -libc::EAGAIN,
        }));
    }

    /// Gives back the frames that were written or refused. The others stay for the next pass.
    pub(super) fn complete(&mut self, results: &[Transfer], counters: &PairCounters) {
        let (mut frames, mut bytes) = (0, 0);
        let waiting = self.batch.iter_mut().filter(|frame| !frame.done);
        for (frame, transfer) in waiting.zip(results) {
            match transfer.result {
                done if done >= 0 => {
                    frames += 1;
                    bytes += u64::from(frame.bytes);
                }
                error if error == -libc::EAGAIN || error == -libc::EINTR => continue,
                error => counters.dropped(reason(-error)),
            }
            frame.done = true;
            self.left -= 1;
            self.ring.push_used(frame.head, 0);
        }
        counters.tx_frames.add(frames);
        counters.tx_bytes.add(bytes);
    }
}

/// Returns the drop reason for an error of the TAP (`tun_get_user` of Linux).
fn reason(errno: i32) -> DropReason {
    match errno {
        libc::EINVAL => DropReason::TxRefused,
        libc::EIO => DropReason::TxLinkDown,
        libc::EBADFD => DropReason::TxDeviceGone,
        libc::ENOBUFS | libc::ENOMEM => DropReason::TxNoMemory,
        _ => DropReason::TxOther,
    }
}

fn piece(bytes: &mut [u8]) -> iovec {
    iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}
