//! The image of a disk for the guest's random reads.

use std::path::PathBuf;

use crate::{
    error::{Result, Tried},
    pattern::Pattern,
};

/// Makes an image as the guest's `disk 0 write` does, in a folder of its own.
///
/// # Errors
/// It can't be written.
pub fn disk_image(bytes: usize) -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir().tried("make a folder for a disk")?;
    let image = folder.path().join("disk");
    let mut content = vec![0; bytes];
    Pattern::new(0).fill(&mut content);
    std::fs::write(&image, content).tried("write the image of a disk")?;
    Ok((folder, image))
}
