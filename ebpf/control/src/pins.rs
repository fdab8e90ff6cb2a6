//! Sets of pins: whether a process uses one, which are abandoned, and how one is removed.

mod abandoned;
mod alone;
mod gone;

use std::{fs, path::PathBuf};

use slipgate_abi::{datapath::PROGRAMS6, early_fragment::EARLY_CLAIMS, maps::MAX_OWNERS};

pub use self::abandoned::sweep_run_dirs;
pub(crate) use self::alone::check_alone;
use crate::{
    Paths, Result,
    attach::{self, Program, TWINS},
    layout::MapName,
    lock::FileLock,
    paths,
};

/// Returns the path of the lock that a process holds as long as it owns the row of `OWNERS`.
pub(crate) fn lock_path(paths: &Paths, row: u32) -> PathBuf {
    paths.run_dir.join(format!("owner-{row}.lock"))
}

/// Whether a process holds the row. A row that no process ever held has no file.
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

/// Removes every pin of slipgate's. A link that only its pin holds is detached with it.
pub(crate) fn remove_pins(paths: &Paths) -> Result<()> {
    let maps = MapName::ALL.map(|map| map.name().to_owned());
    // Copies that a start left when it died.
    let maps = maps
        .iter()
        .flat_map(|map| [map.clone(), format!("{map}-new")]);
    let names = |program: Program| [Some(program.name()), program.twin_name()];
    let names = Program::ALL.into_iter().flat_map(names).flatten();
    let programs = names.map(str::to_owned);
    let links = attach::pinned(paths)?
        .into_iter()
        .map(attach::Attached::pin_name)
        // A link that was to take the place of the one there.
        .flat_map(|link| [format!("{link}-new"), link]);
    // Last: these are empty without a pin, and what is attached calls their programs.
    let arrays = [PROGRAMS6, TWINS, EARLY_CLAIMS].map(str::to_owned);
    for name in maps.chain(programs).chain(links).chain(arrays) {
        paths::remove_if_there(&paths.pin(&name), |p| fs::remove_file(p))?;
    }
    Ok(())
}
