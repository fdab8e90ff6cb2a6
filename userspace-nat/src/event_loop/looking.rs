//! A short look for events before the thread sleeps, while traffic is dense.
//!
//! # Theory of operation
//! To sleep and to be woken takes longer than most peers need for an answer, so a user-mode engine that
//! waits for one looks for [`LOOK_NS`] first. A look that finds nothing is CPU time lost, so there is none
//! unless events have been near: each that comes within [`NEAR_NS`] counts up, a look in vain counts
//! down twice, and a sleep of [`FAR_NS`] forgets all. An idle guest's engine does not look at all, and
//! events that come regularly but far apart end the looks after a few. Where the thread's peers need its
//! own CPU, its looks are in vain, and end by themselves.
//!
//! What can wait until nothing is ready is done behind the first look that finds nothing, or before a sleep
//! without a look: the time that the peers take for their answers is free.
use std::io;

use crate::{
    clock::Clock,
    poll::{Poller, Readiness},
};

/// How long a look lasts, ns.
const LOOK_NS: u64 = 20_000;
/// Wait after which an event still counts as near, ns: a look's, and what a wake-up takes.
const NEAR_NS: u64 = 60_000;
/// Wait after which nothing is known any more, ns.
const FAR_NS: u64 = 1_000_000;
/// Near events after which it looks, and beyond which they are not counted.
const DENSE: u8 = 4;
const MOST: u8 = 8;

/// How near events have been.
#[derive(Debug, Default)]
pub(super) struct Looking {
    near: u8,
}

impl Looking {
    /// Waits as [`Poller::wait`] does, with a look before it where that is worth while. `meanwhile` is
    /// called once when nothing is ready, with events known to be near, or before it sleeps; the wait is
    /// over if it says that there is something to do.
    ///
    /// # Errors
    /// When the kernel refuses the wait.
    pub(super) fn wait(
        &mut self,
        poller: &mut Poller,
        clock: &impl Clock,
        timeout_ns: Option<u64>,
        ready: &mut Vec<Readiness>,
        meanwhile: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        if timeout_ns == Some(0) {
            return poller.wait(timeout_ns, ready);
        }
        let mut began_ns = clock.now_ns();
        let mut meanwhile = Some(meanwhile);
        let look_ns = self.look_ns().min(timeout_ns.unwrap_or(u64::MAX));
        let mut waited_ns = 0;
        while waited_ns < look_ns {
            poller.wait(Some(0), ready)?;
            waited_ns = clock.now_ns().saturating_sub(began_ns);
            if !ready.is_empty() {
                self.waited(waited_ns, false);
                return Ok(());
            }
            match meanwhile.take() {
                None => std::hint::spin_loop(),
                Some(meanwhile) => {
                    if meanwhile() {
                        return Ok(());
                    }
                    // It is no part of the look.
                    began_ns += clock.now_ns().saturating_sub(began_ns + waited_ns);
                }
            }
        }
        if meanwhile.is_some_and(|meanwhile| meanwhile()) {
            return Ok(());
        }
        let left_ns = timeout_ns.map(|timeout_ns| timeout_ns.saturating_sub(waited_ns));
        poller.wait(left_ns, ready)?;
        let waited_ns = clock.now_ns().saturating_sub(began_ns);
        self.waited(waited_ns, look_ns > 0);
        Ok(())
    }

    /// How long it looks before it sleeps, ns.
    fn look_ns(&self) -> u64 {
        if self.near >= DENSE { LOOK_NS } else { 0 }
    }

    /// A wait has ended. `in_vain`: a look had found nothing.
    fn waited(&mut self, waited_ns: u64, in_vain: bool) {
        self.near = match waited_ns {
            FAR_NS.. => 0,
            _ if in_vain => self.near.saturating_sub(2),
            ..=NEAR_NS => (self.near + 1).min(MOST),
            _ => self.near.saturating_sub(1),
        };
    }
}

#[cfg(test)]
#[path = "looking_test.rs"]
mod tests;
