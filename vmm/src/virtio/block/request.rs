//! One request of the driver: taken apart, checked, and carried out by one operation of the file
//! after another.
use libc::iovec;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::{
    DiskCounters, MAX_RANGE_BYTES, MAX_REQUEST_BYTES, SECTOR_BYTES,
    counters::count,
    direct::{Buffer, Buffers},
    file::Image,
    file_io::{Action, MAX_PIECES, Operation},
};
use crate::virtio::{
    pieces::{self, Translation, total},
    ring::{Broken, Ring},
};

const HEADER_BYTES: usize = 16;
/// Bytes of `struct virtio_blk_discard_write_zeroes`.
const RANGE_BYTES: usize = 16;
/// Length of a disk's name, as GET_ID gives it.
pub(super) const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// What is written where the file can't make zeroes itself, aligned for direct transfers.
#[repr(align(4096))]
struct Zeroes([u8; 1 << 16]);

static ZEROES: Zeroes = Zeroes([0; 1 << 16]);
/// Most pieces of zeroes that one operation writes: 1 MiB, so that a pause does not wait for all.
const ZERO_PIECES: usize = 16;

/// Disk that requests are for.
pub(super) struct Target<'a> {
    pub(super) image: &'a Image,
    pub(super) id: &'a [u8; ID_BYTES],
    /// Whether a write is made stable before it is answered.
    pub(super) write_through: bool,
    pub(super) counters: &'a DiskCounters,
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It was carried out. The bytes of the answer, without the status.
    Done(u64),
    /// Its type or a flag of it is unknown.
    Unsupported,
    /// It is not whole sectors of the disk, it is too long or too short, or writes a disk that is
    /// read-only.
    Invalid,
    /// The file could not be read, written or flushed.
    Failed,
}

/// What is left to do for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// This operation of the file.
    Operation(Operation),
    /// Nothing but to give the answer.
    Answer(Answer),
}

/// What the operation under way is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Work {
    #[default]
    Flush,
    Read,
    Write,
    Discard,
    /// Zeroes, by the file system or the device; `unmap`: their place may be given back.
    Zero {
        unmap: bool,
    },
    /// Makes zeroes stable that the file system or the device has made.
    FlushZeroes,
    /// Zeroes, by writing them.
    WriteZeroes,
}

/// A request that was taken from the ring. Kept from request to request, for the room of its lists.
#[derive(Default)]
pub(super) struct Request {
    head: u16,
    /// Buffers that the driver filled: the header, then the data of a write.
    read: Vec<iovec>,
    /// Buffers for the answer: the data of a read.
    write: Vec<iovec>,
    /// Buffers of the operation that are not transferred yet.
    pieces: Vec<iovec>,
    /// Where the operation's bytes pass through, if the buffers are not aligned as the file asks for,
    /// and the part of it that the operation uses.
    buffer: Option<Buffer>,
    part: Vec<iovec>,
    status: Option<iovec>,
    /// Length of the buffers for the answer, without the status.
    room: u64,
    /// Length of its data, as far as any is carried out.
    data_bytes: u64,
    work: Work,
    /// Place on the disk where the operation begins.
    offset: u64,
    /// Length of the operation, as it was begun.
    bytes: u64,
}

// SAFETY: the pieces are addresses of the guest's memory and of the queue's buffers, which every thread
// may use alike.
unsafe impl Send for Request {}

impl Request {
    /// Returns the first descriptor of its chain.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// Returns the length of its data, bytes.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Returns the buffer that it has taken, once no operation uses it.
    pub(super) fn take_buffer(&mut self) -> Option<Buffer> {
        self.buffer.take()
    }

    /// Takes the request of a chain apart. Returns what to do first. `buffers`: one of which it takes
    /// if it needs one, and then there is one; `None`: the file takes any memory.
    ///
    /// # Errors
    /// The chain is invalid, or has no room for the status.
    pub(super) fn take(
        &mut self,
        (ring, head, memory): (&Ring, u16, &Translation),
        target: &Target,
        buffers: Option<&mut Buffers>,
    ) -> Result<Next, Broken> {
        let Request { read, write, .. } = self;
        read.clear();
        write.clear();
        ring.walk(head, memory, |buffer| {
            if !buffer.writable && !write.is_empty() {
                return Err(Broken::Direction);
            }
            let to = if buffer.writable {
                &mut *write
            } else {
                &mut *read
            };
            memory.append(buffer.guest, buffer.bytes, to)
        })?;
        self.status = Some(take_last(write).ok_or(Broken::Status)?);
        self.head = head;
        self.room = total(&self.write) as u64;
        let sent = (total(&self.read) as u64).saturating_sub(HEADER_BYTES as u64);
        self.data_bytes = (sent + self.room).min(MAX_REQUEST_BYTES);
        Ok(match self.begin(target, buffers) {
            Ok(next) => next,
            Err(answer) => Next::Answer(answer),
        })
    }

