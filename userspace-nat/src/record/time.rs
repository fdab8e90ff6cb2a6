//! Times as records have them.
use std::time::SystemTime;

use serde::Serialize;

/// A time as RFC 3339 has it, UTC, to the millisecond.
#[derive(Clone, Copy, Debug)]
pub struct Rfc3339(pub SystemTime);

/// `2026-01-31T12:00:00.000Z`
const LEN: usize = 24;

impl Rfc3339 {
    fn digits(self) -> [u8; LEN] {
        let since = self.0.duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        let (year, month, day) = civil_from_days(days);
        let mut text = *b"0000-00-00T00:00:00.000Z";
        let mut put = |at: usize, digits: usize, mut value: u64| {
            for place in text[at..at + digits].iter_mut().rev() {
                *place = b'0' + (value % 10) as u8;
                value /= 10;
            }
        };
        put(0, 4, year);
        put(5, 2, month);
        put(8, 2, day);
        put(11, 2, second / 3_600);
        put(14, 2, second / 60 % 60);
        put(17, 2, second % 60);
        put(20, 3, u64::from(since.subsec_millis()));
        text
    }
}

impl std::fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(str::from_utf8(&self.digits()).unwrap_or_default())
    }
}

impl Serialize for Rfc3339 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(str::from_utf8(&self.digits()).unwrap_or_default())
    }
}

/// Year, month and day of a day since 1970-01-01 (Howard Hinnant, "chrono-compatible low-level
/// date algorithms").
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let mp = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}
