//! The file behind a disk: its size, and transfers between it and the guest's memory.
use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{fd::AsRawFd, unix::fs::FileTypeExt},
};

use libc::iovec;

use super::{DiskConfig, DiskError, SECTOR_BYTES, tried};

/// Most pieces that one system call takes (UIO_MAXIOV).
const MAX_PIECES: usize = 1024;

/// File or block device of a disk.
#[derive(Debug)]
pub(super) struct Image {
    file: File,
    bytes: u64,
    read_only: bool,
}

impl Image {
    /// Checks the file and determines its size, which is the disk's from then on.
    ///
    /// # Errors
    /// It is no regular file or block device, or its size is no multiple of a sector.
    pub(super) fn new(config: DiskConfig) -> Result<Image, DiskError> {
        let DiskConfig {
            mut file,
            read_only,
            rate: _,
        } = config;
        let kind = file
            .metadata()
            .map_err(tried("look at the file"))?
            .file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind);
        }
        // The metadata of a block device has no size.
        let end = file.seek(SeekFrom::End(0));
        let bytes = end.map_err(tried("determine the file's size"))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::Size(bytes));
        }
        Ok(Image {
            file,
            bytes,
            read_only,
        })
    }

    pub(super) fn sectors(&self) -> u64 {
        self.bytes / SECTOR_BYTES
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the offset of a sector, if `bytes` from there are whole sectors of the disk.
    pub(super) fn place(&self, sector: u64, bytes: u64) -> Option<u64> {
        let start = sector.checked_mul(SECTOR_BYTES)?;
        let end = start.checked_add(bytes)?;
        (bytes.is_multiple_of(SECTOR_BYTES) && end <= self.bytes).then_some(start)
    }

    /// Fills the pieces with the file's bytes from `offset` on. The pieces are consumed.
    ///
    /// # Errors
    /// The host fails, or the file has become shorter.
    ///
    /// # Safety
    /// The pieces are mapped memory that may be written to.
    pub(super) unsafe fn read(&self, pieces: &mut [iovec], offset: u64) -> io::Result<()> {
        transfer(pieces, offset, |pieces, count, at| {
            // SAFETY: as of this function; `count` is the number of pieces.
            unsafe { libc::preadv(self.file.as_raw_fd(), pieces, count, at) }
        })
    }

    /// Writes the pieces to the file from `offset` on. The pieces are consumed.
    ///
    /// # Errors
    /// The host fails.
    ///
    /// # Safety
    /// The pieces are mapped memory.
    pub(super) unsafe fn write(&self, pieces: &mut [iovec], offset: u64) -> io::Result<()> {
        transfer(pieces, offset, |pieces, count, at| {
            // SAFETY: as of this function; `count` is the number of pieces.
            unsafe { libc::pwritev(self.file.as_raw_fd(), pieces, count, at) }
        })
    }

    /// Makes all earlier writes stable.
    ///
    /// # Errors
    /// The host fails.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Calls `call` until all pieces are transferred. A call may transfer less than it was given.
fn transfer(
    mut pieces: &mut [iovec],
    mut offset: u64,
    call: impl Fn(*const iovec, i32, i64) -> isize,
) -> io::Result<()> {
    while let Some(first) = pieces.first() {
        if first.iov_len == 0 {
            pieces = &mut pieces[1..];
            continue;
        }
        let count = pieces.len().min(MAX_PIECES) as i32;
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut done = match usize::try_from(call(pieces.as_ptr(), count, at)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(done) => done,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        };
        offset += done as u64;
        while let Some(piece) = pieces.first_mut() {
            let part = done.min(piece.iov_len);
            piece.iov_base = piece.iov_base.wrapping_byte_add(part);
            piece.iov_len -= part;
            done -= part;
            if piece.iov_len > 0 {
                break;
            }
            pieces = &mut pieces[1..];
        }
    }
    Ok(())
}
