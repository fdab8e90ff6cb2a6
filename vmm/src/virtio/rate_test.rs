use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn bucket(size: u64, one_time_burst: u64, refill: Duration) -> BucketConfig {
    BucketConfig {
        size,
        one_time_burst,
        refill,
    }
}

/// Returns the operations that pass a bucket until `end` when operations of these lengths are
/// always waiting, and whoever serves them sleeps until the bucket opens.
fn passed(config: BucketConfig, lengths: &[u64], end: Duration) -> (u64, u64) {
    let start = Instant::now();
    let mut bucket = Bucket::new(config, start);
    let (mut now, mut total, mut sleeps) = (start, 0, 0);
    for length in lengths.iter().cycle() {
        while let Some(until) = bucket.closed_until(now) {
            assert!(until > now, "a wait has an end in the future");
            now = until;
            sleeps += 1;
        }
        if now - start > end {
            break;
        }
        bucket.charge(*length);
        total += length;
    }
    (total, sleeps)
}

#[test]
fn the_burst_passes_at_once_and_then_the_rate_holds() {
    let now = Instant::now();
    let mut bucket = Bucket::new(bucket(10, 5, SECOND), now);
    for _ in 0..15 {
        assert_eq!(bucket.closed_until(now), None);
        bucket.charge(1);
    }
    assert_eq!(bucket.closed_until(now), Some(now + SECOND / 10));
    let later = now + SECOND / 10;
    assert_eq!(bucket.closed_until(later), None);
    bucket.charge(1);
    // The burst does not come back, however long nothing passes.
    let rested = later + 100 * SECOND;
    assert_eq!(bucket.tokens(rested), 10);
}

#[test]
fn an_operation_longer_than_the_bucket_passes_and_its_debt_is_paid_first() {
    let now = Instant::now();
    let mut bucket = Bucket::new(bucket(10, 0, SECOND), now);
    bucket.charge(35);
    assert_eq!(bucket.tokens(now), 0);
    // 25 of debt, and one to be open.
    assert_eq!(bucket.closed_until(now), Some(now + 26 * SECOND / 10));
    assert!(bucket.closed_until(now + 25 * SECOND / 10).is_some());
    assert_eq!(bucket.closed_until(now + 26 * SECOND / 10), None);
}

#[test]
fn a_limiter_is_open_while_both_buckets_are() {
    let now = Instant::now();
    let config = RateConfig {
        bytes: Some(bucket(1_000, 0, SECOND)),
        operations: Some(bucket(4, 0, SECOND)),
    };
    assert!(Limiter::new(RateConfig::default(), now).is_none());
    let mut limiter = Limiter::new(config, now).unwrap();
    assert_eq!(limiter.room(100, now), Ok(4));
    assert_eq!(limiter.room(400, now), Ok(2));
    assert_eq!(limiter.room(5_000, now), Ok(1));
    limiter.charge(100, 4);
    // Closed and no time to wait for would be a sleep without an end.
    assert_eq!(limiter.room(100, now), Err(now + SECOND / 4));
    assert_eq!(limiter.closed_until(now), Some(now + SECOND / 4));
    limiter.charge(1_900, 0);
    // The bytes are due later, and decide.
    assert_eq!(
        limiter.closed_until(now),
        Some(now + 1_001 * SECOND / 1_000)
    );
}

#[test]
fn a_clock_that_goes_back_brings_nothing() {
    let now = Instant::now();
    let mut bucket = Bucket::new(bucket(10, 0, SECOND), now + SECOND);
    bucket.charge(10);
    assert_eq!(bucket.tokens(now), 0);
    assert_eq!(bucket.tokens(now + SECOND), 0);
    assert_eq!(bucket.tokens(now + 2 * SECOND), 10);
}

proptest! {
    /// Never more than size, burst, rate and one operation; and, with something always waiting, never
    /// less than the rate.
    #[test]
    fn the_rate_is_held_from_above_and_below(
        size in 1_u64..1_000_000,
        burst in 0_u64..1_000_000,
        refill_ms in 1_u64..10_000,
        lengths in prop::collection::vec(1_u64..100_000, 1..20),
    ) {
        let refill = Duration::from_millis(refill_ms);
        // Some hundred operations, whatever the rate.
        let longest = *lengths.iter().max().unwrap();
        let end = refill * u32::try_from((200 * longest).div_ceil(size)).unwrap();
        let (total, _) = passed(bucket(size, burst, refill), &lengths, end);
        let by_rate = (u128::from(size) * end.as_nanos() / refill.as_nanos()) as u64;
        prop_assert!(total <= size + burst + by_rate + longest, "{total}");
        prop_assert!(total + 1 >= size + burst + by_rate, "{total} {by_rate}");
    }

    /// No settings and no amounts overflow or hang.
    #[test]
    fn whatever_is_asked_for_has_an_answer(
        size: u64, burst: u64, refill: u64, amounts: Vec<(u64, u64)>,
    ) {
        let mut now = Instant::now();
        let mut bucket = Bucket::new(bucket(size, burst, Duration::from_nanos(refill)), now);
        for (amount, passes) in amounts {
            bucket.charge(amount);
            if let Some(until) = bucket.closed_until(now) {
                prop_assert!(until > now);
            }
            now += Duration::from_nanos(passes >> 12);
            bucket.tokens(now);
        }
    }
}
