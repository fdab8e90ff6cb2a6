//! Files behind the machine's disks: opened and locked for the VMM, which may open nothing.
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Seek as _, SeekFrom},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
};

use slipgate_ipc::vmm::{DiskCache, RateLimit};
use slipgate_policy::document::ConfigError;

use crate::config::DiskSpec;

/// Unit of a disk's size, bytes.
const SECTOR_BYTES: u64 = 512;

/// An open file behind a disk. It is locked for as long as a copy of the descriptor is open.
#[derive(Debug)]
pub(crate) struct OpenDisk {
    pub(crate) file: File,
    pub(crate) read_only: bool,
    pub(crate) cache: DiskCache,
    pub(crate) rate: RateLimit,
}

/// Opens a disk's file and locks it (flock(2)): against every other user if the guest may write,
/// else against writers.
///
/// # Errors
/// The file can't be opened, can't be a disk, or is in use.
pub(crate) fn open(disk: &DiskSpec) -> Result<OpenDisk, ConfigError> {
    let DiskSpec {
        path,
        read_only,
        cache,
        rate,
    } = disk;
    let refused = |problem: String, remedy: &str| {
        ConfigError::new("--disk", path.display(), problem, remedy.to_owned())
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(!read_only)
        // A FIFO without a writer is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| {
            let how = if *read_only { "read" } else { "written" };
            let remedy = match read_only {
                true => "give a file that is there",
                false => "give a file that is there and writable, or add ,ro",
            };
            refused(format!("it can't be {how} ({e})"), remedy)
        })?;
    let unknown = |e| refused(format!("it can't be looked at ({e})"), "give another one");
    let kind = file.metadata().map_err(unknown)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let problem = "it is neither a regular file nor a block device".into();
        return Err(refused(problem, "give a raw image or a device"));
    }
    // The metadata of a block device has no size.
    let bytes = file.seek(SeekFrom::End(0)).map_err(unknown)?;
    if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(refused(
            format!("its size is {bytes} bytes"),
            "give a raw image of a multiple of 512 bytes (`truncate -s 1G FILE` makes one)",
        ));
    }
    let locked = match read_only {
        true => file.try_lock_shared(),
        false => file.try_lock(),
    };
    match locked {
        Ok(()) => Ok(OpenDisk {
            file,
            read_only: *read_only,
            cache: *cache,
            rate: *rate,
        }),
        Err(TryLockError::WouldBlock) => Err(refused(
            "it is in use by another process, which may write to it or must not see it change"
                .into(),
            "end that one, or give each machine an image of its own",
        )),
        Err(TryLockError::Error(e)) => Err(refused(
            format!("it can't be locked ({e})"),
            "give one on a file system with locks",
        )),
    }
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
