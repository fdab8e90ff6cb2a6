//! The channel that the broker left open for a process of ours.
use std::os::fd::{FromRawFd, OwnedFd};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use slipgate_ipc::channel::Channel;

/// Takes it over. `role`: the hidden command's name.
pub(super) fn channel(role: &str, fd: i32) -> anyhow::Result<Channel> {
    let what = || format!("{role} --fd {fd}: not a descriptor; slipgate starts these by itself");
    if fd <= libc::STDERR_FILENO {
        bail!(what());
    }
    // SAFETY: only asks; a number that is no descriptor is answered by an error.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).with_context(what)?;
    // SAFETY: it is open, the broker left it for us, and nobody else here has it.
    Ok(Channel::from_fd(unsafe { OwnedFd::from_raw_fd(fd) }))
}
