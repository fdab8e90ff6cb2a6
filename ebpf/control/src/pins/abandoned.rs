//! Directories of locks that killed processes left.
//!
//! One is removed when nobody holds a lock in it and its pins are gone: pins that are there hold flows
//! for a successor, which finds in it whose they are. Those whose namespace is gone are removed before
//! ([`super::gone`]). Where the pins are is written in it. Where it
//! is not, for its process died before, or was of a version that wrote none, its name tells: it
//! has a hash of the pins' path, and these are directories on a mounted bpffs.
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

/// Directories on bpffs that are looked at, at most.
const MOST_DIRS: usize = 1 << 16;

/// Removes the directories of locks whose pins are gone, with their namespace or by hand, and whose
/// processes are dead: a killed process leaves its own. How many.
pub fn sweep_run_dirs() -> usize {
    sweep_run_dirs_in(Path::new(RUN), &dirs_on_bpffs)
}

/// `pinned`: all directories that may have pins in them.
pub(super) fn sweep_run_dirs_in(
    run: &Path,
    pinned: &dyn Fn() -> io::Result<Vec<PathBuf>>,
) -> usize {
    let dirs = fs::read_dir(run).into_iter().flatten().flatten();
    let names = OnceCell::new();
    // What can't be looked at may be there.
    let names = || names.get_or_init(|| pinned().map(|dirs| run_names(&dirs)).ok());
    let has_pins = |dir: &Path| may_have_pins(dir, &|| names().as_ref());
    // What can't be looked at is not ours to remove.
    dirs.filter(|dir| sweep_run_dir(&dir.path(), &has_pins).unwrap_or(false))
        .count()
}

/// Whether it is gone. One who makes it again meanwhile waits for the lock, and begins anew.
fn sweep_run_dir(run_dir: &Path, has_pins: &dyn Fn(&Path) -> bool) -> Result<bool> {
    // Empty: nobody is in it, and who begins makes it again.
    if fs::remove_dir(run_dir).is_ok() || gone::sweep(run_dir)? {
        return Ok(true);
    }
    if !run_dir.is_dir() || has_pins(run_dir) {
        return Ok(false);
    }
    let Some(_all) = FileLock::take(&run_dir.join("lock"))? else {
        return Ok(false);
    };
    // Whoever had the lock until now may have pinned.
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

/// `names`: those of [`run_names`], if they are known.
fn may_have_pins<'n>(run_dir: &Path, names: &dyn Fn() -> Option<&'n HashSet<String>>) -> bool {
    if let Some(pin_dir) = pin_dir_of(run_dir) {
        return !matches!(pin_dir.try_exists(), Ok(false));
    }
    let Some(name) = run_dir.file_name().and_then(|name| name.to_str()) else {
        return true;
    };
    // Of another form: somebody else's.
    let Some(tail) = tail(name) else { return true };
    names().is_none_or(|names| names.contains(tail))
}

/// What of a run directory's name is its pins': all of it for the usual ones of a namespace, else a
/// hash.
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

/// The [`tail`]s of the names that directories have whose pins are in these.
fn run_names(pinned: &[PathBuf]) -> HashSet<String> {
    let usual = |dir: &PathBuf| {
        let inode = dir.strip_prefix(PINS).ok()?;
        Some(inode.to_str()?.to_owned())
    };
    let usual = pinned.iter().filter_map(usual);
    let by_hash = pinned.iter().map(|dir| hash_of(dir));
    usual.chain(by_hash).collect()
}

/// All directories on the bpffs that are mounted.
fn dirs_on_bpffs() -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read("/proc/self/mountinfo")?;
    let mut dirs: Vec<PathBuf> = mounts.split(|b| *b == b'\n').filter_map(bpffs_at).collect();
    let mut at = 0;
    while let Some(dir) = dirs.get(at) {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            // Somebody has just removed it.
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

/// Where a line of mountinfo says that a bpffs is (proc_pid_mountinfo(5)).
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