    /// Reads and checks the header. `Err`: the answer, if there is an error in the request.
    fn begin(&mut self, target: &Target, buffers: Option<&mut Buffers>) -> Result<Next, Answer> {
        let mut header = [0; HEADER_BYTES];
        // SAFETY: the pieces are mapped memory of the guest.
        if unsafe { pieces::read(&self.read, 0, &mut header) } < HEADER_BYTES {
            return Err(Answer::Invalid);
        }
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let kind = u32::from_le_bytes([a, b, c, d]);
        let writes = [
            VIRTIO_BLK_T_OUT,
            VIRTIO_BLK_T_DISCARD,
            VIRTIO_BLK_T_WRITE_ZEROES,
        ];
        if writes.contains(&kind) && target.image.is_read_only() {
            return Err(Answer::Invalid);
        }
        self.pieces.clear();
        match kind {
            VIRTIO_BLK_T_IN => {
                self.pieces.extend_from_slice(&self.write);
                self.transfer(Work::Read, sector, target, buffers)
            }
            VIRTIO_BLK_T_OUT => {
                let all = usize::MAX;
                pieces::append_part(&self.read, HEADER_BYTES, all, &mut self.pieces);
                self.transfer(Work::Write, sector, target, buffers)
            }
            VIRTIO_BLK_T_FLUSH if target.image.flushes() => Ok(self.operation(Work::Flush, target)),
            VIRTIO_BLK_T_FLUSH => Ok(Next::Answer(Answer::Done(0))),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => self.range(kind, target),
            VIRTIO_BLK_T_GET_ID => {
                // SAFETY: mapped memory of the guest, which the driver gave to be written.
                let bytes = unsafe { pieces::write(&self.write, 0, target.id) };
                Ok(Next::Answer(Answer::Done(bytes as u64)))
            }
            _ => Err(Answer::Unsupported),
        }
    }

    /// Begins to transfer `pieces`.
    fn transfer(
        &mut self,
        work: Work,
        sector: u64,
        target: &Target,
        buffers: Option<&mut Buffers>,
    ) -> Result<Next, Answer> {
        self.bytes = total(&self.pieces) as u64;
        if self.bytes > MAX_REQUEST_BYTES {
            return Err(Answer::Invalid);
        }
        let place = target.image.place(sector, self.bytes);
        self.offset = place.ok_or(Answer::Invalid)?;
        if self.bytes == 0 {
            self.work = work;
            return Ok(Next::Answer(self.done(target)));
        }
        if let (Some(alignment), Some(buffers)) = (target.image.alignment(), buffers)
            && !alignment.holds(&self.pieces)
        {
            self.buffer = Some(buffers.take().ok_or(Answer::Failed)?);
            count(&target.counters.unaligned, 1);
        }
        Ok(self.operation(work, target))
    }

    /// Begins to discard a range of the disk, or to make it zeroes (virtio 1.2, section 5.2.6).
    fn range(&mut self, kind: u32, target: &Target) -> Result<Next, Answer> {
        let mut range = [0; RANGE_BYTES];
        // SAFETY: the pieces are mapped memory of the guest.
        let there = unsafe { pieces::read(&self.read, HEADER_BYTES, &mut range) };
        if there < RANGE_BYTES || total(&self.read) > HEADER_BYTES + RANGE_BYTES {
            return Err(Answer::Invalid);
        }
        let range = u128::from_le_bytes(range);
        let (sector, sectors, flags) = (range as u64, (range >> 64) as u32, (range >> 96) as u32);
        self.bytes = u64::from(sectors) * SECTOR_BYTES;
        let work = match (kind, flags) {
            (VIRTIO_BLK_T_DISCARD, 0) => Work::Discard,
            (VIRTIO_BLK_T_WRITE_ZEROES, 0 | VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) => {
                self.data_bytes = self.bytes.min(MAX_RANGE_BYTES);
                Work::Zero { unmap: flags != 0 }
            }
            _ => return Err(Answer::Unsupported),
        };
        if self.bytes > MAX_RANGE_BYTES {
            return Err(Answer::Invalid);
        }
        let place = target.image.place(sector, self.bytes);
        self.offset = place.ok_or(Answer::Invalid)?;
        if self.bytes == 0 {
            return Ok(Next::Answer(Answer::Done(0)));
        }
        Ok(self.operation(work, target))
    }

