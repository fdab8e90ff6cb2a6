use super::*;

#[test]
fn what_was_blocked_for_the_loop_is_undone_and_no_more() {
    // The mask is this thread's.
    let before: SigSet = [Signal::SIGUSR2].into_iter().collect();
    before.thread_set_mask().unwrap();
    let _signals = signals(&[Signal::SIGQUIT]).unwrap();
    let blocked = SigSet::thread_get_mask().unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGPIPE, Signal::SIGQUIT] {
        assert!(blocked.contains(signal), "{signal}");
    }
    blocked_signals(&[Signal::SIGQUIT])
        .thread_unblock()
        .unwrap();
    assert_eq!(SigSet::thread_get_mask().unwrap(), before);
}

#[test]
fn a_poll_waits_for_what_is_left_of_a_millisecond_too() {
    let of = |ns| timeout_of(Duration::from_nanos(ns));
    assert_eq!(of(0), PollTimeout::ZERO);
    assert_eq!(of(1), PollTimeout::from(1u8));
    assert_eq!(of(1_000_000), PollTimeout::from(1u8));
    assert_eq!(of(1_000_001), PollTimeout::from(2u8));
    assert_eq!(timeout_of(Duration::MAX), PollTimeout::MAX);
}
