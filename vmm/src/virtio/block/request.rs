//! One request of the driver: taken apart, checked, and carried out.
use std::io;

use libc::iovec;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::{DiskCounters, MAX_REQUEST_BYTES, counters::count, file::Image};
use crate::virtio::{
    pieces::{self, Translation, total},
    ring::{Broken, Ring},
};

const HEADER_BYTES: usize = 16;
/// Length of a disk's name, as GET_ID gives it.
pub(super) const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Disk that requests are for.
pub(super) struct Target<'a> {
    pub(super) image: &'a Image,
    pub(super) id: &'a [u8; ID_BYTES],
    /// Whether a write is made stable before it is answered.
    pub(super) write_through: bool,
    pub(super) counters: &'a DiskCounters,
}

/// Buffers of a request. Kept from request to request, for their room.
#[derive(Default)]
pub(super) struct Request {
    /// Buffers that the driver filled: the header, then the data of a write.
    read: Vec<iovec>,
    /// Buffers for the answer: the data of a read, then the status.
    write: Vec<iovec>,
    /// Length of its data, as far as any is carried out.
    data_bytes: u64,
}

impl Request {
    /// Returns the length of the last request's data, bytes.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Carries out the request of a chain and writes its status. Returns the number of bytes at
    /// the start of the chain's writable buffers that were written.
    ///
    /// # Errors
    /// The chain is invalid, or has no room for the status.
    pub(super) fn carry_out(
        &mut self,
        ring: &Ring,
        head: u16,
        memory: &Translation,
        target: &Target,
    ) -> Result<u32, Broken> {
        let Request {
            read,
            write,
            data_bytes,
        } = self;
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
        let status = take_last(write).ok_or(Broken::Status)?;
        let room = total(write) as u64;
        let sent = (total(read) as u64).saturating_sub(HEADER_BYTES as u64);
        *data_bytes = (sent + room).min(MAX_REQUEST_BYTES);
        let (answer, done) = match target.perform(read, write) {
            Ok(done) => (VIRTIO_BLK_S_OK, done),
            Err(Refusal::Unsupported) => {
                count(&target.counters.unsupported, 1);
                (VIRTIO_BLK_S_UNSUPP, 0)
            }
            Err(Refusal::Invalid) => {
                count(&target.counters.invalid, 1);
                (VIRTIO_BLK_S_IOERR, 0)
            }
            Err(Refusal::Failed) => {
                count(&target.counters.failed, 1);
                (VIRTIO_BLK_S_IOERR, 0)
            }
        };
        // SAFETY: the piece is mapped memory of the guest, which the driver gave to be written.
        unsafe { pieces::write(&[status], 0, &[answer as u8]) };
        let written = if done == room { done + 1 } else { done };
        Ok(u32::try_from(written).unwrap_or(u32::MAX))
    }
}

/// Reason why a request is answered with an error.
#[derive(Debug)]
enum Refusal {
    /// Its type is unknown.
    Unsupported,
    /// It is not whole sectors of the disk, it is too long or too short, or writes a disk that is
    /// read-only.
    Invalid,
    /// The file could not be read, written or flushed.
    Failed,
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Self {
        Refusal::Failed
    }
}

impl Target<'_> {
    /// Carries out a request. Returns the number of bytes of its answer, without the status.
    fn perform(&self, read: &mut [iovec], write: &mut [iovec]) -> Result<u64, Refusal> {
        let mut header = [0; HEADER_BYTES];
        // SAFETY: the pieces are mapped memory of the guest.
        if unsafe { pieces::read(read, 0, &mut header) } < HEADER_BYTES {
            return Err(Refusal::Invalid);
        }
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => {
                let (offset, bytes) = self.place(sector, write)?;
                // SAFETY: mapped memory of the guest, which the driver gave to be written.
                unsafe { self.image.read(write, offset) }?;
                count(&self.counters.reads, 1);
                count(&self.counters.read_bytes, bytes);
                Ok(bytes)
            }
            VIRTIO_BLK_T_OUT => {
                if self.image.is_read_only() {
                    return Err(Refusal::Invalid);
                }
                skip(read, HEADER_BYTES);
                let (offset, bytes) = self.place(sector, read)?;
                // SAFETY: mapped memory of the guest.
                unsafe { self.image.write(read, offset) }?;
                if self.write_through {
                    self.flush()?;
                }
                count(&self.counters.writes, 1);
                count(&self.counters.written_bytes, bytes);
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                if !self.image.is_read_only() {
                    self.flush()?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                // SAFETY: mapped memory of the guest, which the driver gave to be written.
                Ok(unsafe { pieces::write(write, 0, self.id) } as u64)
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.image.flush()?;
        count(&self.counters.flushes, 1);
        Ok(())
    }

    /// Returns where on the disk the data of a request lie, and their length in bytes.
    fn place(&self, sector: u64, data: &[iovec]) -> Result<(u64, u64), Refusal> {
        let bytes = total(data) as u64;
        if bytes > MAX_REQUEST_BYTES {
            return Err(Refusal::Invalid);
        }
        let offset = self.image.place(sector, bytes).ok_or(Refusal::Invalid)?;
        Ok((offset, bytes))
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

/// Takes the first `bytes` away.
fn skip(pieces: &mut [iovec], mut bytes: usize) {
    for piece in pieces {
        let part = bytes.min(piece.iov_len);
        piece.iov_base = piece.iov_base.wrapping_byte_add(part);
        piece.iov_len -= part;
        bytes -= part;
    }
}
