//! Pins of network namespaces that are gone.
//!
//! # Theory of operation
//! Killed processes leave their pins: with them established flows go on, and a successor takes them
//! over. When the namespace goes too, nobody begins in it again, and the maps would take their
//! memory for ever. So a start in any namespace looks at the pins of all, and removes a set that is
//! surely of no use:
//!
//! - nobody holds a lock of it, and none can be taken meanwhile;
//! - each pinned link has lost its interface, and the engine port's is among them: that is
//!   slipgate's own, persistent, and goes with its namespace or by hand. No packet meets a program
//!   any more. Filters of clsact have no link that would tell (before Linux 6.6), so a set of these
//!   stays; but [`attach::Program::GuestShut`]'s, which are beside links, tell nothing else than them;
//! - no namespace of its number that can be seen, by a task, an open file or a mount, has its
//!   cookie: numbers are given out again, cookies are not.
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

/// Whether the pins that this directory's locks guard were a namespace's that is gone, and are gone
/// now; the locks with them.
pub(super) fn sweep(run_dir: &Path) -> Result<bool> {
    let Some(pin_dir) = pin_dir_of(run_dir).filter(|dir| dir.exists()) else {
        return Ok(false);
    };
    let paths = Paths {
        pin_dir,
        run_dir: run_dir.to_owned(),
    };
    // Most are in use: that is seen without a lock.
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

/// The namespace's, which the directory's name begins with.
fn inode_of(run_dir: &Path) -> Option<u64> {
    let name = run_dir.file_name()?.to_str()?;
    let inode = name.split_once('-').map_or(name, |(inode, _)| inode);
    inode.parse().ok()
}

/// Whether a namespace that can be seen is the one; what can't be looked into may be.
fn is_there(inode: u64, cookie: &str) -> bool {
    let name = format!("net:[{inode}]");
    let mut seen = seen_namespaces(&name);
    seen.any(|path| match cookie_of(&path) {
        Ok(found) => found.to_string() == cookie,
        // Closed or ended meanwhile.
        Err(error) => error.errno() != Some(libc::ENOENT),
    })
}

/// Files of namespaces of this name: of tasks, open ones, and mounted ones.
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

/// Where a line of mountinfo says that this namespace is mounted (proc_pid_mountinfo(5)).
fn mounted(line: &[u8], name: &str) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ');
    (fields.nth(3)? == name.as_bytes()).then(|| fields.next().map(mount_path))?
}

/// The cookie of the namespace of this file.
fn cookie_of(path: &Path) -> Result<u64> {
    let what = || {
        Error::os(format!(
            "look into the network namespace {}",
            path.display()
        ))
    };
    let namespace = File::open(path).map_err(what())?;
    // A thread of its own moves there, and ends.
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
