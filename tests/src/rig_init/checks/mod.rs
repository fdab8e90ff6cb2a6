//! Checks that must hold on every kernel, with the testbed's own world and guest.

mod ipv6;
mod programs;
mod served;
mod stand;

use std::{fs, io::Write, time::Instant};

use slipgate_testbed::{Error, Result};

/// Runs all; whether all hold.
pub(crate) fn run() -> bool {
    let mut report = Report::default();
    served::run(&mut report);
    report.check("logging build", programs::logging_build);
    report.check("guard, native", programs::native_guard);
    report.check("guard, generic", programs::generic_guard);
    report.check("uplink without L2", programs::uplink_without_l2);
    report.check("detached", programs::nothing_is_left);
    report.failed == 0
}

#[derive(Default)]
pub(crate) struct Report {
    failed: usize,
}

impl Report {
    /// Runs a check and prints its result and its observation.
    fn check(&mut self, name: &str, check: impl FnOnce() -> Result<String>) {
        let started = Instant::now();
        let seen = check();
        let ms = started.elapsed().as_millis();
        let (mark, said) = match &seen {
            Ok(said) => ("ok", said.clone()),
            Err(why) => ("FAILED", why.to_string()),
        };
        self.failed += usize::from(seen.is_err());
        // A report that can't be written is missed by whoever reads it.
        let _ = writeln!(std::io::stdout(), "{mark:<6} {name:<20} {ms:>6} ms  {said}");
    }
}

/// Returns an error with the text `what` unless the condition holds.
fn expect(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    holds.then_some(()).ok_or_else(|| Error::unexpected(what()))
}

/// Whether this kernel has tcx: 6.6 and later.
fn has_tcx() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(6))
}
