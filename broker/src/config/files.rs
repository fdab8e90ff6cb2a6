//! Policy files and deny files, read from the disk.
use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// Maximum length of a file, bytes: some two million lines of a deny file.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a whole regular file. Other files are refused, because a read could block while guests are
/// served: the writer of a FIFO may never come.
///
/// # Errors
/// The file can't be read, is not a regular file, or is too long.
pub fn from_disk(path: &Path) -> io::Result<String> {
    read_at_most(path, MOST_BYTES)
}

fn read_at_most(path: &Path, most: u64) -> io::Result<String> {
    let mut options = File::options();
    // Neither is said of a regular file; what else it is is told when it is open.
    let options = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    file.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::other(format!("it is longer than {most} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
#[path = "files_test.rs"]
mod tests;