    /// Returns the operation that is next for some work. Its pieces stay where they are until it
    /// has ended.
    fn operation(&mut self, work: Work, target: &Target) -> Next {
        self.work = work;
        let most = match work {
            Work::WriteZeroes => ZERO_PIECES,
            _ => MAX_PIECES,
        };
        self.fill_buffer(work);
        let pieces = match self.buffer {
            Some(_) => &self.part,
            None => &self.pieces,
        };
        let (pieces, count) = (pieces.as_ptr(), pieces.len().min(most));
        let action = match work {
            Work::Read => Action::Read {
                pieces,
                count: count as u32,
            },
            Work::Write | Work::WriteZeroes => Action::Write {
                pieces,
                count: count as u32,
                stable: target.write_through,
            },
            Work::Flush | Work::FlushZeroes => Action::Flush,
            Work::Discard | Work::Zero { unmap: true } => Action::Allocate {
                mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                bytes: self.bytes,
            },
            Work::Zero { unmap: false } => Action::Allocate {
                mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                bytes: self.bytes,
            },
        };
        Next::Operation(Operation {
            offset: self.offset,
            action,
        })
    }

    /// Prepares the buffer, if there is one, for an operation.
    fn fill_buffer(&mut self, work: Work) {
        let left = total(&self.pieces);
        let Some(buffer) = &mut self.buffer else {
            return;
        };
        self.part.clear();
        self.part.push(buffer.piece(left));
        if work == Work::Write {
            // SAFETY: the queue's buffers live as long as its requests, and no operation of this one
            // is under way.
            let bytes = unsafe { buffer.bytes(left) };
            // SAFETY: the pieces are mapped memory of the guest.
            unsafe { pieces::read(&self.pieces, 0, bytes) };
        }
    }

    /// Takes the bytes of a read from the buffer, if there is one. Returns how many of those that an
    /// operation has transferred are behind the request: so many that the rest is aligned.
    fn empty_buffer(&mut self, work: Work, transferred: usize, target: &Target) -> usize {
        let Some(alignment) = target.image.alignment() else {
            return transferred;
        };
        let unit = match self.buffer {
            Some(_) => alignment.block() as usize,
            None => alignment.unit(),
        };
        let is_all = transferred >= total(&self.pieces);
        let done = if is_all {
            transferred
        } else {
            transferred / unit * unit
        };
        if let (Some(buffer), Work::Read) = (&mut self.buffer, work) {
            // SAFETY: the queue's buffers live as long as its requests, and no operation of this one
            // is under way.
            let bytes = unsafe { buffer.bytes(done) };
            // SAFETY: mapped memory of the guest, which the driver gave to be written.
            unsafe { pieces::write(&self.pieces, 0, bytes) };
        }
        done
    }

    /// Takes the result of the last operation: a number of bytes, or a negative errno. Returns what
    /// to do next.
    pub(super) fn ended(&mut self, result: i32, target: &Target) -> Next {
        let work = self.work;
        let Ok(transferred) = usize::try_from(result) else {
            return match (-result, work) {
                (libc::EINTR, _) => self.operation(work, target),
                // A file system or device that can't, or not in parts of its blocks: a discard is a
                // hint, zeroes are not.
                (libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV, Work::Discard) => {
                    count(&target.counters.discards_ignored, 1);
                    Next::Answer(Answer::Done(0))
                }
                (libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV, Work::Zero { .. }) => {
                    self.write_zeroes(target)
                }
                _ => Next::Answer(Answer::Failed),
            };
        };
        match work {
            Work::Read | Work::Write | Work::WriteZeroes => {
                let transferred = self.empty_buffer(work, transferred, target);
                if transferred == 0 {
                    // The file has become shorter.
                    return Next::Answer(Answer::Failed);
                }
                self.advance(transferred);
                match self.pieces.is_empty() {
                    true => Next::Answer(self.done(target)),
                    false => self.operation(work, target),
                }
            }
            Work::Zero { .. } if target.write_through => self.operation(Work::FlushZeroes, target),
            Work::Zero { .. } | Work::Discard | Work::Flush | Work::FlushZeroes => {
                Next::Answer(self.done(target))
            }
        }
    }

