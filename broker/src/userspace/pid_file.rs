//! The file of `--pid-file`, by which who started slipgate finds its process.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::PathBuf,
};

use slipgate_policy::document::ConfigError;

/// A file for this process's id, a decimal number and a line feed. Removed on drop if it has that id: what
/// was there before stays after a start that fails, and so does what another process has written since.
#[derive(Debug)]
pub(super) struct PidFile {
    file: File,
    path: PathBuf,
    is_written: bool,
}

impl PidFile {
    /// Opens the file, and makes it if it is not there. What it has stays until [`PidFile::write`].
    ///
    /// # Errors
    /// It can't be opened, or is no regular file.
    pub(super) fn open(path: PathBuf) -> Result<Self, ConfigError> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            // A FIFO without a reader is not waited for.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(&path)
            .and_then(|file| match file.metadata()?.is_file() {
                true => Ok(file),
                false => Err(io::Error::other("it is no regular file")),
            });
        match opened {
            Ok(file) => Ok(Self {
                file,
                path,
                is_written: false,
            }),
            Err(e) => Err(ConfigError::new(
                "--pid-file",
                path.display(),
                format!("can't write it ({e})"),
                "give a file in a directory that is there and yours",
            )),
        }
    }

    /// Writes the id of this process.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub(super) fn write(&mut self) -> io::Result<()> {
        self.is_written = true;
        self.file.set_len(0)?;
        self.file.write_all(own_line().as_bytes())
    }

    /// Whether the file at the path is the one that was opened, and has what was written to it.
    fn is_own(&self) -> io::Result<bool> {
        let (opened, found) = (self.file.metadata()?, fs::symlink_metadata(&self.path)?);
        let own = own_line();
        let mut content = vec![0; own.len()];
        Ok(self.is_written
            && (opened.dev(), opened.ino()) == (found.dev(), found.ino())
            && opened.len() == own.len() as u64
            && self.file.read_exact_at(&mut content, 0).is_ok()
            && content == own.as_bytes())
    }
}

fn own_line() -> String {
    format!("{}\n", std::process::id())
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if self.is_own().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
#[path = "pid_file_test.rs"]
mod tests;
