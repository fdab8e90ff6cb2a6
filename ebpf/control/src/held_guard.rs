//! The guard, held at a device that nobody sees, so that placing it at a TAP waits for nothing.
//!
//! # Theory of operation
//! Drivers call XDP programs by way of one dispatcher, which the kernel writes anew when a program's
//! first attachment is made or its last one ends (`bpf_dispatcher_change_prog`). Each time it waits for
//! an RCU grace period, some 3 to 20 ms, and holds the RTNL lock meanwhile: no device is set up or
//! changed then, and no network namespace made. A daemon whose TAPs come and go, or whose guests turn
//! TSO on, would wait so again and again. So it holds one attachment more for as long as it serves: at a
//! TAP in a network namespace of its own, which has no name, and in which nothing is up.
use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    thread,
};

use crate::{
    Error, Result,
    attach::Program,
    bpf::{XDP_FLAGS_DRV_MODE, link_create_xdp},
    device::Device,
    load::Datapath,
    tap::open_queue,
};

/// The attachment. It ends when this is dropped, and its namespace with it.
#[derive(Debug)]
pub struct HeldGuard {
    // It goes first: it is at the device that the other one makes.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "it is there until it is closed")
    )]
    link: OwnedFd,
    _tap: File,
}

impl HeldGuard {
    /// Attaches the guard of a datapath. It takes `CAP_SYS_ADMIN`, besides what attaching takes.
    ///
    /// # Errors
    /// The kernel refuses the namespace, the TAP or the attachment.
    pub fn of(datapath: &Datapath) -> Result<Self> {
        let program = datapath.program(Program::Guard)?;
        let failed = || Error::os("hold the guard in a network namespace of its own");
        thread::scope(|scope| {
            // A thread alone enters the namespace, and ends.
            let attaching = thread::Builder::new()
                .name("guard".to_owned())
                .spawn_scoped(scope, move || attach_elsewhere(program))
                .map_err(failed())?;
            attaching
                .join()
                .unwrap_or_else(|_| Err(failed()(io::Error::other("its thread panicked"))))
        })
    }

    /// The link, for tests.
    #[cfg(test)]
    pub(crate) fn link(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd as _;
        self.link.as_fd()
    }
}

fn attach_elsewhere(program: BorrowedFd<'_>) -> Result<HeldGuard> {
    // SAFETY: a number.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let error = io::Error::last_os_error();
        return Err(Error::os("make a network namespace")(error));
    }
    let (tap, name) = open_queue("guard", libc::IFF_TUN_EXCL)?;
    let ifindex = Device::named(&name)?.ifindex()?;
    let link = link_create_xdp(program, ifindex, XDP_FLAGS_DRV_MODE)
        .map_err(Error::os("attach the guard to a TAP of its own"))?;
    Ok(HeldGuard { link, _tap: tap })
}

#[cfg(test)]
#[path = "held_guard_test.rs"]
mod tests;
