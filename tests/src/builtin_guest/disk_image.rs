//! Images of disks for the guest's random reads and scattered writes.

use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use crate::{
    error::{Error, Result, Tried},
    pattern::Pattern,
};

/// Where images in memory are.
const IN_MEMORY: &str = "/dev/shm";
const MIB: u64 = 1 << 20;

/// Makes an image as the guest's `disk 0 write` does, in a folder of its own.
///
/// # Errors
/// It can't be written.
pub fn disk_image(bytes: usize) -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir().tried("make a folder for a disk")?;
    fill(folder, bytes, 0)
}

/// Makes an image in memory, no byte of which is known to be as the guest's `disk 0 write` or `disk 0
/// scatter` leaves it.
///
/// # Errors
/// There is no room for it, or it can't be written.
pub fn disk_image_in_memory(bytes: usize) -> Result<(tempfile::TempDir, PathBuf)> {
    check_room_in_memory(bytes)?;
    let folder = tempfile::tempdir_in(IN_MEMORY).tried("make a folder in /dev/shm for a disk")?;
    // A part of the stream that is far from where the guest's begins.
    fill(folder, bytes, u64::MAX / 2)
}

/// Checks that there is room for an image of [`disk_image_in_memory`] now.
///
/// # Errors
/// There is less.
pub fn check_room_in_memory(bytes: usize) -> Result<()> {
    check_room(Path::new(IN_MEMORY), bytes as u64)
}

fn check_room(folder: &Path, bytes: u64) -> Result<()> {
    let name = folder.display();
    let found = statvfs(folder)
        .map_err(std::io::Error::from)
        .tried(format!("look how much room {name} has"))?;
    let free = found.blocks_available() * found.fragment_size();
    if free < bytes {
        let (free, bytes) = (free / MIB, bytes.div_ceil(MIB));
        return Err(Error::unexpected(format!(
            "the image of a disk needs {bytes} MiB in {name}, which has {free} MiB free: make it larger, \
             such as by `mount -o remount,size={}M {name}`",
            2 * bytes
        )));
    }
    Ok(())
}

fn fill(
    folder: tempfile::TempDir,
    bytes: usize,
    seed: u64,
) -> Result<(tempfile::TempDir, PathBuf)> {
    let image = folder.path().join("disk");
    let mut content = vec![0; bytes];
    Pattern::new(seed).fill(&mut content);
    std::fs::write(&image, content).tried("write the image of a disk")?;
    Ok((folder, image))
}

/// Checks that all of an image is as the guest's `disk 0 write` or `disk 0 scatter` leaves it.
///
/// # Errors
/// It can't be read, or a byte is another.
pub fn check_disk_image(image: &Path) -> Result<()> {
    let content = std::fs::read(image).tried("read the image of a disk")?;
    let image = image.display();
    let wrong = |at| Error::unexpected(format!("byte {at} of {image} is not what was written"));
    Pattern::new(0).check(&content).map_err(wrong)
}

#[cfg(test)]
#[path = "disk_image_test.rs"]
mod tests;
