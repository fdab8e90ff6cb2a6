//! The ACPI PM timer: a counter with which a guest without kvm-clock can calibrate its TSC. Linux
//! sees no PIT on a hardware-reduced machine, and an AMD CPU does not report its TSC's frequency.
use std::time::{Duration, Instant};

/// Frequency (ACPI 6.5, 4.8.3.3): the NTSC colour subcarrier's.
const FREQUENCY_HZ: u128 = 3_579_545;

/// PM timer, which counts from its creation.
pub(crate) struct PmTimer(Instant);

impl PmTimer {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the counter: 32 bits, wraps.
    pub(crate) fn read(&self) -> u32 {
        ticks(self.0.elapsed())
    }
}

fn ticks(elapsed: Duration) -> u32 {
    (elapsed.as_nanos() * FREQUENCY_HZ / 1_000_000_000) as u32
}

#[cfg(test)]
#[path = "pm_timer_test.rs"]
mod tests;
