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
