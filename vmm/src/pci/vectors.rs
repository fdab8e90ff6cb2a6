//! MSI-X vectors as the threads that signal see them: one atomic word each, no lock.
//!
//! # Theory of operation
//! A vector's word has two bits. HELD: it may not interrupt now, because of its own mask, the
//! function's, MSI-X being off, bus mastering being off, or a message that goes nowhere. PENDING:
//! it was signalled while held. The vCPU that handles a register write sets and clears HELD, under
//! the function's lock; any thread signals.
//!
//! - [`Vectors::signal`]: while HELD, compare-and-swap HELD to HELD|PENDING; otherwise write the
//!   irqfd.
//! - [`Vectors::hold`]: set HELD.
//! - [`Vectors::release`]: clear HELD and PENDING in one swap; if PENDING was set, write the irqfd.
//!
//! So PENDING implies HELD, and since each is one read-modify-write of one word, there is an order
//! of them all. A signal that finds HELD either gets PENDING in before the release, which then
//! interrupts, or its swap fails because the release came first, and it looks again and interrupts
//! itself. Nothing is lost, and what was pending is injected once. A signal that begins after
//! `hold` returned sees HELD and does not interrupt. One that had begun before may interrupt just
//! after: it is the posted write that was on its way when the mask bit was set, which drivers wait
//! for by reading the register back, and which an irqfd may deliver later still.
//!
//! The words are read and changed with acquire and release, so whoever is interrupted through
//! another thread's release sees what the signaller wrote before.
use std::{
    io,
    sync::atomic::{
        AtomicU8, AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const HELD: u8 = 1;
const PENDING: u8 = 2;

/// The vectors of one function.
pub struct Vectors(Box<[Vector]>);

/// On a cache line pair of its own: queues are served by different threads.
#[repr(align(128))]
struct Vector {
    state: AtomicU8,
    irqfd: EventFd,
    /// Interrupts sent.
    sent: AtomicU64,
}

impl Vectors {
    /// `count` vectors, all held.
    pub(super) fn new(count: u16) -> io::Result<Self> {
        let vector = |_| {
            Ok(Vector {
                state: AtomicU8::new(HELD),
                irqfd: EventFd::new(EFD_NONBLOCK)?,
                sent: AtomicU64::new(0),
            })
        };
        (0..count).map(vector).collect::<io::Result<_>>().map(Self)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Interrupts, or leaves the vector pending while it is held. A vector that does not exist is
    /// left alone. From any thread; takes no lock.
    pub fn signal(&self, vector: u16) {
        let Some(vector) = self.0.get(usize::from(vector)) else {
            return;
        };
        let mut state = vector.state.load(Acquire);
        while state & HELD != 0 {
            let pending = state | PENDING;
            match vector
                .state
                .compare_exchange_weak(state, pending, AcqRel, Acquire)
            {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
        vector.send();
    }

    /// Interrupts sent by a vector since the beginning.
    pub fn sent(&self, vector: u16) -> u64 {
        self.0
            .get(usize::from(vector))
            .map_or(0, |vector| vector.sent.load(Relaxed))
    }

    /// Whether a vector was signalled while held.
    pub fn is_pending(&self, vector: u16) -> bool {
        let pending = |vector: &Vector| vector.state.load(Acquire) & PENDING != 0;
        self.0.get(usize::from(vector)).is_some_and(pending)
    }

    pub(super) fn irqfd(&self, vector: u16) -> &EventFd {
        &self.0[usize::from(vector)].irqfd
    }

    pub(super) fn hold(&self, vector: u16) {
        self.0[usize::from(vector)].state.fetch_or(HELD, AcqRel);
    }

    pub(super) fn release(&self, vector: u16) {
        let vector = &self.0[usize::from(vector)];
        if vector.state.swap(0, AcqRel) & PENDING != 0 {
            vector.send();
        }
    }

    /// Forgets what is pending, for a device that was reset.
    pub(super) fn forget(&self, vector: u16) {
        self.0[usize::from(vector)]
            .state
            .fetch_and(!PENDING, AcqRel);
    }
}

impl Vector {
    fn send(&self) {
        self.sent.fetch_add(1, Relaxed);
        // It can only fail when 2^64 - 2 signals wait to be taken, and then one is under way.
        let _ = self.irqfd.write(1);
    }
}

#[cfg(test)]
#[path = "vectors_test.rs"]
mod tests;
