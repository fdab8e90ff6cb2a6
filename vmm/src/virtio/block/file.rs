//! The file behind a disk: what it is, its size, and how its writes become stable.
use std::{
    fs::File,
    io::{Seek, SeekFrom},
    os::unix::fs::FileTypeExt,
};

use super::{Cache, DiskConfig, DiskError, SECTOR_BYTES, direct::Alignment, tried};

/// File or block device of a disk.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: File,
    bytes: u64,
    read_only: bool,
    cache: Cache,
    /// What transfers have to be aligned to; `None`: they go by the host's page cache.
    alignment: Option<Alignment>,
}

impl Image {
    /// Checks the file and determines its size, which is the disk's from then on.
    ///
    /// # Errors
    /// It is no regular file or block device, its size is no multiple of a sector, or of the blocks in
    /// which it has to be transferred, or the kernel does not transfer it as the cache mode says.
    pub(super) fn new(config: DiskConfig) -> Result<Image, DiskError> {
        let kind = (config.file.metadata())
            .map_err(tried("look at the file"))?
            .file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind);
        }
        let alignment = match config.cache {
            Cache::None => Some(Alignment::of(&config.file)?),
            Cache::WriteBack | Cache::WriteThrough | Cache::Unsafe => None,
        };
        Image::aligned(config, alignment)
    }

    /// As [`Image::new`], of a file of this alignment.
    pub(super) fn aligned(
        config: DiskConfig,
        alignment: Option<Alignment>,
    ) -> Result<Image, DiskError> {
        let DiskConfig {
            mut file,
            read_only,
            cache,
            queues: _,
            rate: _,
        } = config;
        // The metadata of a block device has no size.
        let end = file.seek(SeekFrom::End(0));
        let bytes = end.map_err(tried("determine the file's size"))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::Size(bytes));
        }
        let image = Image {
            file,
            bytes,
            read_only,
            cache,
            alignment,
        };
        let block = image.block();
        match bytes.is_multiple_of(block) {
            true => Ok(image),
            false => Err(DiskError::Blocks { bytes, block }),
        }
    }

    /// Returns what transfers have to be aligned to; `None`: to nothing but sectors.
    pub(super) fn alignment(&self) -> Option<&Alignment> {
        self.alignment.as_ref()
    }

    /// Returns the length of the blocks of which each request has a whole number, bytes.
    pub(super) fn block(&self) -> u64 {
        self.alignment.map_or(SECTOR_BYTES, |it| it.block())
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
            Cache::WriteBack | Cache::None => !driver_flushes,
            Cache::Unsafe => false,
        }
    }

    /// Returns the offset of a sector, if it and `bytes` from there are whole blocks of the disk.
    pub(super) fn place(&self, sector: u64, bytes: u64) -> Option<u64> {
        let start = sector.checked_mul(SECTOR_BYTES)?;
        let end = start.checked_add(bytes)?;
        let is_whole = [start, bytes]
            .iter()
            .all(|it| it.is_multiple_of(self.block()));
        (is_whole && end <= self.bytes).then_some(start)
    }
}
