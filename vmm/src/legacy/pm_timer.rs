//! The ACPI PM timer: a counter with which a guest without kvm-clock can calibrate its TSC. Linux
//! sees no PIT on a hardware-reduced machine, and an AMD CPU does not report its TSC's frequency.
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Frequency (ACPI 6.5, 4.8.3.3): the NTSC colour subcarrier's.
const FREQUENCY_HZ: u128 = 3_579_545;

/// PM timer, which counts from its creation, or from where it was when the machine was saved.
pub(crate) struct PmTimer {
    began: Instant,
    /// Time that it had counted when it began, ns.
    before_ns: AtomicU64,
}

impl PmTimer {
    pub(crate) fn start() -> Self {
        Self {
            began: Instant::now(),
            before_ns: AtomicU64::new(0),
        }
    }

    /// Returns the time that it has counted, ns.
    pub(crate) fn counted_ns(&self) -> u64 {
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        now.wrapping_add(self.before_ns.load(Relaxed))
    }

    /// Sets the time that it has counted. The guest does not run yet.
    pub(crate) fn restore(&self, counted_ns: u64) {
        self.before_ns.store(counted_ns, Relaxed);
    }

    /// Returns the counter: 32 bits, wraps.
    pub(crate) fn read(&self) -> u32 {
        ticks(Duration::from_nanos(self.counted_ns()))
    }
}

fn ticks(elapsed: Duration) -> u32 {
    (elapsed.as_nanos() * FREQUENCY_HZ / 1_000_000_000) as u32
}

#[cfg(test)]
#[path = "pm_timer_test.rs"]
mod tests;
