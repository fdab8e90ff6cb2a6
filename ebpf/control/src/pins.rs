//! Sets of pins: who uses one, which are nobody's any more, and how one is removed.

mod abandoned;
mod alone;
mod gone;

use std::{fs, path::PathBuf};

use slipgate_abi::maps::MAX_OWNERS;

pub use self::abandoned::sweep_run_dirs;
pub(crate) use self::alone::check_alone;
use crate::{
    Paths, Result,
    attach::{self, Program},
    layout::MapName,
    lock::FileLock,
    paths,
};

/// The lock that a process holds for as long as the row of `OWNERS` is its own.
pub(crate) fn lock_path(paths: &Paths, row: u32) -> PathBuf {
    paths.run_dir.join(format!("owner-{row}.lock"))
}

/// Whether a process holds the row. Rows that never had one have no file.
pub(crate) fn is_alive(paths: &Paths, row: u32) -> Result<bool> {
    let path = lock_path(paths, row);
    if !path.exists() {
        return Ok(false);
    }
    Ok(FileLock::take(&path)?.is_none())
}

/// Whether a process holds any row.
pub(crate) fn is_any_alive(paths: &Paths) -> Result<bool> {
    for row in 0..MAX_OWNERS {
        if is_alive(paths, row)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes every pin of ours. Links that only their pin holds go with it.
pub(crate) fn remove_pins(paths: &Paths) -> Result<()> {
    let maps = MapName::ALL.map(|map| map.name().to_owned());
    let programs = Program::ALL.map(|program| program.name().to_owned());
    let links = attach::pinned(paths)?
        .into_iter()
        .map(attach::Attached::pin_name);
    for name in maps.into_iter().chain(programs).chain(links) {
        paths::remove_if_there(&paths.pin(&name), |p| fs::remove_file(p))?;
    }
    Ok(())
}
