//! The ACPI PM timer: a counter that a guest can measure its TSC with, if it has no kvm-clock. A
//! hardware-reduced machine has no PIT to a Linux guest, and an AMD CPU does not tell its TSC's
//! frequency.
use std::time::{Duration, Instant};

/// ACPI 6.5, 4.8.3.3: three times the NTSC colour subcarrier.
const FREQUENCY_HZ: u128 = 3_579_545;

/// Counts since it was made.
pub(crate) struct PmTimer(Instant);

impl PmTimer {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// The register: 32 bits, wraps.
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
