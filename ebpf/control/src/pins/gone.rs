//! Removal of pins of network namespaces that are gone.
//!
//! # Theory of operation
//!
//! Killed processes leave their pins: established flows continue by them, and a successor takes
//! them over. When the namespace ends too, no process starts in it again, and the maps would keep
//! their memory for ever. So a start in any namespace examines the pins of all, and removes a set
//! that is certainly unused:
//!
//! - No process holds a lock of it, and none can take one meanwhile.
//! - Each pinned link has lost its interface, and the engine port's is among them: that device is
//!   slipgate's own, persistent, and ends with its namespace or by hand. Clsact filters have no link
//!   that would tell. Those of TAPs do not count: the port's link tells of them too. A set whose
//!   port has a filter (before Linux 6.6) is kept.
//! - No namespace with its inode number that is visible by a task, an open file or a mount has its
//!   cookie. Inode numbers are reused, cookies are not.
use std::{
    fs::{self, File},
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    thread,
};

use super::{is_any_alive, remove_pins};
use crate::{
    Error, Paths, Result, attach,
    lock::FileLock,
    paths::{mount_path, netns_cookie, pin_dir_of},
};

/// Removes the pins that a lock directory guards, and the directory, if their namespace is gone.
/// Returns whether it did.
pub(super) fn sweep(run_dir: &Path) -> Result<bool> {
    let Some(pin_dir) = pin_dir_of(run_dir).filter(|dir| dir.exists()) else {
        return Ok(false);
    };
    let paths = Paths {
        pin_dir,
        run_dir: run_dir.to_owned(),
    };
    // Most sets are in use, which is visible without the lock.
    if !attach::are_defunct(&paths)? {
        return Ok(false);
    }
    let Some(_all) = FileLock::take(&run_dir.join("lock"))? else {
        return Ok(false);
    };
    if is_any_alive(&paths)? || !attach::are_defunct(&paths)? {
        return Ok(false);
    }
    let Some((inode, cookie)) = inode_of(run_dir).zip(paths.kept_cookie()?) else {
        return Ok(false);
    };
    if is_there(inode, &cookie) {
        return Ok(false);
    }
    tracing::info!(
        pin_dir = %paths.pin_dir.display(),
        "removing pins of a network namespace that is gone"
    );
    remove_pins(&paths)?;
    paths.remove()?;
    Ok(true)
}

/// Returns the inode number of the namespace, with which the directory's name begins.
fn inode_of(run_dir: &Path) -> Option<u64> {
    let name = run_dir.file_name()?.to_str()?;
    let inode = name.split_once('-').map_or(name, |(inode, _)| inode);
    inode.parse().ok()
}

/// Whether the namespace is visible. One that cannot be examined may be it.
fn is_there(inode: u64, cookie: &str) -> bool {
    let name = format!("net:[{inode}]");
    let mut seen = seen_namespaces(&name);
    seen.any(|path| match cookie_of(&path) {
        Ok(found) => found.to_string() == cookie,
        // The file was closed or the task ended meanwhile.
        Err(error) => error.errno() != Some(libc::ENOENT),
    })
}

/// Returns the files of namespaces with this name: those of tasks, open ones, and mounted ones.
fn seen_namespaces(name: &str) -> impl Iterator<Item = PathBuf> + '_ {
    let is_it = move |path: &PathBuf| {
        let target = fs::read_link(path);
        target.is_ok_and(|target| target.as_os_str() == name)
    };
    let entries = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let processes = entries("/proc".into()).filter(|process| {
        let name = process.file_name();
        name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
    });
    let held = processes.flat_map(move |process| {
        let tasks = entries(process.path().join("task"));
        let tasks = tasks.map(|task| task.path().join("ns/net"));
        tasks.chain(entries(process.path().join("fd")).map(|file| file.path()))
    });
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mounted: Vec<PathBuf> = mounts
        .split(|byte| *byte == b'\n')
        .filter_map(|line| mounted(line, name))
        .collect();
    held.filter(is_it).chain(mounted)
}

/// Returns the mount point in a line of mountinfo if this namespace is mounted there
/// (proc_pid_mountinfo(5)).
fn mounted(line: &[u8], name: &str) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ');
    (fields.nth(3)? == name.as_bytes()).then(|| fields.next().map(mount_path))?
}

/// Returns the cookie of the namespace that a file refers to.
fn cookie_of(path: &Path) -> Result<u64> {
    let what = || {
        Error::os(format!(
            "look into the network namespace {}",
            path.display()
        ))
    };
    let namespace = File::open(path).map_err(what())?;
    // A separate thread enters the namespace, and ends.
    let look = || {
        // SAFETY: a descriptor and a number.
        match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
            0 => netns_cookie(),
            _ => Err(what()(io::Error::last_os_error())),
        }
    };
    thread::scope(|scope| scope.spawn(look).join())
        .unwrap_or_else(|_| Err(what()(io::Error::other("the thread that looks has ended"))))
}

#[cfg(test)]
#[path = "gone_test.rs"]
mod tests;
