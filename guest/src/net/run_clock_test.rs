use super::*;

const SECOND: u64 = 1_000_000_000;
const HOUR: u64 = 3600 * SECOND;

#[test]
fn hours_in_which_nothing_ran_are_skipped_once_for_all_cpus() {
    let stops = Stops::default();
    let clocks = [0, 1, 2].map(|_| RunClock::new(&stops, 0));
    let mut shown = 0;
    let mut now = 0;
    for round in 0..40 {
        // Each CPU looks at another time, and every tenth round there was a stop.
        now += SECOND / 2;
        if round % 10 == 9 {
            now += 5 * HOUR;
        }
        for at in [round, round + 1, round + 2] {
            now += SECOND / 10;
            let at_clock = clocks[at % 3].at(now);
            assert!(at_clock >= shown, "{at_clock} after {shown}");
            shown = at_clock;
        }
    }
    let ran = 40 * SECOND * 8 / 10;
    assert!((ran..=ran + 4 * STOP_NS).contains(&shown), "{shown}");
    assert_eq!(clocks[0].of_platform(shown), now);
}

#[test]
fn what_is_no_stop_is_not_skipped() {
    let stops = Stops::default();
    let clock = RunClock::new(&stops, 7);
    for now in [7, 8, SECOND, 4 * SECOND, 4 * SECOND, 6 * SECOND] {
        assert_eq!(clock.at(now), now);
    }
}

#[test]
fn a_clock_stands_still_where_another_cpu_alone_was_held_up() {
    let stops = Stops::default();
    let [held, running] = [0, 1].map(|_| RunClock::new(&stops, 0));
    assert_eq!(held.at(0), 0);
    let mut shown = 0;
    for half in 1..30 {
        let now = half * SECOND / 2;
        if now == 5 * SECOND {
            assert_eq!(held.at(now), STOP_NS);
        }
        let then = running.at(now);
        assert!(then >= shown, "{then} after {shown}");
        shown = then;
    }
    // What was skipped is skipped for both.
    let end = 29 * SECOND / 2;
    assert_eq!(shown, end - (5 * SECOND - STOP_NS));
    assert_eq!(held.of_platform(shown), end);
}

#[test]
fn a_time_that_was_read_before_anothers_stop_shows_no_time_before_the_start() {
    let stops = Stops::default();
    let [late, other] = [0, 1].map(|_| RunClock::new(&stops, SECOND));
    other.at(HOUR);
    assert_eq!(late.at(2 * SECOND), 0);
    assert_eq!(late.at(HOUR), other.at(HOUR));
}
