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
    let mut resets = Resets::new(true);
    assert!(!resets.begin(None).unwrap());
    assert_eq!(resets.done(), None);
    let mut resets = Resets::new(true);
    resets.served_by(Path::new("/nowhere"), "a");
    assert!(resets.begin(None).unwrap());
    assert!(resets.fd().is_some() && resets.done().is_none());
    assert!(resets.begin(None).is_err());
}

#[test]
fn a_machine_that_may_not_begin_anew_ends_no_flows() {
    let mut resets = Resets::new(false);
    resets.served_by(Path::new("/nowhere"), "a");
    assert!(resets.begin(None).is_err());
    assert!(resets.fd().is_none() && resets.recent.0.is_empty());
}

#[test]
fn a_machine_that_was_told_its_end_is_not_heard_again() {
    let mut resets = Resets::new(true);
    resets.served_by(Path::new("/nowhere"), "a");
    for _ in &BACK_OFF {
        resets.recent.add(Instant::now()).unwrap();
    }
    assert!(!resets.begin(None).unwrap());
    for _ in 0..3 {
        assert!(resets.begin(None).is_err());
    }
    assert_eq!(resets.recent.0.len(), BACK_OFF.len() + 1);

    // Nor one whose flows could not be ended.
    let mut resets = Resets::new(true);
    let (ours, theirs) = UnixStream::pair().unwrap();
    resets.under_way = Some(UnderWay {
        said: ours,
        report: None,
    });
    drop(theirs);
    assert_eq!(resets.done(), Some(false));
    assert!(resets.begin(None).is_err());
}

#[test]
fn a_daemon_that_does_not_answer_holds_the_machine_no_longer_than_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(!end_flows_within(&socket, "a", Duration::from_millis(50)));
}