    /// Zeroes for a file that can't make them by itself.
    fn write_zeroes(&mut self, target: &Target) -> Next {
        let mut left = self.bytes as usize;
        while left > 0 {
            let iov_len = left.min(ZEROES.0.len());
            self.pieces.push(iovec {
                // Only read.
                iov_base: ZEROES.0.as_ptr().cast_mut().cast(),
                iov_len,
            });
            left -= iov_len;
        }
        self.operation(Work::WriteZeroes, target)
    }

    /// Takes away what is transferred.
    fn advance(&mut self, mut bytes: usize) {
        self.offset += bytes as u64;
        let mut whole = 0;
        for piece in &mut self.pieces {
            let part = bytes.min(piece.iov_len);
            piece.iov_base = piece.iov_base.wrapping_byte_add(part);
            piece.iov_len -= part;
            bytes -= part;
            if piece.iov_len > 0 {
                break;
            }
            whole += 1;
        }
        self.pieces.drain(..whole);
    }

    /// Counts the work that is done.
    fn done(&self, target: &Target) -> Answer {
        let counters = target.counters;
        let all = |counter, bytes_counter| {
            count(counter, 1);
            count(bytes_counter, self.bytes);
        };
        match self.work {
            Work::Read => {
                all(&counters.reads, &counters.read_bytes);
                return Answer::Done(self.bytes);
            }
            Work::Write => {
                all(&counters.writes, &counters.written_bytes);
                // Nothing was to be made stable for a request without data.
                let made_stable = target.write_through && self.bytes > 0;
                count(&counters.flushes, made_stable.into());
            }
            Work::Flush => count(&counters.flushes, 1),
            Work::Discard => count(&counters.discarded_bytes, self.bytes),
            Work::FlushZeroes => {
                count(&counters.flushes, 1);
                count(&counters.zeroed_bytes, self.bytes);
            }
            Work::Zero { .. } | Work::WriteZeroes => count(&counters.zeroed_bytes, self.bytes),
        }
        Answer::Done(0)
    }

    /// Writes the status and gives the chain back.
    pub(super) fn give_back(&mut self, answer: Answer, ring: &mut Ring, counters: &DiskCounters) {
        let (status, done) = match answer {
            Answer::Done(bytes) => (VIRTIO_BLK_S_OK, bytes),
            Answer::Unsupported => {
                count(&counters.unsupported, 1);
                (VIRTIO_BLK_S_UNSUPP, 0)
            }
            Answer::Invalid => {
                count(&counters.invalid, 1);
                (VIRTIO_BLK_S_IOERR, 0)
            }
            Answer::Failed => {
                count(&counters.failed, 1);
                (VIRTIO_BLK_S_IOERR, 0)
            }
        };
        if let Some(place) = self.status.take() {
            // SAFETY: the piece is mapped memory of the guest, which the driver gave to be written.
            unsafe { pieces::write(&[place], 0, &[status as u8]) };
        }
        // Bytes at the start of the buffers, of which the status is the last.
        let written = if done == self.room { done + 1 } else { done };
        ring.push_used(self.head, u32::try_from(written).unwrap_or(u32::MAX));
    }
}

/// Takes the last byte away. Returns it as a piece; `None` if there is none.
fn take_last(pieces: &mut Vec<iovec>) -> Option<iovec> {
    let last = pieces.last_mut()?;
    // Pieces are not empty.
    last.iov_len -= 1;
    let byte = iovec {
        iov_base: last.iov_base.wrapping_byte_add(last.iov_len),
        iov_len: 1,
    };
    if last.iov_len == 0 {
        pieces.pop();
    }
    Some(byte)
}

#[cfg(test)]
#[path = "request_test.rs"]
mod tests;
