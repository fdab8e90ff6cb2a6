//! The VMM's jail: namespaces of its own, and an empty root.
//!
//! # Theory of operation
//! The process is in a PID namespace already, which the broker made it in. It has become its
//! user, but has the capability to make namespaces for a moment more: it enters a user, mount, network, IPC,
//! UTS and cgroup namespace at once, so that the user namespace owns the others, in which its user
//! and group alone have numbers. There it mounts an empty file system, makes it the root, takes the
//! old root away, and makes the new one read-only. What the VMM works with it has by descriptors.
//!
//! Namespaces are a second line: without them the VMM can't open a file by name, make a socket or
//! signal another process either, because no filter lets it ([`super::vmm`]). So a host that refuses
//! one does not keep a VM from running, unless that is asked for.
use std::{ffi::CStr, fs, io};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, getegid, geteuid},
};
use slipgate_broker::privileges::{ConfinementError, prctl};

use super::failed;

/// Namespaces that a process enters by itself.
pub(crate) const NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNS
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWCGROUP);

/// A directory that is there, and on which the empty file system is mounted until it is the root.
const MOUNT_POINT: &CStr = c"/proc";

/// Enters the jail. The process is its user already, with the capabilities of who it was, and has
/// one thread. Its capabilities in the namespaces are for the caller to give up.
///
/// # Errors
/// The host refuses a part of it. What it does not refuse is entered all the same.
pub(super) fn enter() -> Result<(), ConfinementError> {
    // As they are called outside: inside they have no number until it is given.
    let (user, group) = (geteuid(), getegid());
    let refused = match unshare(NAMESPACES | CloneFlags::CLONE_NEWUSER) {
        Ok(()) => {
            map_own_user(user, group)?;
            None
        }
        // Root makes the others without it, where the host has none.
        Err(e) => {
            unshare(NAMESPACES).map_err(failed("namespaces"))?;
            Some(e)
        }
    };
    empty_root()?;
    refused.map_or(Ok(()), |e| Err(failed("a user namespace")(e)))
}

/// Gives the process's user and group their own numbers in its new user namespace.
fn map_own_user(user: Uid, group: Gid) -> Result<(), ConfinementError> {
    // The change of user had made the files below /proc/self root's.
    prctl("dumpable", libc::PR_SET_DUMPABLE, 1)?;
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ] {
        fs::write(format!("/proc/self/{file}"), text)
            .map_err(|e| ConfinementError::new("ids of the user namespace", e))?;
    }
    Ok(())
}

fn empty_root() -> Result<(), ConfinementError> {
    const PLAIN: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let step = |step| move |e| ConfinementError::new(step, e);
    set_mounts_apart().map_err(step("mounts apart from the host's"))?;
    let options = c"size=4096,nr_inodes=2,mode=0555";
    mount(Some(c"tmpfs"), MOUNT_POINT, PLAIN, Some(options)).map_err(step("an empty root"))?;
    nix::unistd::chdir(MOUNT_POINT).map_err(failed("entering the empty root"))?;
    // The new root lies on the old one, and both are the working directory.
    // SAFETY: both paths are terminated.
    let pivoted = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
    if pivoted == 0 {
        // SAFETY: the path is terminated.
        if unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) } != 0 {
            return Err(step("taking the old root away")(io::Error::last_os_error()));
        }
    } else {
        // An initial RAM file system can't be taken away: it is covered.
        mount(Some(c"."), c"/", libc::MS_MOVE, None).map_err(step("covering the old root"))?;
        nix::unistd::chroot(c".").map_err(failed("the new root"))?;
    }
    nix::unistd::chdir(c"/").map_err(failed("entering the new root"))?;
    let read_only = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | PLAIN;
    mount(None, c"/", read_only, None).map_err(step("a root for reading only"))
}

/// Has nothing that is mounted in this mount namespace be seen outside.
pub(crate) fn set_mounts_apart() -> io::Result<()> {
    mount(None, c"/", libc::MS_REC | libc::MS_PRIVATE, None)
}

/// `source`: the type of a file system to mount; or with MS_MOVE, what is moved.
fn mount(
    source: Option<&CStr>,
    target: &CStr,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: each is terminated, or null where the call takes that.
    let rc = unsafe {
        libc::mount(
            pointer(source),
            target.as_ptr(),
            pointer(source),
            flags,
            pointer(options).cast(),
        )
    };
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[path = "jail_test.rs"]
mod tests;
