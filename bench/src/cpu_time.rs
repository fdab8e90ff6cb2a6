//! CPU time of a measurement, which other load on the machine does not increase.
//!
//! Work in softirq is charged to the thread that it interrupts. For the writer of a TAP that is the
//! work that its own write caused.

use std::time::Duration;

use anyhow::Result;
use nix::time::ClockId;

use crate::contender::{Scheduled, Stand};

/// CPU times of this thread and of the process that decides about flows, if there is one.
#[derive(Clone, Copy)]
pub(crate) struct CpuTime {
    writer: Duration,
    process: Option<Scheduled>,
}

impl CpuTime {
    /// Reads both CPU times.
    pub(crate) fn now(stand: &Stand) -> Result<CpuTime> {
        Ok(CpuTime {
            writer: ClockId::CLOCK_THREAD_CPUTIME_ID.now()?.into(),
            process: stand.decider_scheduled()?,
        })
    }

    /// Returns the CPU time that both have used since this reading.
    pub(crate) fn since(self, stand: &Stand) -> Result<Duration> {
        let now = CpuTime::now(stand)?;
        let process = now.process_since(self).unwrap_or_default();
        Ok(now.writer - self.writer + process.ran)
    }

    /// Returns the CPU time since this reading of the deciding process, or of the writer if there
    /// is no such process.
    pub(crate) fn decider_since(self, stand: &Stand) -> Result<Scheduled> {
        let now = CpuTime::now(stand)?;
        let writer = Scheduled {
            ran: now.writer - self.writer,
            waited: Duration::ZERO,
        };
        Ok(now.process_since(self).unwrap_or(writer))
    }

    /// Returns the difference of two readings; `None` if there is no such process. The time of a
    /// thread that ended in between is lost.
    fn process_since(self, before: Self) -> Option<Scheduled> {
        let (now, before) = self.process.zip(before.process)?;
        Some(Scheduled {
            ran: now.ran.saturating_sub(before.ran),
            waited: now.waited.saturating_sub(before.waited),
        })
    }
}
