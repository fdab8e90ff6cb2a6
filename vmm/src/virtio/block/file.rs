//! The file behind a disk: what it is, its size, and how its writes become stable.
use std::{
    fs::File,
    io::{Seek, SeekFrom},
    os::unix::fs::FileTypeExt,
};

use super::{Cache, DiskConfig, DiskError, SECTOR_BYTES, tried};

/// File or block device of a disk.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: File,
    bytes: u64,
    read_only: bool,
    cache: Cache,
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
            cache,
            queues: _,
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
            cache,
        })
    }

    pub(super) fn sectors(&self) -> u64 {
        self.bytes / SECTOR_BYTES
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns whether the driver is offered to ask for flushes.
    pub(super) fn offers_flush(&self) -> bool {
        self.cache != Cache::WriteThrough
    }

    /// Returns whether a flush is an operation of the file.
    pub(super) fn flushes(&self) -> bool {
        !self.read_only && self.cache != Cache::Unsafe
    }

    /// Returns whether each write is made stable before it is answered, for a driver that did or
    /// did not accept to ask for flushes.
    pub(super) fn is_write_through(&self, driver_flushes: bool) -> bool {
        match self.cache {
            Cache::WriteThrough => true,
            Cache::WriteBack => !driver_flushes,
            Cache::Unsafe => false,
        }
    }

    /// Returns the offset of a sector, if `bytes` from there are whole sectors of the disk.
    pub(super) fn place(&self, sector: u64, bytes: u64) -> Option<u64> {
        let start = sector.checked_mul(SECTOR_BYTES)?;
        let end = start.checked_add(bytes)?;
        (bytes.is_multiple_of(SECTOR_BYTES) && end <= self.bytes).then_some(start)
    }
}
