//! Files behind the machine's disks: opened and locked for the VMM, which may open nothing.
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Seek as _, SeekFrom},
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    },
};

use slipgate_ipc::vmm::{DiskCache, RateLimit};
use slipgate_policy::document::ConfigError;

use crate::config::DiskSpec;

/// Unit of a disk's size, bytes.
const SECTOR_BYTES: u64 = 512;

/// What is wrong with a file of `cache=none`, and what to do about it.
const NO_DIRECT: &str =
    "its file system can't pass the host's page cache by (O_DIRECT), which cache=none is";
const CACHED: &str = "give one on another file system (ext4, XFS), or leave cache=none out";

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
    let is_direct = *cache == DiskCache::None;
    let direct = if is_direct { libc::O_DIRECT } else { 0 };
    let mut file = OpenOptions::new()
        .read(true)
        .write(!read_only)
        // A FIFO without a writer is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | direct)
        .open(path)
        .map_err(|e| {
            if is_direct && e.raw_os_error() == Some(libc::EINVAL) {
                return refused(NO_DIRECT.into(), CACHED);
            }
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
    if is_direct && !is_transferred_directly(&file).map_err(unknown)? {
        return Err(refused(NO_DIRECT.into(), CACHED));
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

/// Returns whether the kernel transfers a file past the page cache that it has opened for that. Where
/// the file system does not say, the VMM finds it out.
fn is_transferred_directly(file: &File) -> io::Result<bool> {
    // SAFETY: the structure has integers only, for which zeroes are values.
    let mut about: libc::statx = unsafe { std::mem::zeroed() };
    let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
    let (file, about_it) = (file.as_raw_fd(), &raw mut about);
    // SAFETY: the path ends with a zero, and the structure outlives the call.
    if unsafe { libc::statx(file, path, flags, libc::STATX_DIOALIGN, about_it) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(about.stx_mask & libc::STATX_DIOALIGN == 0 || about.stx_dio_offset_align != 0)
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
