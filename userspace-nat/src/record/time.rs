//! Times in the form that records use.
use std::time::SystemTime;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

/// A time in the form of RFC 3339, UTC, to the millisecond: `2026-01-31T12:00:00.000Z`.
#[derive(Clone, Copy, Debug)]
pub struct Rfc3339(pub SystemTime);

impl std::fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A clock before 1970 or after the year 9999 is not set.
        let since = self.0.duration_since(SystemTime::UNIX_EPOCH);
        let time = SignedDuration::try_from(since.unwrap_or_default())
            .and_then(Timestamp::from_duration)
            .unwrap_or(Timestamp::UNIX_EPOCH);
        write!(f, "{time:.3}")
    }
}

impl Serialize for Rfc3339 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
