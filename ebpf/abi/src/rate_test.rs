use super::*;

const START_NS: u64 = 1_000_000_000_000;

fn row(limits: &mut RateLimits, rates: VmRates) -> RateRef {
    // SAFETY: the tests keep it as long as they use the result.
    let row = unsafe { RateRef::new(limits) };
    row.set(rates);
    row
}

fn tx(packets_per_second: u64, bytes_per_second: u64) -> VmRates {
    VmRates {
        tx: Rate {
            packets_per_second,
            bytes_per_second,
            ..Rate::default()
        },
        ..VmRates::default()
    }
}

fn one(bytes: u64) -> Segments {
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

/// The queue of a pacer: frames go in order, none before the tokens are not negative.
struct Htb {
    rate: u64,
    tokens_ns: i64,
    at_ns: u64,
}

impl Htb {
    /// Returns when a frame that comes at this time leaves.
    fn leaves_ns(&mut self, segments: Segments, now_ns: u64) -> u64 {
        let now_ns = now_ns.max(self.at_ns);
        let earned = self.tokens_ns + (now_ns - self.at_ns) as i64;
        let tokens_ns = earned.min(PACED_BURST_NS as i64);
        let waits_ns = (-tokens_ns).max(0);
        let frames = segments.bytes + ETHERNET_BYTES * segments.packets;
        let cost_ns = frames * SECOND_NS / self.rate;
        self.tokens_ns = tokens_ns + waits_ns - cost_ns as i64;
        self.at_ns = now_ns + waits_ns as u64;
        self.at_ns
    }
}

/// Whatever the sizes, a frame that the limit lets pass waits in the queue for no longer than the
/// limit says, so the queue has room for all.
#[test]
fn what_passes_waits_no_longer_than_the_limit_allows() {
    for rate in [1_250_000, 12_500_000, 125_000_000] {
        for sizes in [[1_500, 1_500], [100, 60], [1_500, 65_160], [590, 64_000]] {
            let mut limits = RateLimits::default();
            let row = row(&mut limits, tx(0, rate));
            row.set_pacer(Direction::Tx, 7);
            assert_eq!(row.pacer(Direction::Tx), 7);
            let mut queue = Htb {
                rate: pacer_rate(rate),
                tokens_ns: PACED_BURST_NS as i64,
                at_ns: START_NS,
            };
            let most_ns = paced_ahead_ns(rate) - PACED_BURST_NS;
            let (mut passed, mut refused, mut waited_ns) = (0, 0, 0);
            // Offered at four times the rate.
            let mut now_ns = START_NS;
            let until_ns = START_NS + 5 * paced_ahead_ns(rate);
            for i in 0.. {
                if now_ns > until_ns {
                    break;
                }
                let bytes: u64 = sizes[i % 2];
                let segments = Segments {
                    packets: bytes.div_ceil(1_500),
                    bytes,
                };
                now_ns += bytes * SECOND_NS / rate / 4;
                match row.take(Direction::Tx, segments, now_ns) {
                    Ok(()) => {
                        passed += bytes;
                        let waits_ns = queue.leaves_ns(segments, now_ns) - now_ns;
                        assert!(waits_ns <= most_ns, "{waits_ns} of {most_ns} ns");
                        waited_ns = waits_ns.max(waited_ns);
                    }
                    Err(reason) => {
                        assert_eq!(reason, DropReason::ByteRate);
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0);
            // It is used.
            assert!(waited_ns > most_ns / 2, "{waited_ns} of {most_ns} ns");
            let allowed = (now_ns - START_NS + paced_ahead_ns(rate)) as u128 * u128::from(rate)
                / u128::from(SECOND_NS);
            assert!(
                u128::from(passed) <= allowed + 65_160,
                "{passed} of {allowed}"
            );
            if sizes == [1_500, 1_500] {
                assert!(
                    u128::from(passed) * 100 >= allowed * 97,
                    "{passed} of {allowed}"
                );
            }
        }
    }
}

fn budget(bytes: u64, at_end: AtEnd) -> VmRates {
    VmRates {
        tx: Rate {
            budget_bytes: bytes,
            ..Rate::default()
        },
        budget: Budget {
            per_day: false,
            at_end,
        },
        ..VmRates::default()
    }
}

#[test]
fn a_budget_ends_with_the_packet_that_exhausts_it() {
    for at_end in AtEnd::ALL {
        let mut limits = RateLimits::default();
        let row = row(&mut limits, budget(10_000, at_end));
        assert!(budget(10_000, at_end).is_limited());
        let mut sent = 0;
        for _ in 0..20 {
            sent += row
                .take(Direction::Tx, one(1_500), START_NS)
                .map_or(0, |()| 1_500);
        }
        let least = if at_end == AtEnd::Refuse {
            30_000
        } else {
            10_500
        };
        assert_eq!(sent, least, "{at_end:?}");
        assert_eq!(row.budget(Direction::Tx), Some((10_000, least)));
        assert!(row.is_spent(Direction::Tx) && !row.is_spent(Direction::Rx));
        let looks = row.look(Direction::Tx, START_NS);
        assert_eq!(looks.is_ok(), at_end == AtEnd::Refuse);
        // The other direction has none.
        assert_eq!(row.take(Direction::Rx, one(1_500), START_NS), Ok(()));
        // More of it: what was used stays.
        row.set(budget(12_000, at_end));
        assert_eq!(row.budget(Direction::Tx), Some((12_000, least)));
        assert_eq!(row.get(), budget(12_000, at_end));
    }
}

#[test]
fn what_a_rate_refuses_uses_no_budget() {
    let mut limits = RateLimits::default();
    let mut rates = budget(1_000_000, AtEnd::Cut);
    rates.tx.bytes_per_second = 10_000;
    let row = row(&mut limits, rates);
    let passed = (0..100).filter(|_| row.take(Direction::Tx, one(100), START_NS).is_ok());
    let passed = passed.count() as u64 * 100;
    assert_eq!(row.budget(Direction::Tx), Some((1_000_000, passed)));
    assert_eq!(passed, 1_000);
}

#[test]
fn a_budget_that_becomes_a_days_charges_nothing_that_passed_before() {
    let mut limits = RateLimits::default();
    let of = |budget_bytes, per_day| VmRates {
        tx: Rate {
            budget_bytes,
            ..Rate::default()
        },
        budget: Budget {
            per_day,
            at_end: AtEnd::Freeze,
        },
        ..VmRates::default()
    };
    let row = row(&mut limits, of(100, false));
    let used = row.used(Direction::Tx);
    let bits = row.budget_bits(Direction::Tx);
    let set = |bit| store32(bits, load32(bits) | bit);
    store64(used, 90);
    row.set(of(200, false));
    assert_eq!(load64(used), 90, "in all as before");
    row.set(of(200, true));
    assert_eq!(load64(used), 0);
    store64(used, 40);
    row.set(of(300, true));
    assert_eq!(load64(used), 40, "the same day's");
    // Taken away and given again on the same day; its end is another one.
    set(20_000 | BudgetBits::TOLD | BudgetBits::CUT_DUE | BudgetBits::FROZE);
    row.set(of(0, false));
    assert_eq!(load32(bits), 20_000 | BudgetBits::FROZE);
    row.set(of(300, true));
    assert_eq!(load64(used), 40);
    // One in all was taken away.
    store32(bits, 0);
    row.set(of(0, false));
    row.set(of(300, true));
    assert_eq!(load64(used), 0);
}
