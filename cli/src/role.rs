//! The processes: of `slipgate attach` two, of `slipgate run` three, one more with `--metrics`, and one for
//! each socket of `slipgate serve`'s API.
pub(crate) mod api;
pub(crate) mod engine;
pub(crate) mod metrics;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vmm;

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use slipgate_ipc::channel::Channel;

/// Takes over the channel that this process inherits from the broker. `role`: the hidden command's
/// name.
fn inherited_channel(role: &str, fd: i32) -> anyhow::Result<Channel> {
    let what = || format!("{role} --fd {fd}: not a descriptor; slipgate starts these by itself");
    if fd <= libc::STDERR_FILENO {
        bail!(what());
    }
    // SAFETY: only asks; a number that is no descriptor is answered by an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).with_context(what)?;
    // SAFETY: it is open, the broker left it for us, and nobody else here has it.
    Ok(Channel::from_fd(unsafe { OwnedFd::from_raw_fd(fd) }))
}
