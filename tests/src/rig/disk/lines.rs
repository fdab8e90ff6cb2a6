//! What the guest says on its console: one line of JSON each.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::case::DiskCase;

/// A line of the guest's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "disk", rename_all = "snake_case")]
pub enum DiskLine {
    /// The requests of a case that are not counted are over: the guest rests, then come those that are.
    Ready {
        /// Number of the case.
        case: usize,
        /// What the guest's kernel reads the time from.
        clock: String,
    },
    /// A case is over, and the guest rests.
    Figures(DiskFigures),
    /// The work could not be done, and the guest ends.
    Failed {
        /// What was tried, and what happened.
        why: String,
    },
}

/// Figures of a case, of the requests that are counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// Number of the case.
    pub case: usize,
    /// What was done.
    #[serde(flatten)]
    pub what: DiskCase,
    /// Number of requests, without flushes.
    pub requests: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// From the first request's beginning to the last one's end, µs.
    pub took_us: f64,
    /// Median of the requests' times, µs.
    pub p50_us: f64,
    /// Time that 99 of 100 requests were below, µs.
    pub p99_us: f64,
}

impl DiskLine {
    /// What each line of this kind has, to be waited for.
    pub const PART: &str = "{\"disk\":";

    /// Reads a line of the console; `None` if it is another one.
    pub fn read(line: &str) -> Option<Self> {
        // The kernel may have written on the same line.
        let at = line.find(Self::PART)?;
        let mut values = serde_json::Deserializer::from_str(&line[at..]).into_iter();
        values.next()?.ok()
    }
}

/// The line.
impl fmt::Display for DiskLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = serde_json::to_string(self).map_err(|_| fmt::Error)?;
        f.write_str(&json)
    }
}

#[cfg(test)]
#[path = "lines_test.rs"]
mod tests;
