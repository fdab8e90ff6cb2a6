//! Check that a network namespace has one set of pins.
//!
//! Two sets do not see each other's flows: they would allocate the same port of the host for
//! different flows, and each would take the other's engine port for that of a dead process. So a
//! start with pins other than those that serve the namespace, or hold its flows, is refused.
use std::{fs, path::Path};

use super::is_any_alive;
use crate::{
    Error, Paths, Result,
    paths::{RUN, netns_cookie, netns_inode, pin_dir_of},
};

/// Checks that no other set of pins belongs to the namespace, and that its own set is visible.
///
/// # Errors
/// Another set serves the namespace or holds its flows, or the own set serves it but is not
/// visible.
pub(crate) fn check_alone(paths: &Paths) -> Result<()> {
    // The directory belongs to a test.
    if !paths.run_dir.starts_with(RUN) {
        return Ok(());
    }
    check_in(Path::new(RUN), paths, netns_inode()?, netns_cookie()?)
}

fn check_in(run: &Path, paths: &Paths, inode: u64, cookie: u64) -> Result<()> {
    if is_empty(&paths.pin_dir) && is_any_alive(paths)? {
        let pin_dir = paths.pin_dir.display().to_string();
        return Err(Error::PinsHidden { pin_dir });
    }
    let prefix = format!("{inode}-");
    for entry in fs::read_dir(run).into_iter().flatten().flatten() {
        let other = Paths {
            pin_dir: pin_dir_of(&entry.path()).unwrap_or_default(),
            run_dir: entry.path(),
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_here = name == inode.to_string() || name.starts_with(&prefix);
        if !is_here || other.run_dir == paths.run_dir {
            continue;
        }
        // The value of --pin-dir.
        let root = other.pin_dir.parent().unwrap_or(&other.pin_dir);
        let root = root.display().to_string();
        if is_any_alive(&other)? {
            return Err(Error::OtherPins { root });
        }
        // Inode numbers are reused, cookies are not.
        if other.kept_cookie()? == Some(cookie.to_string()) && !is_empty(&other.pin_dir) {
            return Err(Error::LeftPins { root });
        }
    }
    Ok(())
}

/// Whether the directory is empty or missing.
fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none())
}

#[cfg(test)]
#[path = "alone_test.rs"]
mod tests;
