use super::*;

fn bucket(size: u64, refill_ms: u64, one_time_burst: u64) -> Option<TokenBucket> {
    Some(TokenBucket {
        size,
        refill_ms,
        one_time_burst,
    })
}

#[test]
fn rates_are_read() {
    for (text, bytes, operations) in [
        ("bandwidth=10M", bucket(10 << 20, 1_000, 0), None),
        ("packets=500/100ms", None, bucket(500, 100, 0)),
        ("packets=7/s+9,bandwidth=1/2h+1G", None, bucket(7, 1_000, 9)),
    ] {
        let expected = RateLimit { bytes, operations };
        match direction("--net-rate-tx", text) {
            Ok(limit) => assert_eq!(limit, expected, "{text}"),
            // Two hours are too long.
            Err(e) => assert!(e.to_string().contains("1ms to 1h"), "{e}"),
        }
    }
    let both = direction("--net-rate-rx", "packets=7/s+9,bandwidth=1k/1m+1G").unwrap();
    assert_eq!(both.operations, bucket(7, 1_000, 9));
    assert_eq!(both.bytes, bucket(1_024, 60_000, 1 << 30));
}

#[test]
fn what_is_no_rate_is_refused_with_the_form() {
    for (text, part) in [
        ("10M", "neither bandwidth= nor packets="),
        ("iops=1", "neither bandwidth= nor packets="),
        ("bandwidth=", "it is no rate"),
        ("bandwidth=0", "it is no rate"),
        ("bandwidth=-1", "it is no rate"),
        ("packets=1M", "it is no rate"),
        ("packets=2T", "it is no rate"),
        ("bandwidth=99999999G", "it is no rate"),
        ("bandwidth=1/0ms", "1ms to 1h"),
        ("bandwidth=1/2h", "1ms to 1h"),
        ("bandwidth=1/10", "1ms to 1h"),
        ("bandwidth=1/1s+x", "its burst is no number"),
        ("packets=1,packets=2", "it is given twice"),
        ("packets=1,", "neither bandwidth= nor packets="),
    ] {
        let error = direction("--net-rate-tx", text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(error.contains("give "), "{text}: {error}");
    }
}
