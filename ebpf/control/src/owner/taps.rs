//! Which TAPs a process serves, written down for its successor.
//!
//! The VMs' rows name their TAPs too, but an engine may write there, and whoever took it over would
//! have a successor take any interface of the host down. So the broker notes what it attached to in
//! a file of its own, beside the locks, where only root comes.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::Owner;
use crate::{
    Error, Paths, Result,
    paths::{TAPS_SUFFIX, remove_if_there},
};

impl Owner {
    /// Notes the TAPs of the owner's VMs, by index. Call it before they are served.
    pub fn note_taps(&self, paths: &Paths, taps: &BTreeSet<u32>) -> Result<()> {
        let path = path(&paths.run_dir, self.row);
        let failed = || Error::os(format!("note the TAPs in {}", path.display()));
        let lines: String = taps.iter().map(|tap| format!("{tap}\n")).collect();
        // Whole, or as it was.
        let new = path.with_extension("taps-new");
        fs::write(&new, lines).map_err(failed())?;
        fs::rename(&new, &path).map_err(failed())
    }

    /// The TAPs that predecessors in this row, and in those merged into it, noted last; without
    /// those that a living process has noted since.
    pub fn noted_taps(&self, paths: &Paths) -> Result<BTreeSet<u32>> {
        let of = |row| read(&path(&paths.run_dir, row));
        let mut taps: BTreeSet<u32> = self.rows.iter().copied().flat_map(of).collect();
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

    /// What merged rows had noted is in this row's file by now.
    pub fn forget_merged_taps(&self, paths: &Paths) -> Result<()> {
        let merged = self.rows.iter().filter(|row| **row != self.row);
        forget(paths, merged)
    }

    /// None is served any more.
    pub fn forget_taps(&self, paths: &Paths) -> Result<()> {
        forget(paths, self.rows.iter())
    }
}

fn forget<'r>(paths: &Paths, mut rows: impl Iterator<Item = &'r u32>) -> Result<()> {
    rows.try_for_each(|row| {
        let path = path(&paths.run_dir, *row);
        remove_if_there(&path, |path| fs::remove_file(path)).map(drop)
    })
}

fn path(run_dir: &Path, row: u32) -> PathBuf {
    run_dir.join(format!("{row}{TAPS_SUFFIX}"))
}

/// None where there is no such file: nothing was ever attached to, or by a version without notes.
fn read(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

#[cfg(test)]
#[path = "taps_test.rs"]
mod tests;
