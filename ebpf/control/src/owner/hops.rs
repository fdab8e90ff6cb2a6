//! Record of the next hops that a process keeps, for its successor.
//!
//! Elements of `NEXT_HOPS` name their neighbours too, but an engine may write there. A process keeps a
//! next hop that a route has led to for as long as flows claim it, also when the route is gone
//! ([`NextHops`](crate::NextHops)). A successor can't see that there was a route. So the broker
//! records which next hops it found right in a file of its own, beside the locks, which only root can
//! reach.
//!
//! A line of the file is the index of a device and the address of the neighbour. The file is written
//! whole at each change: there are a few hundred lines at most, and mostly one.

use std::{
    collections::HashSet,
    fmt::Write as _,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use slipgate_abi::IfIndex;

use super::Owner;
use crate::{
    Error, Paths, Result,
    paths::{HOPS_SUFFIX, remove_if_there},
};

impl Owner {
    /// Records the next hops of the owner's process, in place of what was recorded for its row.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn note_next_hops(&self, paths: &Paths, hops: &HashSet<(IfIndex, IpAddr)>) -> Result<()> {
        let path = path(&paths.run_dir, self.row);
        let failed = || Error::os(format!("note the next hops in {}", path.display()));
        let mut lines = String::new();
        for (ifindex, neighbour) in hops {
            let _ = writeln!(lines, "{ifindex} {neighbour}");
        }
        // The rename replaces the file whole.
        let new = path.with_extension("hops-new");
        fs::write(&new, lines).map_err(failed())?;
        fs::rename(&new, &path).map_err(failed())
    }

    /// Returns the next hops that predecessors in this row, and in those merged into it, recorded
    /// last; none if they recorded nothing that can be read.
    pub fn noted_next_hops(&self, paths: &Paths) -> HashSet<(IfIndex, IpAddr)> {
        let of = |row: &u32| fs::read_to_string(path(&paths.run_dir, *row)).unwrap_or_default();
        let all: Vec<String> = self.rows.iter().map(of).collect();
        all.iter()
            .flat_map(|text| text.lines())
            .filter_map(hop)
            .collect()
    }

    /// Removes the records of merged rows, which this row's record includes by now.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget_merged_next_hops(&self, paths: &Paths) -> Result<()> {
        let merged = self.rows.iter().filter(|row| **row != self.row);
        remove_records(paths, merged)
    }

    /// Removes the records: no next hop is kept any more.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget_next_hops(&self, paths: &Paths) -> Result<()> {
        remove_records(paths, self.rows.iter())
    }
}

/// Reads a line.
fn hop(line: &str) -> Option<(IfIndex, IpAddr)> {
    let (ifindex, neighbour) = line.split_once(' ')?;
    Some((IfIndex::new(ifindex.parse().ok()?), neighbour.parse().ok()?))
}

fn remove_records<'r>(paths: &Paths, mut rows: impl Iterator<Item = &'r u32>) -> Result<()> {
    rows.try_for_each(|row| {
        let path = path(&paths.run_dir, *row);
        remove_if_there(&path, |path| fs::remove_file(path)).map(drop)
    })
}

fn path(run_dir: &Path, row: u32) -> PathBuf {
    run_dir.join(format!("{row}{HOPS_SUFFIX}"))
}

#[cfg(test)]
#[path = "hops_test.rs"]
mod tests;
