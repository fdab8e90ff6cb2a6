use super::*;

#[test]
fn buckets_are_in_order_and_hold_their_middle() {
    let mut last = 0;
    for exponent in 0..LONGEST_LOG2 {
        for offset in [0u64, 1, 3] {
            let ns = (1u64 << exponent) + (offset << exponent) / 4;
            let bucket = bucket_of(ns);
            assert!(bucket >= last, "{ns}");
            last = bucket;
            let middle = middle_of(bucket);
            assert_eq!(bucket_of(middle), bucket, "{ns}");
            assert!(middle.abs_diff(ns) <= ns / PARTS, "{ns} {middle}");
        }
    }
    assert!(bucket_of(u64::MAX) < BUCKETS);
}

#[test]
fn quantiles_of_a_known_spread() {
    let (mut even, mut odd) = (Histogram::default(), Histogram::default());
    for us in 1..=1000u64 {
        if us % 2 == 0 { &mut even } else { &mut odd }.record(us * 1000);
    }
    even.merge(&odd);
    assert_eq!(
        (even.count(), even.min_ns(), even.max_ns()),
        (1000, 1000, 1_000_000)
    );
    assert_eq!(even.mean_ns(), 500_500);
    for (per_mille, due) in [
        (500, 500_000u64),
        (990, 990_000),
        (1000, 1_000_000),
        (0, 1000),
    ] {
        let got = even.quantile_ns(per_mille);
        assert!(got.abs_diff(due) <= due / PARTS, "{per_mille}: {got}");
    }
}

#[test]
fn nothing_counted_is_zero() {
    let none = Histogram::default();
    assert_eq!(
        (
            none.min_ns(),
            none.max_ns(),
            none.mean_ns(),
            none.quantile_ns(500)
        ),
        (0, 0, 0, 0)
    );
}
