use super::*;

pub(super) const START_NS: u64 = 1_000_000_000_000;

pub(super) fn row(limits: &mut RateLimits, rates: VmRates) -> RateRef {
    // SAFETY: the tests keep it as long as they use the result.
    let row = unsafe { RateRef::new(limits) };
    row.set(rates);
    row
}

pub(super) fn tx(packets_per_second: u64, bytes_per_second: u64) -> VmRates {
    VmRates {
        tx: Rate {
            packets_per_second,
            bytes_per_second,
            ..Rate::default()
        },
        ..VmRates::default()
    }
}

pub(super) fn one(bytes: u64) -> Segments {
    Segments { packets: 1, bytes }
}

#[test]
fn a_burst_is_100_ms_of_the_rate_then_the_rate_holds() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(1_000, 0));
    let passes = |now_ns| row.take(Direction::Tx, one(60), now_ns).is_ok();
    let burst = (0..1_000).filter(|_| passes(START_NS)).count();
    assert_eq!(burst, 100);
    // What is ahead by less than the burst passes, so the next one does at once, then one a ms.
    assert!(!passes(START_NS));
    assert!(passes(START_NS + 1));
    assert!(!passes(START_NS + 1_000_000));
    assert!(passes(START_NS + 1_000_001));
    // Over ten seconds of trying a hundred times as often.
    let sent = (1..=1_000_001)
        .filter(|i| passes(START_NS + 1_000_000 + i * 10_000))
        .count();
    assert_eq!(sent, 10_000);
}

#[test]
fn bytes_are_paid_for_whatever_the_frames() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(0, 125_000_000));
    let gso = Segments {
        packets: 45,
        bytes: 67_000,
    };
    let sent: u64 = (0..100_000u64)
        .map(|i| START_NS + i * 10_000)
        .map(|now| {
            let what = if now % 20_000 == 0 { gso } else { one(1_500) };
            row.take(Direction::Tx, what, now)
                .map_or(0, |()| what.bytes)
        })
        .sum();
    // One second's, the burst's, and the last frame's.
    let least = 125_000_000 + 12_500_000;
    assert!((least..least + 70_000).contains(&sent), "{sent}");
}

#[test]
fn a_frame_larger_than_the_burst_passes_and_is_paid_for() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(0, 10_000));
    assert_eq!(row.take(Direction::Tx, one(65_000), START_NS), Ok(()));
    let over = Err(DropReason::ByteRate);
    assert_eq!(
        row.take(Direction::Tx, one(1), START_NS + 6_399_999_999),
        over
    );
    assert_eq!(
        row.take(Direction::Tx, one(1), START_NS + 6_400_000_001),
        Ok(())
    );
}

#[test]
fn what_one_limit_refuses_is_not_charged_to_the_other() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(1_000, 1_000));
    assert_eq!(row.take(Direction::Tx, one(1_000), START_NS), Ok(()));
    let paid = limits.tx.packets.paid_until_ns;
    for _ in 0..10 {
        let over = Err(DropReason::ByteRate);
        assert_eq!(row.take(Direction::Tx, one(1_000), START_NS), over);
    }
    assert_eq!(limits.tx.packets.paid_until_ns, paid);
}

#[test]
fn directions_and_units_without_a_limit_pass() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(1, 0));
    assert_eq!(row.take(Direction::Tx, one(60), START_NS), Ok(()));
    let over = Err(DropReason::PacketRate);
    assert_eq!(row.take(Direction::Tx, one(60), START_NS), over);
    for _ in 0..1_000 {
        assert_eq!(row.take(Direction::Rx, one(60_000), START_NS), Ok(()));
    }
    assert_eq!(limits.rx, DirectionLimits::default());
}

#[test]
fn setting_the_same_rates_again_forgives_nothing() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(1, 0));
    assert_eq!(row.get(), tx(1, 0));
    assert!(row.take(Direction::Tx, one(60), START_NS).is_ok());
    row.set(tx(1, 0));
    assert!(row.take(Direction::Tx, one(60), START_NS).is_err());
    row.set(tx(2, 0));
    assert!(row.take(Direction::Tx, one(60), START_NS).is_ok());
}

#[test]
fn what_is_given_back_after_new_rates_leaves_no_debt() {
    let mut limits = RateLimits::default();
    let row = row(&mut limits, tx(1_000, 0));
    let [packets, _] = row.limits(Direction::Tx);
    let charged = packets.take(1, START_NS, BURST_NS).unwrap();
    // New rates come between the charge and its return.
    row.set(tx(2_000, 0));
    packets.give_back(charged);
    let passes = |now_ns| row.take(Direction::Tx, one(60), now_ns).is_ok();
    let burst = (0..1_000).filter(|_| passes(START_NS)).count();
    assert_eq!(burst, 200);
    assert!(passes(START_NS + 500_001));
}
