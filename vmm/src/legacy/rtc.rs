//! The time of day, as a PC's battery-backed clock (MC146818) tells it: what Linux reads at its
//! start if it has no kvm-clock. The host's UTC, in BCD and 24 hours; it can't be set, and has
//! neither alarm nor interrupt.
use std::{
    sync::atomic::{AtomicU8, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

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

/// No update in progress, ever; the divider of a 32768 Hz crystal.
const RUNNING: u8 = 0x26;
/// Status B: 24 hours; DM clear is BCD.
const HOURS_24: u8 = 0x02;
/// Status D: the battery is good.
const VALID: u8 = 0x80;

/// The clock's index register; the rest is the host's.
#[derive(Default)]
pub(crate) struct Rtc {
    index: AtomicU8,
}

impl Rtc {
    /// Selects a register; bit 7 masks a PC's NMI, and is ignored.
    pub(crate) fn select(&self, index: u8) {
        self.index.store(index & 0x7f, Relaxed);
    }

    /// Reads the selected register; one that there is not reads as 0.
    pub(crate) fn read(&self) -> u8 {
        // A host whose clock stands before 1970 has other troubles.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        register(self.index.load(Relaxed), now.map_or(0, |now| now.as_secs()))
    }
}

/// A register at so many seconds after 1970 began.
fn register(index: u8, unix_seconds: u64) -> u8 {
    let days = unix_seconds / 86_400;
    let second = unix_seconds % 86_400;
    let (year, month, day) = date(days);
    let value = match index {
        SECONDS => second % 60,
        MINUTES => second / 60 % 60,
        HOURS => second / 3600,
        // 1 is Sunday; 1970 began on a Thursday.
        DAY_OF_WEEK => (days + 4) % 7 + 1,
        DAY => day,
        MONTH => month,
        YEAR => year % 100,
        CENTURY => year / 100 % 100,
        STATUS_A => return RUNNING,
        STATUS_B => return HOURS_24,
        STATUS_D => return VALID,
        _ => return 0,
    };
    (value / 10 * 16 + value % 10) as u8
}

/// Year, month and day of a day counted from 1 January 1970. Years are taken to begin in March, so
/// that the leap day is the last; 400 of them have 146,097 days.
fn date(days: u64) -> (u64, u64, u64) {
    let from_march_of_0 = days + 719_468;
    let era = from_march_of_0 / 146_097;
    let day_of_era = from_march_of_0 % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
#[path = "rtc_test.rs"]
mod tests;
