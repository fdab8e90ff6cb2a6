//! A TAP that a client passes as an open descriptor, in place of its name.
//!
//! The descriptor may be of any file, by which a client could keep whoever touches it waiting. So the
//! kernel is asked what it is first, without touching the file (`/proc/self/fdinfo`), and one that
//! is no TAP is closed by a thread of its own. The name is all that is kept: the VM is served as if
//! the name had been given, and goes on when the client closes its own descriptor, or waits for the
//! TAP if it went with that.
use std::{
    fs,
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
};

use anyhow::{Context as _, bail};
use slipgate_control::tap;

/// Returns the name of the interface that the descriptor is a queue of.
///
/// # Errors
/// It is no TAP's, of no interface, or of one in another network namespace.
pub(crate) fn name_of(passed: OwnedFd) -> anyhow::Result<String> {
    let what = "the descriptor that was passed as the VM's TAP";
    let info = format!("/proc/self/fdinfo/{}", passed.as_raw_fd());
    let info = fs::read_to_string(info).with_context(|| format!("looking at {what}"))?;
    if !is_tun(&info) {
        let closed = thread::Builder::new().spawn(move || drop(passed));
        closed.with_context(|| format!("closing {what}"))?;
        bail!("{what} is another file's: pass one of /dev/net/tun");
    }
    let name = tap::name_here(&passed);
    name.with_context(|| {
        format!(
            "{what} has no interface in the daemon's network namespace: pass it after TUNSETIFF, \
             and make the TAP where the daemon is"
        )
    })
}

/// Whether a descriptor is of `/dev/net/tun`, by the text in `fdinfo`: no other file says `iff`
/// (`tun_chr_show_fdinfo`).
fn is_tun(info: &str) -> bool {
    info.lines().any(|line| line.starts_with("iff:"))
}

#[cfg(test)]
#[path = "passed_tap_test.rs"]
mod tests;
