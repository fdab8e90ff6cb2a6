//! MSI-X vectors, as used by the threads that signal: one atomic word each, no lock.
//!
//! # Theory of operation
//! A vector's word has two bits. HELD: it may not interrupt now, because of its own mask, the
//! function's mask, MSI-X being off, bus mastering being off, or a message that the fabric refused.
//! PENDING: it was signalled while held. The vCPU that handles a register write sets and clears
//! HELD, under the function's lock; any thread signals.
//!
//! - [`Vectors::signal`]: while HELD, compare-and-swap HELD to HELD|PENDING; otherwise write the
//!   irqfd.
//! - [`Vectors::hold`]: set HELD.
//! - [`Vectors::release`]: clear HELD and PENDING in one swap; if PENDING was set, write the irqfd.
//!
//! So PENDING implies HELD. Each operation is one read-modify-write of one word, so all of them
//! have one order. A signal that finds HELD either sets PENDING before the release, which then
//! interrupts, or its swap fails because the release came first; then it reads the word again and
//! interrupts itself. No interrupt is lost, and a pending one is injected once. A signal that
//! begins after `hold` returned sees HELD and does not interrupt. A signal that had begun before
//! may interrupt just after. It corresponds to a posted write that was in flight when the mask bit
//! was set: drivers wait for it by reading the register back, and an irqfd may deliver it later
//! still.
//!
//! The words are read and changed with acquire and release, so a CPU that is interrupted by another
//! thread's release sees the signaller's earlier writes.
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

/// Vectors of one function.
pub struct Vectors(Box<[Vector]>);

/// One vector, on a cache line pair of its own: different threads serve the queues.
#[repr(align(128))]
struct Vector {
    state: AtomicU8,
    irqfd: EventFd,
    /// Number of interrupts sent.
    sent: AtomicU64,
}

impl Vectors {
    /// Returns `count` vectors, all held.
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

    /// Returns the number of vectors.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Interrupts, or sets the vector pending while it is held. A vector that does not exist is
    /// ignored. Any thread may call it; it takes no lock.
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

    /// Returns the number of interrupts that a vector has sent.
    pub fn sent(&self, vector: u16) -> u64 {
        self.0
            .get(usize::from(vector))
            .map_or(0, |vector| vector.sent.load(Relaxed))
    }

    /// Returns whether a vector was signalled while held.
    pub fn is_pending(&self, vector: u16) -> bool {
        let pending = |vector: &Vector| vector.state.load(Acquire) & PENDING != 0;
        self.0.get(usize::from(vector)).is_some_and(pending)
    }

    /// Returns what interrupts by a vector, if that exists.
    pub(crate) fn line(&self, vector: u16) -> Option<&EventFd> {
        let vector = self.0.get(usize::from(vector));
        vector.map(|vector| &vector.irqfd)
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

    /// Clears a vector's pending bit, after a reset of the device.
    pub(super) fn forget(&self, vector: u16) {
        self.0[usize::from(vector)]
            .state
            .fetch_and(!PENDING, AcqRel);
    }
}

impl Vector {
    fn send(&self) {
        self.sent.fetch_add(1, Relaxed);
        // The write can fail only when 2^64 - 2 signals are waiting: then the interrupt is under
        // way.
        let _ = self.irqfd.write(1);
    }
}

#[cfg(test)]
#[path = "vectors_test.rs"]
mod tests;
