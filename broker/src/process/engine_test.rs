use super::*;

#[test]
fn it_is_started_again_at_once_then_later_and_given_up_when_it_ends_too_often() {
    let mut ends = Ends::default();
    let begin = Instant::now();
    let waits: Vec<_> = (0..BACK_OFF.len())
        .map(|_| ends.add(begin).unwrap() - begin)
        .collect();
    assert_eq!(waits, BACK_OFF);
    assert_eq!(ends.add(begin), Err(BACK_OFF.len() + 1));
    // A minute later that is forgotten.
    let later = begin + ENDS_COUNT_FOR;
    assert_eq!(ends.add(later), Ok(later));
    let much_later = later + ENDS_COUNT_FOR / 2;
    assert_eq!(ends.add(much_later), Ok(much_later + BACK_OFF[1]));
}

/// One of its guests may be the cause, and the others want an engine.
#[test]
fn a_daemons_engine_is_started_again_however_often_it_ends() {
    let mut ends = Ends {
        never_too_many: true,
        ..Ends::default()
    };
    let begin = Instant::now();
    let waits: Vec<_> = (0..100).map(|_| ends.add(begin).unwrap() - begin).collect();
    assert_eq!(waits[..3], BACK_OFF[..3]);
    assert!(waits[3..].iter().all(|wait| *wait == BACK_OFF_OF_DAEMON));
    let later = begin + ENDS_COUNT_FOR;
    assert_eq!(ends.add(later), Ok(later));
}

#[test]
fn one_that_answers_is_asked_again_and_one_that_does_not_hangs() {
    let mut watch = Watch::new(SILENT_LOOKS);
    let begin = Instant::now() + LOOK_EVERY;
    for round in 0..100 {
        let now = begin + 2 * round * LOOK_EVERY;
        let asked = watch.look(now).expect("a question");
        assert_eq!(watch.look(now), None, "not yet");
        // Another question's is no answer.
        watch.answered(asked + 1);
        assert_eq!(watch.look(now + LOOK_EVERY), None, "it has one already");
        watch.answered(asked);
        assert_eq!(watch.hangs(), None);
    }
    let begin = begin + 200 * LOOK_EVERY;
    assert!(watch.look(begin).is_some());
    for look in 1..SILENT_LOOKS {
        watch.look(begin + look * LOOK_EVERY);
        assert_eq!(watch.hangs(), None, "look {look}");
    }
    watch.look(begin + SILENT_LOOKS * LOOK_EVERY);
    assert_eq!(watch.hangs(), Some(SILENT_LOOKS * LOOK_EVERY));
}

/// A machine that slept, or a frozen cgroup: the broker is late itself.
#[test]
fn time_in_which_the_broker_did_not_look_does_not_count() {
    let mut watch = Watch::new(SILENT_LOOKS);
    let begin = Instant::now() + LOOK_EVERY;
    assert!(watch.look(begin).is_some());
    watch.look(begin + Duration::from_secs(3_600));
    assert_eq!(watch.hangs(), None);
}
