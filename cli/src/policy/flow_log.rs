//! A flow log's file: read to its end, and on, when it is followed.
use std::{
    fs::File,
    io::{BufRead as _, BufReader, Seek as _, SeekFrom},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use slipgate_policy::{
    document::ConfigError,
    tools::flow_log::{Reader, Seen},
};

/// Reads a whole log and passes the contents of each line to `each`.
pub(super) fn read(path: &Path, each: &mut dyn FnMut(Seen)) -> Result<Reader, ConfigError> {
    let mut follower = Follower::open(path)?;
    follower.more(each)?;
    Ok(follower.reader)
}

/// Reader of appended lines, which continues with the next file when the log is rotated.
pub(super) struct Follower {
    path: PathBuf,
    file: BufReader<File>,
    inode: u64,
    /// Beginning of a line whose end is not written yet.
    partial: String,
    pub(super) reader: Reader,
}

impl Follower {
    pub(super) fn open(path: &Path) -> Result<Self, ConfigError> {
        let file = File::open(path).map_err(|e| unreadable(path, &e))?;
        let inode = file.metadata().map_err(|e| unreadable(path, &e))?.ino();
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            inode,
            partial: String::new(),
            reader: Reader::default(),
        })
    }

    /// Reads the lines that were appended since the last call.
    pub(super) fn more(&mut self, each: &mut dyn FnMut(Seen)) -> Result<(), ConfigError> {
        self.drain(each)?;
        // Moved away by a rotation, or cut short: what the old one had is read by now.
        let Ok(metadata) = std::fs::metadata(&self.path) else {
            return Ok(());
        };
        let at = self
            .file
            .stream_position()
            .map_err(|e| unreadable(&self.path, &e))?;
        if metadata.ino() != self.inode {
            // Its writer goes on with the old one until it is told: then the new one grows.
            let grown = |file: &File| file.metadata().is_ok_and(|new| new.len() > 0);
            if let Some(file) = File::open(&self.path).ok().filter(grown) {
                self.drain(each)?;
                self.inode = file
                    .metadata()
                    .map_err(|e| unreadable(&self.path, &e))?
                    .ino();
                self.file = BufReader::new(file);
                self.partial.clear();
                self.drain(each)?;
            }
        } else if metadata.len() < at {
            let rewound = self.file.seek(SeekFrom::Start(0));
            rewound.map_err(|e| unreadable(&self.path, &e))?;
            self.partial.clear();
            self.drain(each)?;
        }
        Ok(())
    }

    fn drain(&mut self, each: &mut dyn FnMut(Seen)) -> Result<(), ConfigError> {
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let read = self.file.read_until(b'\n', &mut bytes);
            if read.map_err(|e| unreadable(&self.path, &e))? == 0 {
                return Ok(());
            }
            self.partial.push_str(&String::from_utf8_lossy(&bytes));
            if bytes.ends_with(b"\n") {
                let line = std::mem::take(&mut self.partial);
                if let Some(seen) = self.reader.line(&line) {
                    each(seen);
                }
            }
        }
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> ConfigError {
    let problem = format!("it can't be read ({error})");
    let remedy = "give the file that `slipgate attach --flow-log` writes";
    ConfigError::new("--flow-log", path.display(), problem, remedy)
}

#[cfg(test)]
#[path = "flow_log_test.rs"]
mod tests;
