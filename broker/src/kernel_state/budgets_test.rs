use slipgate_abi::{Budget, Rate, RateLimits, VmRates};

use super::*;

#[test]
fn a_day_begins_with_nothing_used_and_the_first_look_forgets_nothing() {
    let mut row = RateLimits::default();
    // SAFETY: it lives as long as the test.
    let limits = unsafe { RateRef::new(&raw mut row) };
    let day = |per_day| VmRates {
        tx: Rate {
            budget_bytes: 100,
            ..Rate::default()
        },
        budget: Budget {
            per_day,
            at_end: AtEnd::Freeze,
        },
        ..VmRates::default()
    };
    limits.set(day(true));
    limits.used(Direction::Tx).store(70, Relaxed);
    begin_day(limits, Direction::Tx, 20_000);
    assert_eq!(limits.budget(Direction::Tx), Some((100, 70)));
    begin_day(limits, Direction::Tx, 20_000);
    assert_eq!(limits.budget(Direction::Tx), Some((100, 70)));
    begin_day(limits, Direction::Tx, 20_001);
    assert_eq!(limits.budget(Direction::Tx), Some((100, 0)));
    // In all from now on: what was used stays.
    limits.used(Direction::Tx).store(30, Relaxed);
    limits.set(day(false));
    begin_day(limits, Direction::Tx, 20_002);
    begin_day(limits, Direction::Tx, 20_003);
    assert_eq!(limits.budget(Direction::Tx), Some((100, 30)));
    assert_eq!(limits.get(), day(false), "the terms are kept");
}
