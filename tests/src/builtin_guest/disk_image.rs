//! Images of disks for the guest's random reads and scattered writes.

use std::path::{Path, PathBuf};

use crate::{
    error::{Error, Result, Tried},
    pattern::Pattern,
};

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
/// It can't be written.
pub fn disk_image_in_memory(bytes: usize) -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir_in("/dev/shm").tried("make a folder in /dev/shm for a disk")?;
    // A part of the stream that is far from where the guest's begins.
    fill(folder, bytes, u64::MAX / 2)
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
