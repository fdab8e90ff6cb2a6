//! The real-time clock of a PC (MC146818), which Linux reads at its start if it has no kvm-clock.
//! It gives the host's UTC, in BCD and 24 hours. It can't be set, and has neither alarm nor
//! interrupt.
use std::{
    sync::atomic::{AtomicU8, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

use jiff::{Timestamp, tz::Offset};

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;

/// Status A: no update in progress, ever; the divider of a 32768 Hz crystal.
const RUNNING: u8 = 0x26;
/// Status B: 24 hours. DM is clear: BCD.
const HOURS_24: u8 = 0x02;
/// Status D: the battery is good.
const VALID: u8 = 0x80;

/// Real-time clock. Its index register is its only state; the time is the host's.
#[derive(Default)]
pub(crate) struct Rtc {
    index: AtomicU8,
}

impl Rtc {
    /// Returns the index register.
    pub(crate) fn index(&self) -> u8 {
        self.index.load(Relaxed)
    }

    /// Selects a register. Bit 7, which masks the NMI on a PC, is ignored.
    pub(crate) fn select(&self, index: u8) {
        self.index.store(index & 0x7f, Relaxed);
    }

    /// Reads the selected register. One that does not exist reads as 0.
    pub(crate) fn read(&self) -> u8 {
        // A host clock before 1970 reads as 1970.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        register(self.index.load(Relaxed), now.map_or(0, |now| now.as_secs()))
    }
}

/// Returns a register's value at `unix_seconds` after the start of 1970.
fn register(index: u8, unix_seconds: u64) -> u8 {
    // The calendar ends with the year 9999, and the clock stands still then.
    let seconds = i64::try_from(unix_seconds).unwrap_or(i64::MAX);
    let now = Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
    let now = Offset::UTC.to_datetime(now);
    let value = match index {
        SECONDS => now.second(),
        MINUTES => now.minute(),
        HOURS => now.hour(),
        // 1 is Sunday.
        DAY_OF_WEEK => now.weekday().to_sunday_one_offset(),
        DAY => now.day(),
        MONTH => now.month(),
        // Year and century have two digits each.
        YEAR => (now.year() % 100) as i8,
        CENTURY => (now.year() / 100) as i8,
        STATUS_A => return RUNNING,
        STATUS_B => return HOURS_24,
        STATUS_D => return VALID,
        _ => return 0,
    };
    // Of two digits at most, and never negative.
    let value = value as u8;
    value / 10 * 16 + value % 10
}

#[cfg(test)]
#[path = "rtc_test.rs"]
mod tests;
