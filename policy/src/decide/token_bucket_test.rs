use proptest::prelude::*;

use super::*;

#[test]
fn burst_then_rate() {
    let mut bucket = TokenBucket::new(10, 5);
    let now = 1_000 * SECOND_NS;
    assert!(bucket.has(now) && bucket.has(now));
    assert_eq!((0..100).filter(|_| bucket.take(now)).count(), 5);
    assert!(!bucket.take(now + SECOND_NS / 10 - 1));
    assert!(!bucket.has(now) && bucket.has(now + SECOND_NS / 10));
    assert!(bucket.take(now + SECOND_NS / 10));
    assert_eq!(
        (0..100)
            .filter(|_| bucket.take(now + 3_600 * SECOND_NS))
            .count(),
        5
    );
}

#[test]
fn a_rate_of_zero_lets_nothing_through() {
    let mut bucket = TokenBucket::new(0, 5);
    assert!(!bucket.take(0));
    assert!(!bucket.take(u64::MAX));
}

proptest! {
    /// However the takes are spread, no window lets through more than burst + rate × its length.
    #[test]
    fn never_over_the_rate(rate in 1u32..10_000, burst in 1u32..100, steps in prop::collection::vec(0u64..50_000_000, 1..300)) {
        let mut bucket = TokenBucket::new(rate, burst);
        let mut now = 5 * SECOND_NS;
        let begin = now;
        let mut taken = 0u64;
        for step in steps {
            now += step;
            taken += u64::from(bucket.take(now));
            let allowed = u64::from(burst) + (now - begin) / (SECOND_NS / u64::from(rate)) + 1;
            prop_assert!(taken <= allowed);
        }
    }
}
