use super::*;

#[test]
fn a_guest_that_resets_itself_again_and_again_is_delayed_and_then_ends() {
    let mut recent = Recent::default();
    let begin = Instant::now();
    let minute = Duration::from_secs(60);
    // One a minute is never delayed.
    for number in 0..20 {
        assert_eq!(recent.add(begin + minute * number), Ok(Duration::ZERO));
    }
    let later = begin + minute * 30;
    let mut delays = Vec::new();
    let ended = loop {
        match recent.add(later) {
            Ok(delay) => delays.push(delay),
            Err(times) => break times,
        }
    };
    assert_eq!(ended, BACK_OFF.len() + 1);
    assert_eq!(delays, BACK_OFF);
    assert!(delays.is_sorted());
    // Those that are over count no more.
    assert_eq!(recent.add(later + minute), Ok(Duration::ZERO));
}

#[test]
fn a_reset_during_a_reset_is_nonsense_and_one_that_nobody_serves_goes_not_on() {
    let mut resets = Resets::default();
    assert!(!resets.begin().unwrap());
    assert_eq!(resets.done(), None);
    resets.served_by(Path::new("/nowhere"), "a");
    assert!(resets.begin().unwrap());
    assert!(resets.fd().is_some() && resets.done().is_none());
    assert!(resets.begin().is_err());
}
