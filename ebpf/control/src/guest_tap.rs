//! TAPs for guests: for the built-in VMM one queue per descriptor, which ends when the last
//! descriptor is closed; for another program's VMM a persistent one, which that opens by its name.
//!
//! Both are left down. The process that serves it brings it up after attaching its program. A process
//! that holds only a queue cannot do so: that needs a capability.

use std::{
    collections::BTreeSet,
    fs::File,
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Error, Result,
    device::Device,
    netlink::{remove_link, tap_queues},
    tap::{open_queue, set},
};

/// Time between two looks whether a TAP is free.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A TAP with its queues.
#[derive(Debug)]
pub struct GuestTap {
    /// Name of the device.
    pub name: String,
    /// Descriptors of the queues, non-blocking: each read and write is a `virtio_net_hdr` and a
    /// frame.
    pub queues: Vec<OwnedFd>,
    /// Whether it stays when they are closed.
    pub is_persistent: bool,
}

impl GuestTap {
    /// Makes a TAP with `queues` queues. The kernel replaces a `%d` in `name` by a number.
    ///
    /// # Errors
    /// A device of this name exists, or a queue cannot be opened.
    pub fn make(name: &str, queues: u16) -> Result<Self> {
        let (first, name) = make_first_queue(name, libc::IFF_MULTI_QUEUE)?;
        Self::with_first(first, name, queues, libc::IFF_MULTI_QUEUE)
    }

    /// As [`GuestTap::make`], but takes no name of `taken`: those that no device has now and that are some
    /// VM's all the same. A `%d` becomes the lowest number that is free.
    ///
    /// # Errors
    /// A device of this name exists, or a queue cannot be opened.
    pub fn make_beside(name: &str, queues: u16, taken: &BTreeSet<String>) -> Result<Self> {
        if taken.is_empty() || !name.contains("%d") {
            return Self::make(name, queues);
        }
        let mut number = 0;
        loop {
            let name = name.replacen("%d", &number.to_string(), 1);
            number += 1;
            if taken.contains(&name) || Device::named(&name).is_ok() {
                continue;
            }
            match Self::make(&name, queues) {
                // Another process was faster.
                Err(Error::DeviceExists(_)) => {}
                made => return made,
            }
        }
    }

    fn with_first(first: File, name: String, queues: u16, more: libc::c_int) -> Result<Self> {
        let mut all = vec![first.into()];
        for _ in 1..queues {
            all.push(open_queue(&name, more)?.0.into());
        }
        Ok(Self {
            name,
            queues: all,
            is_persistent: false,
        })
    }

    /// Opens `queues` queues of the TAP of this name, which nobody else may have open, or makes it where
    /// there is none. One that is open is waited for, as its VMM may be about to end: the kernel
    /// closes the descriptors of an io_uring a moment after the process's end.
    ///
    /// # Errors
    /// It is still open after `within`, has fewer queues, or is no TAP; or a queue can't be opened.
    pub fn open_or_make(name: &str, queues: u16, within: Duration) -> Result<Self> {
        let until = Instant::now() + within;
        loop {
            match Self::try_open(name, queues)? {
                Some(tap) => return Ok(tap),
                None if Instant::now() >= until => return Err(Error::TapIsOpen(name.to_owned())),
                None => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// As [`GuestTap::open_or_make`]; `None`: it is open.
    fn try_open(name: &str, queues: u16) -> Result<Option<Self>> {
        let Some(found) = tap_queues(name)? else {
            return match Self::make(name, queues) {
                Ok(tap) => Ok(Some(tap)),
                // It has come meanwhile.
                Err(Error::DeviceExists(_)) => Ok(None),
                Err(e) => Err(e),
            };
        };
        if found.open > 0 {
            return Ok(None);
        }
        let more = match found.is_multi_queue {
            true => libc::IFF_MULTI_QUEUE,
            false if queues > 1 => return Err(Error::TapOfOneQueue(name.to_owned())),
            false => 0,
        };
        match open_queue(name, more) {
            Ok((first, name)) => {
                let mut tap = Self::with_first(first, name, queues, more)?;
                tap.is_persistent = found.is_persistent;
                Ok(tap.is_alone()?.then_some(tap))
            }
            Err(e) if e.errno() == Some(libc::EBUSY) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl GuestTap {
    /// Whether nobody has opened it meanwhile too. The kernel lets only one open a TAP of one queue.
    fn is_alone(&self) -> Result<bool> {
        let found = tap_queues(&self.name)?;
        Ok(found
            .is_some_and(|found| !found.is_multi_queue || found.open as usize == self.queues.len()))
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
