//! TAPs for guests: for the built-in VMM one queue per descriptor, which ends when the last
//! descriptor is closed; for another program's VMM a persistent one, which that opens by its name.
//!
//! Both are left down. The process that serves it brings it up after attaching its program. A process
//! that holds only a queue cannot do so: that needs a capability.

use std::{fs::File, os::fd::OwnedFd};

use crate::{
    Error, Result,
    device::Device,
    netlink::remove_link,
    tap::{open_queue, set},
};

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
        let (first, name) = make_first_queue(name, libc::IFF_MULTI_QUEUE)?;
        let mut all = vec![first.into()];
        for _ in 1..queues {
            all.push(open_queue(&name, libc::IFF_MULTI_QUEUE)?.0.into());
        }
        Ok(Self { name, queues: all })
    }
}

/// A TAP that stays until it is removed, for a VMM that opens it by its name.
#[derive(Clone, Copy, Debug)]
pub struct PersistentTap<'a> {
    /// Name of the device.
    pub name: &'a str,
    /// User that may open it, besides who has CAP_NET_ADMIN. `None`, with no group either: anybody.
    pub user: Option<u32>,
    /// Group that may open it.
    pub group: Option<u32>,
    /// Whether a VMM may open several queues. Firecracker refuses such a TAP; others require it for
    /// several queue pairs.
    pub is_multi_queue: bool,
    /// Largest packet, L3 bytes; `None`: the kernel's default.
    pub mtu: Option<u32>,
}

impl PersistentTap<'_> {
    /// Makes it in the network namespace of the calling thread.
    ///
    /// # Errors
    /// A device of this name exists, or the kernel refuses one of the properties.
    pub fn make(&self) -> Result<()> {
        let queues = match self.is_multi_queue {
            true => libc::IFF_MULTI_QUEUE,
            false => 0,
        };
        let (tap, name) = make_first_queue(self.name, queues)?;
        let failed = |what: &str| Error::os(format!("{what} the TAP {name}"));
        if let Some(user) = self.user {
            set(&tap, libc::TUNSETOWNER, user).map_err(failed("set the user of"))?;
        }
        if let Some(group) = self.group {
            set(&tap, libc::TUNSETGROUP, group).map_err(failed("set the group of"))?;
        }
        if let Some(mtu) = self.mtu {
            Device::named(&name)?.set_mtu(mtu)?;
        }
        // Last: what failed before leaves nothing.
        set(&tap, libc::TUNSETPERSIST, 1).map_err(failed("make persistent"))
    }

    /// Removes a TAP of this name, whoever has it open. Returns whether there was one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(name: &str) -> Result<bool> {
        match Device::named(name) {
            Ok(device) => remove_link(device.ifindex()?, name).map(|()| true),
            Err(Error::NoInterface(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Makes a TAP with its first queue. A queue of an existing device would join another process's.
fn make_first_queue(name: &str, more: libc::c_int) -> Result<(File, String)> {
    match open_queue(name, libc::IFF_TUN_EXCL | more) {
        Err(error) if error.errno() == Some(libc::EBUSY) => {
            Err(Error::DeviceExists(name.to_owned()))
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "guest_tap_test.rs"]
mod tests;
