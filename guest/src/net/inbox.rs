//! Queue of frames from the CPUs that received them to the CPU they belong to.

use alloc::{boxed::Box, vec, vec::Vec};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use spin::mutex::SpinMutex;

/// Capacity in bytes: frames, with two bytes of length for each.
const CAPACITY: usize = 512 * 1024;

/// Bounded queue of frames with many producers and one consumer. Neither side allocates.
pub struct Inbox {
    ring: SpinMutex<Ring>,
    /// Number of frames in the ring, which the owner reads without the lock.
    waiting: AtomicUsize,
    passed: AtomicU64,
    dropped: AtomicU64,
}

/// Counters of an inbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboxCounters {
    /// Frames put into the inbox.
    pub passed: u64,
    /// Frames dropped because the inbox was full.
    pub dropped: u64,
}

/// Lengths and frames in sequence, wrapping at the end.
struct Ring {
    bytes: Box<[u8]>,
    head: usize,
    used: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox {
            ring: SpinMutex::new(Ring {
                bytes: vec![0; CAPACITY].into_boxed_slice(),
                head: 0,
                used: 0,
            }),
            waiting: AtomicUsize::new(0),
            passed: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }
}

impl Inbox {
    /// Copies a frame of up to 65,535 bytes in. A frame that does not fit is dropped, and counted.
    pub fn put(&self, frame: &[u8]) {
        let Ok(len) = u16::try_from(frame.len()) else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let mut ring = self.ring.lock();
        if ring.used + 2 + frame.len() > ring.bytes.len() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        ring.write(&len.to_le_bytes());
        ring.write(frame);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.passed.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the inbox holds no frame.
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) == 0
    }

    /// Moves the oldest frame into `out`, replacing its contents. Returns false if there is none.
    pub fn take(&self, out: &mut Vec<u8>) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut ring = self.ring.lock();
        if ring.used == 0 {
            return false;
        }
        let mut len = [0; 2];
        ring.read(&mut len);
        out.resize(u16::from_le_bytes(len).into(), 0);
        ring.read(out);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        true
    }

    /// Returns the present figures.
    pub fn counters(&self) -> InboxCounters {
        InboxCounters {
            passed: self.passed.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

impl Ring {
    /// Appends bytes. The caller has checked that there is room.
    fn write(&mut self, data: &[u8]) {
        let at = (self.head + self.used) % self.bytes.len();
        let first = data.len().min(self.bytes.len() - at);
        self.bytes[at..at + first].copy_from_slice(&data[..first]);
        self.bytes[..data.len() - first].copy_from_slice(&data[first..]);
        self.used += data.len();
    }

    /// Removes bytes. The caller knows that there are as many.
    fn read(&mut self, out: &mut [u8]) {
        let first = out.len().min(self.bytes.len() - self.head);
        let (head, rest) = out.split_at_mut(first);
        head.copy_from_slice(&self.bytes[self.head..self.head + first]);
        rest.copy_from_slice(&self.bytes[..rest.len()]);
        self.head = (self.head + out.len()) % self.bytes.len();
        self.used -= out.len();
    }
}

#[cfg(test)]
#[path = "inbox_test.rs"]
mod tests;
