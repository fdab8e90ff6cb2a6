//! Time that the machine runs. A guest that is paused, or that is restored where its clock goes on,
//! finds that hours have passed in which no data could come: no connection has stalled for that, and
//! no workload is over.
//!
//! # Theory of operation
//! Every CPU looks at the clock at least once in [`LONGEST_SLEEP_NS`]. So when one finds that
//! [`STOP_NS`] have passed since it looked last, the machine has not run meanwhile, and that time is
//! skipped, for all CPUs. Those that find the same stop later find it written down. [`STOP_NS`] of each
//! stop are not skipped: the clock of the CPU that finds the stop may be behind the others' by as much as
//! it may sleep, and theirs must not go back.
//!
//! A host may also keep one CPU from running for longer than that while the others run. What that one
//! then skips is no stop of theirs, so their clocks stand still until the platform's has caught up.
use core::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use spin::mutex::SpinMutex;

/// Longest time that a CPU may go without a look at the clock.
pub(super) const LONGEST_SLEEP_NS: u64 = 1_000_000_000;
/// Time without a look that is a stop.
const STOP_NS: u64 = 3_000_000_000;

/// The stops of all CPUs.
#[derive(Default)]
pub(super) struct Stops {
    skipped_ns: AtomicU64,
    /// End of the last stop, on the platform's clock.
    ended_ns: SpinMutex<u64>,
}

/// A CPU's clock.
pub(super) struct RunClock<'s> {
    stops: &'s Stops,
    /// The last look, on the platform's clock.
    seen_ns: Cell<u64>,
    /// The time shown last: this clock never goes back.
    shown_ns: Cell<u64>,
}

impl<'s> RunClock<'s> {
    pub(super) fn new(stops: &'s Stops, platform_ns: u64) -> Self {
        Self {
            stops,
            seen_ns: Cell::new(platform_ns),
            shown_ns: Cell::new(0),
        }
    }

    /// Returns the time that the machine has run, at a time of the platform.
    pub(super) fn at(&self, platform_ns: u64) -> u64 {
        let seen_ns = self.seen_ns.replace(platform_ns);
        if platform_ns.saturating_sub(seen_ns) > STOP_NS {
            let mut ended_ns = self.stops.ended_ns.lock();
            // Another CPU may have found it.
            if *ended_ns <= seen_ns {
                *ended_ns = platform_ns;
                let stop_ns = platform_ns - seen_ns - STOP_NS;
                self.stops.skipped_ns.fetch_add(stop_ns, Ordering::SeqCst);
            }
        }
        // Another CPU may have skipped more since this one read the platform's clock.
        let run_ns = platform_ns.saturating_sub(self.skipped_ns());
        let shown_ns = run_ns.max(self.shown_ns.get());
        self.shown_ns.set(shown_ns);
        shown_ns
    }

    /// Returns the time of the platform at a time that the machine has run.
    pub(super) fn of_platform(&self, run_ns: u64) -> u64 {
        run_ns.saturating_add(self.skipped_ns())
    }

    fn skipped_ns(&self) -> u64 {
        self.stops.skipped_ns.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
#[path = "run_clock_test.rs"]
mod tests;
