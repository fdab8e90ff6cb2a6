//! The CPU time of a test's thread, which other load on the machine hardly changes.
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Calls `work`, and returns its result and the CPU time that it took.
pub(crate) fn cpu_time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let now = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let start = now();
    let result = work();
    (now() - start, result)
}
