use super::*;

#[test]
fn a_poll_waits_for_what_is_left_of_a_millisecond_too() {
    let of = |ns| timeout_of(Duration::from_nanos(ns));
    assert_eq!(of(0), PollTimeout::ZERO);
    assert_eq!(of(1), PollTimeout::from(1u8));
    assert_eq!(of(1_000_000), PollTimeout::from(1u8));
    assert_eq!(of(1_000_001), PollTimeout::from(2u8));
    assert_eq!(timeout_of(Duration::MAX), PollTimeout::MAX);
}
