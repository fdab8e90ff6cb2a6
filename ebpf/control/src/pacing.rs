//! Devices and queues that shape the bytes of VMs with a rate, so that TCP gets the rate instead of
//! losses.
//!
//! # Theory of operation
//!
//! To a guest, the queue is that of its TAP, which is slipgate's to configure. From a guest, it may not
//! be the uplink's, which is the host's: the programs send such a VM's packets by a *pacing device*, a
//! veth pair of slipgate's own. In front of its near end each VM has a class of an HTB; a frame that it
//! lets go arrives at the far end, whose program sends it on by the uplink. Other VMs' packets meet
//! none of this.
//!
//! The queues drop nothing: the programs charge a packet before they send it, by the same arithmetic,
//! and drop what would wait for too long ([`slipgate_abi::rate`]). So a limit is exact and counted
//! whatever the queue does, and a queue that is lost, or replaced by somebody else's, costs no more
//! than the smoothness.
//!
//! HTB, and not departure times with fq: it is in every kernel that has queueing at all, fq is not;
//! and one device can have a class for each VM.

mod device;
mod htb;

pub use self::device::PacingDevice;
pub(crate) use self::device::is_far_end;

use slipgate_abi::IfIndex;

use self::htb::{Class, Queue};
use crate::{Result, netlink::Requests};

/// Class of the one VM of a TAP.
const TAPS_CLASS: u16 = 1;

/// Has a TAP's queue let frames go at a rate of L3 bytes per second. Returns `false`, and changes
/// nothing, if the TAP has a queueing discipline of somebody else's.
///
/// # Errors
/// The kernel has no HTB, or the TAP is gone.
pub fn shape_tap(tap: IfIndex, bytes_per_second: u64) -> Result<bool> {
    let mut requests = Requests::open()?;
    let queue = Queue::at(tap);
    queue.make(&mut requests, TAPS_CLASS)?;
    match queue.set_class(&mut requests, Class::new(TAPS_CLASS, bytes_per_second)) {
        // The queue of that handle is not there, so another one is.
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
        set => set.map(|()| true),
    }
}

/// Gives a TAP the kernel's queue again, in place of ours. A TAP that has another queue, or is gone,
/// is no error.
///
/// # Errors
/// The kernel refuses.
pub fn unshape_tap(tap: IfIndex) -> Result<()> {
    Queue::at(tap).remove(&mut Requests::open()?)
}

/// Whether the kernel can shape: by an attempt at the loopback device of a network namespace of its
/// own, in a thread that ends with it.
///
/// # Errors
/// What the kernel lacks.
pub fn try_shaping() -> Result<()> {
    let attempt = || {
        // SAFETY: a number. Only this thread is moved.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Err(crate::Error::os("make a network namespace")(
                std::io::Error::last_os_error(),
            ));
        }
        shape_tap(IfIndex::new(1), 1_000_000)?;
        PacingDevice::open(0).map(drop)
    };
    match std::thread::spawn(attempt).join() {
        Ok(tried) => tried,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

#[cfg(test)]
#[path = "pacing_test.rs"]
mod tests;
