//! Record of the TAPs that a process serves, for its successor.
//!
//! The VMs' rows name their TAPs too, but an engine may write there, and an attacker in it could
//! make a successor bring any interface of the host down. So the broker records the TAPs it
//! attached to in a file of its own, beside the locks, which only root can reach.
//!
//! A line of the file is the index of a TAP, or of one that is not served any more, with a minus
//! sign. A change appends a line. The file is written anew, without what is over, when most of it
//! is: a change takes the same time on average, however many TAPs there are.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use slipgate_abi::IfIndex;

use super::Owner;
use crate::{
    Error, Paths, Result,
    paths::{TAPS_SUFFIX, remove_if_there},
};

impl Owner {
    /// Begins the record of the owner's TAPs with these. The record of a predecessor in this row is
    /// replaced.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn note_taps(&self, paths: &Paths, taps: BTreeSet<IfIndex>) -> Result<NotedTaps> {
        let mut noted = NotedTaps {
            path: path(&paths.run_dir, self.row),
            taps,
            file: None,
            lines: 0,
        };
        noted.write_anew()?;
        Ok(noted)
    }

    /// Returns the TAPs that predecessors in this row, and in those merged into it, recorded last,
    /// without those that a living process has recorded since.
    ///
    /// # Errors
    /// The directory's lock is not obtained, or a row's lock file cannot be opened.
    pub fn noted_taps(&self, paths: &Paths) -> Result<BTreeSet<IfIndex>> {
        let of = |row| read(&path(&paths.run_dir, row));
        let mut taps: BTreeSet<IfIndex> = self.rows.iter().copied().flat_map(of).collect();
        if taps.is_empty() {
            return Ok(taps);
        }
        for row in super::living(paths, super::PATIENCE)? {
            if !self.rows.contains(&row) {
                for tap in of(row) {
                    taps.remove(&tap);
                }
            }
        }
        Ok(taps)
    }

    /// Removes the records of merged rows, which this row's record includes by now.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget_merged_taps(&self, paths: &Paths) -> Result<()> {
        let merged = self.rows.iter().filter(|row| **row != self.row);
        remove_records(paths, merged)
    }

    /// Removes the records: no TAP is served any more.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget_taps(&self, paths: &Paths) -> Result<()> {
        remove_records(paths, self.rows.iter())
    }
}

/// Record of the TAPs of an owner's VMs, by index.
#[derive(Debug)]
pub struct NotedTaps {
    path: PathBuf,
    taps: BTreeSet<IfIndex>,
    /// The record, for lines to be appended; `None` after a failure.
    file: Option<File>,
    /// Number of lines of the file.
    lines: usize,
}

/// Number of lines up to which a record is never written anew.
const FEW_LINES: usize = 64;

impl NotedTaps {
    /// Adds a TAP. To be called before it is served.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, tap: IfIndex) -> Result<()> {
        match self.taps.insert(tap) {
            true => self.append(&format!("{tap}\n")),
            false => Ok(()),
        }
    }

    /// Removes a TAP, which is shut or gone.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn remove(&mut self, tap: IfIndex) -> Result<()> {
        match self.taps.remove(&tap) {
            true => self.append(&format!("-{tap}\n")),
            false => Ok(()),
        }
    }

    fn append(&mut self, line: &str) -> Result<()> {
        let Some(file) = self
            .file
            .as_mut()
            .filter(|_| self.lines < FEW_LINES.max(2 * self.taps.len()))
        else {
            return self.write_anew();
        };
        self.lines += 1;
        let written = file.write_all(line.as_bytes());
        written.map_err(|error| {
            // It may have a part of the line.
            self.file = None;
            Error::os(format!("note a TAP in {}", self.path.display()))(error)
        })
    }

    fn write_anew(&mut self) -> Result<()> {
        let failed = || Error::os(format!("note the TAPs in {}", self.path.display()));
        let lines: String = self.taps.iter().map(|tap| format!("{tap}\n")).collect();
        // The rename replaces the file whole.
        let new = self.path.with_extension("taps-new");
        self.file = None;
        let mut file = File::create(&new).map_err(failed())?;
        file.write_all(lines.as_bytes()).map_err(failed())?;
        fs::rename(&new, &self.path).map_err(failed())?;
        self.lines = self.taps.len();
        self.file = Some(file);
        Ok(())
    }
}

fn remove_records<'r>(paths: &Paths, mut rows: impl Iterator<Item = &'r u32>) -> Result<()> {
    rows.try_for_each(|row| {
        let path = path(&paths.run_dir, *row);
        remove_if_there(&path, |path| fs::remove_file(path)).map(drop)
    })
}

fn path(run_dir: &Path, row: u32) -> PathBuf {
    run_dir.join(format!("{row}{TAPS_SUFFIX}"))
}

/// Reads a record. It is empty if there is no file: nothing was ever attached, or a version without
/// records did it. A last line without an end was being written when its process died.
fn read(path: &Path) -> BTreeSet<IfIndex> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let mut taps = BTreeSet::new();
    for line in text.split_inclusive('\n') {
        let Some(line) = line.strip_suffix('\n') else {
            break;
        };
        let (is_over, index) = match line.strip_prefix('-') {
            Some(index) => (true, index),
            None => (false, line),
        };
        let Ok(index) = index.parse().map(IfIndex::new) else {
            continue;
        };
        match is_over {
            true => taps.remove(&index),
            false => taps.insert(index),
        };
    }
    taps
}

#[cfg(test)]
#[path = "taps_test.rs"]
mod tests;
