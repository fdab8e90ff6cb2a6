//! Removal of lock directories that killed processes left.
//!
//! A directory is removed if no process holds a lock in it and its pins are gone. Pins that exist
//! hold flows for a successor, which finds their owner in the directory. Directories whose
//! namespace is gone are removed first ([`super::gone`]). A file in the directory gives the path of
//! the pins. If that file is missing, because the process died before it wrote one or was of a
//! version that wrote none, the directory's name serves: it contains a hash of the pins' path,
//! which is compared with the directories on all mounted bpffs.
use std::{
    cell::OnceCell,
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::{gone, is_any_alive};
use crate::{
    Paths, Result,
    lock::FileLock,
    paths::{PINS, RUN, hash_of, mount_path, pin_dir_of},
};

/// Maximum number of directories on bpffs that are examined.
const MOST_DIRS: usize = 1 << 16;

/// Removes the lock directories of dead processes whose pins are gone, with their namespace or by
/// hand. Returns how many.
pub fn sweep_run_dirs() -> usize {
    sweep_run_dirs_in(Path::new(RUN), &dirs_on_bpffs)
}

/// Removes the abandoned lock directories in `run`. `pinned` lists all directories that may contain
/// pins.
pub(super) fn sweep_run_dirs_in(
    run: &Path,
    pinned: &dyn Fn() -> io::Result<Vec<PathBuf>>,
) -> usize {
    let dirs = fs::read_dir(run).into_iter().flatten().flatten();
    let names = OnceCell::new();
    // Pins that cannot be examined may exist.
    let names = || names.get_or_init(|| pinned().map(|dirs| run_names(&dirs)).ok());
    let has_pins = |dir: &Path| may_have_pins(dir, &|| names().as_ref());
    // A directory that cannot be examined is not removed.
    dirs.filter(|dir| sweep_run_dir(&dir.path(), &has_pins).unwrap_or(false))
        .count()
}

/// Removes a lock directory if it is abandoned. Returns whether it is gone. A process that makes it
/// again meanwhile waits for the lock, and starts over.
fn sweep_run_dir(run_dir: &Path, has_pins: &dyn Fn(&Path) -> bool) -> Result<bool> {
    // An empty directory is unused; a process that starts makes it again.
    if fs::remove_dir(run_dir).is_ok() || gone::sweep(run_dir)? {
        return Ok(true);
    }
    if !run_dir.is_dir() || has_pins(run_dir) {
        return Ok(false);
    }
    let Some(_all) = FileLock::take(&run_dir.join("lock"))? else {
        return Ok(false);
    };
    // The previous holder of the lock may have made pins.
    if has_pins(run_dir) {
        return Ok(false);
    }
    let paths = Paths {
        pin_dir: PathBuf::new(),
        run_dir: run_dir.to_owned(),
    };
    if is_any_alive(&paths)? {
        return Ok(false);
    }
    paths.remove_run_dir()?;
    Ok(true)
}

/// Whether the pins of a lock directory may exist. `names`: the result of [`run_names`], if known.
fn may_have_pins<'n>(run_dir: &Path, names: &dyn Fn() -> Option<&'n HashSet<String>>) -> bool {
    if let Some(pin_dir) = pin_dir_of(run_dir) {
        return !matches!(pin_dir.try_exists(), Ok(false));
    }
    let Some(name) = run_dir.file_name().and_then(|name| name.to_str()) else {
        return true;
    };
    // A name of another form is not slipgate's.
    let Some(tail) = tail(name) else { return true };
    names().is_none_or(|names| names.contains(tail))
}

/// Returns the part of a lock directory's name that identifies its pins: the namespace's inode
/// number for the default pins, otherwise a hash.
fn tail(name: &str) -> Option<&str> {
    let (inode, hash) = match name.split_once('-') {
        Some((inode, hash)) => (inode, Some(hash)),
        None => (name, None),
    };
    let is_inode = !inode.is_empty() && inode.bytes().all(|b| b.is_ascii_digit());
    let is_hash = |hash: &str| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit());
    match hash {
        None => is_inode.then_some(name),
        Some(hash) => (is_inode && is_hash(hash)).then_some(hash),
    }
}

/// Returns the [`tail`]s that lock directories of these pin directories have.
fn run_names(pinned: &[PathBuf]) -> HashSet<String> {
    let usual = |dir: &PathBuf| {
        let inode = dir.strip_prefix(PINS).ok()?;
        Some(inode.to_str()?.to_owned())
    };
    let usual = pinned.iter().filter_map(usual);
    let by_hash = pinned.iter().map(|dir| hash_of(dir));
    usual.chain(by_hash).collect()
}

/// Returns all directories on all mounted bpffs.
fn dirs_on_bpffs() -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read("/proc/self/mountinfo")?;
    let mut dirs: Vec<PathBuf> = mounts.split(|b| *b == b'\n').filter_map(bpffs_at).collect();
    let mut at = 0;
    while let Some(dir) = dirs.get(at) {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            // Another process has just removed it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                at += 1;
                continue;
            }
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                dirs.push(entry.path());
            }
        }
        if dirs.len() > MOST_DIRS {
            return Err(io::Error::other("too many directories on bpffs"));
        }
        at += 1;
    }
    Ok(dirs)
}

/// Returns the mount point in a line of mountinfo if it is a bpffs (proc_pid_mountinfo(5)).
fn bpffs_at(line: &[u8]) -> Option<PathBuf> {
    let mut fields = line.split(|b| *b == b' ');
    let at = fields.nth(4)?;
    // Optional fields end with a dash.
    fields.find(|field| field == b"-")?;
    if fields.next()? != b"bpf" {
        return None;
    }
    Some(mount_path(at))
}

#[cfg(test)]
#[path = "abandoned_test.rs"]
mod tests;
