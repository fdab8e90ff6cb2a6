//! Record of the TAPs that a process serves, for its successor.
//!
//! The VMs' rows name their TAPs too, but an engine may write there, and an attacker in it could
//! make a successor bring any interface of the host down. So the broker records the TAPs it
//! attached to in a file of its own, beside the locks, which only root can reach.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use slipgate_abi::IfIndex;

use super::Owner;
use crate::{
    Error, Paths, Result,
    paths::{TAPS_SUFFIX, remove_if_there},
};

impl Owner {
    /// Records the TAPs of the owner's VMs, by index. To be called before they are served.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn note_taps(&self, paths: &Paths, taps: &BTreeSet<IfIndex>) -> Result<()> {
        let path = path(&paths.run_dir, self.row);
        let failed = || Error::os(format!("note the TAPs in {}", path.display()));
        let lines: String = taps.iter().map(|tap| format!("{tap}\n")).collect();
        // The rename replaces the file whole.
        let new = path.with_extension("taps-new");
        fs::write(&new, lines).map_err(failed())?;
        fs::rename(&new, &path).map_err(failed())
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
/// records did it.
fn read(path: &Path) -> Vec<IfIndex> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let taps = text.lines().filter_map(|line| line.parse().ok());
    taps.map(IfIndex::new).collect()
}

#[cfg(test)]
#[path = "taps_test.rs"]
mod tests;
