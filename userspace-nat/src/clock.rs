//! Clocks as the engine sees them.
use std::time::{Duration, SystemTime};

/// A monotonic clock in nanoseconds, comparable with the kernel's `CLOCK_MONOTONIC`, and a wall
/// clock for records.
pub trait Clock {
    /// Returns the present `CLOCK_MONOTONIC` time, ns: the scale of the times in slots.
    fn now_ns(&self) -> u64;
    /// Returns the present wall-clock time.
    fn wall(&self) -> SystemTime;
    /// Waits `ns` nanoseconds. Called only when the engine stops and has no other work.
    fn sleep_ns(&self, ns: u64);
}

/// The clocks of the system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
            .map_or(0, |t| Duration::from(t).as_nanos() as u64)
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    fn sleep_ns(&self, ns: u64) {
        std::thread::sleep(Duration::from_nanos(ns));
    }
}

/// Nanoseconds in a second.
pub const SECOND_NS: u64 = 1_000_000_000;
/// Nanoseconds in a millisecond.
pub const MILLISECOND_NS: u64 = 1_000_000;
