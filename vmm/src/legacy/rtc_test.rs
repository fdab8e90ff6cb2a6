use super::*;

/// Returns century, year, month, day, day of week, hours, minutes and seconds. BCD reads as hex.
fn clock(unix_seconds: u64) -> [u8; 8] {
    [
        CENTURY,
        YEAR,
        MONTH,
        DAY,
        DAY_OF_WEEK,
        HOURS,
        MINUTES,
        SECONDS,
    ]
    .map(|index| register(index, unix_seconds))
}

#[test]
fn tells_the_time_in_bcd() {
    assert_eq!(clock(0), [0x19, 0x70, 0x01, 0x01, 5, 0, 0, 0]);
    // 2024-02-29 23:59:58, a Thursday, then the day after.
    assert_eq!(
        clock(1_709_251_198),
        [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58]
    );
    assert_eq!(clock(1_709_251_200), [0x20, 0x24, 0x03, 0x01, 6, 0, 0, 0]);
    // 2099-12-31 12:34:56, a Thursday.
    assert_eq!(
        clock(4_102_403_696),
        [0x20, 0x99, 0x12, 0x31, 5, 0x12, 0x34, 0x56]
    );
}

/// Returns year, month and day from the registers, for a day counted from 1 January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let read = |index| {
        let bcd = u64::from(register(index, days * 86_400));
        bcd / 16 * 10 + bcd % 16
    };
    (read(CENTURY) * 100 + read(YEAR), read(MONTH), read(DAY))
}

#[test]
fn every_day_follows_the_one_before() {
    let mut last = date(0);
    for day in 1..150_000 {
        let next = date(day);
        let (year, month, date) = next;
        assert!((1..=12).contains(&month) && (1..=31).contains(&date));
        let follows = next == (last.0, last.1, last.2 + 1)
            || next == (last.0, last.1 + 1, 1)
            || next == (last.0 + 1, 1, 1) && last.1 == 12;
        assert!(follows, "{last:?} then {year}-{month}-{date}");
        last = next;
    }
}

#[test]
fn behind_the_year_9999_the_clock_stands_still() {
    let last = clock(253_402_207_200);
    assert_eq!(last[..2], [0x99, 0x99]);
    assert_eq!(clock(u64::MAX), last);
}

#[test]
fn a_driver_finds_a_clock_that_runs() {
    let rtc = Rtc::default();
    rtc.select(STATUS_A | 0x80);
    assert_eq!(rtc.read() & 0x80, 0, "an update in progress");
    rtc.select(STATUS_B);
    assert_eq!(rtc.read(), HOURS_24);
    rtc.select(STATUS_D);
    assert_eq!(rtc.read(), VALID);
    rtc.select(0x7f);
    assert_eq!(rtc.read(), 0);
}
