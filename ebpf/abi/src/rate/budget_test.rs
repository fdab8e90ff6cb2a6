use super::{
    super::{
        Rate, RateLimits, VmRates,
        tests::{START_NS, one, row},
    },
    *,
};

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
