//! A TAP for the built-in VMM: one queue per descriptor. It ends when the last descriptor is
//! closed.
//!
//! It is left down. The process that serves it brings it up after attaching its program. A process
//! that holds only a queue cannot do so: that needs a capability.

use std::os::fd::OwnedFd;

use crate::{Error, Result, tap::open_queue};

/// A newly made TAP.
#[derive(Debug)]
pub struct GuestTap {
    /// Name of the device.
    pub name: String,
    /// Descriptors of the queues, non-blocking: each read and write is a `virtio_net_hdr` and a
    /// frame.
    pub queues: Vec<OwnedFd>,
}

impl GuestTap {
    /// Makes a TAP with `queues` queues. The kernel replaces a `%d` in `name` by a number.
    ///
    /// # Errors
    /// A device of this name exists, or a queue cannot be opened.
    pub fn make(name: &str, queues: u16) -> Result<Self> {
        // A queue of an existing device would join another process's TAP.
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
