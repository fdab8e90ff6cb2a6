use super::*;

#[test]
fn counts_at_its_frequency_and_wraps() {
    assert_eq!(ticks(Duration::ZERO), 0);
    assert_eq!(ticks(Duration::from_secs(1)), 3_579_545);
    assert_eq!(ticks(Duration::from_millis(10)), 35_795);
    // 2^32 ticks take 1199.86 s.
    assert_eq!(
        ticks(Duration::from_secs(1200)),
        (1200 * 3_579_545u64 - (1 << 32)) as u32
    );
}
