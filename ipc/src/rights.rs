//! Descriptors out of a socket's control data: the one place that trusts a number to be one.
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessageOwned, RecvMsg};

/// Takes every descriptor that came with a packet. All of them are owned from here on, so that those
/// that nobody wants are closed.
///
/// # Errors
/// The control data was cut short: some descriptors are missing.
pub(crate) fn take<S>(received: &RecvMsg<'_, '_, S>) -> nix::Result<Vec<OwnedFd>> {
    let mut fds = Vec::new();
    for control in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            fds.extend(raw.into_iter().map(own));
        }
    }
    Ok(fds)
}

fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for this process with the packet just received; the
    // control data is read once, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}
