//! A TAP that is made for a VMM of ours: one queue per descriptor, gone when the last one is closed.
//!
//! It is left down. Only who serves it brings it up, and only after its program is there; whoever
//! has a queue needs a capability for that.

use std::os::fd::OwnedFd;

use crate::{Error, Result, tap::open_queue};

/// A new TAP.
#[derive(Debug)]
pub struct GuestTap {
    /// Its name.
    pub name: String,
    /// Its queues, non-blocking; each read and write is a `virtio_net_hdr` and a frame.
    pub queues: Vec<OwnedFd>,
}

impl GuestTap {
    /// Makes one with so many queues. The kernel puts a number in the place of a `%d` in `name`.
    pub fn make(name: &str, queues: u16) -> Result<Self> {
        // Of a device that is there already, a queue would join somebody's.
        let (first, name) = match open_queue(name, libc::IFF_TUN_EXCL) {
            Err(error) if error.errno() == Some(libc::EBUSY) => {
                return Err(Error::DeviceExists(name.to_owned()));
            }
            other => other?,
        };
        let mut all = vec![first.into()];
        for _ in 1..queues {
            all.push(open_queue(&name, 0)?.0.into());
        }
        Ok(Self { name, queues: all })
    }
}

#[cfg(test)]
#[path = "guest_tap_test.rs"]
mod tests;
