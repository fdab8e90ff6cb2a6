use std::{
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use super::*;

/// Turns that only the calling test uses.
fn turns() -> &'static Turns {
    Box::leak(Box::new(Turns::new()))
}

/// Waits until so many tests want to be alone.
fn await_wanted(turns: &Turns, number: usize) {
    while turns.state().want_alone != number {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_that_is_alone_waits_for_all_others_and_none_begins_before_it_has_ended() {
    let turns = turns();
    let first = turns.shared("first");
    let second = turns.shared("second");
    let (is_alone, shared_later) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let (end, ends) = mpsc::channel::<()>();
        let (is_alone, shared_later) = (&is_alone, &shared_later);
        scope.spawn(move || {
            let turn = turns.alone("alone");
            is_alone.store(true, SeqCst);
            ends.recv().unwrap();
            assert!(!shared_later.load(SeqCst));
            is_alone.store(false, SeqCst);
            drop(turn);
        });
        await_wanted(turns, 1);
        let later = scope.spawn(move || {
            let turn = turns.shared("later");
            shared_later.store(true, SeqCst);
            assert!(!is_alone.load(SeqCst));
            drop(turn);
        });
        // One that has its turn may have it twice, whoever waits.
        drop(turns.shared("first"));
        drop(first);
        assert!(!is_alone.load(SeqCst) && !later.is_finished());
        drop(second);
        while !is_alone.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!shared_later.load(SeqCst));
        // In a test that is alone a world takes no turn of its own.
        drop(turns.shared("alone"));
        assert!(turns.state().is_alone);
        end.send(()).unwrap();
        later.join().unwrap();
    });
    let state = turns.state();
    assert_eq!((state.sharing, state.is_alone), (0, false));
}

#[test]
fn several_that_are_alone_follow_one_another() {
    let turns = turns();
    let running = AtomicUsize::new(0);
    thread::scope(|scope| {
        for test in ["one", "two", "three", "four"] {
            let running = &running;
            scope.spawn(move || {
                for _ in 0..20 {
                    let turn = turns.alone(test);
                    assert_eq!(running.fetch_add(1, SeqCst), 0);
                    thread::yield_now();
                    running.fetch_sub(1, SeqCst);
                    drop(turn);
                }
            });
        }
    });
}

#[test]
#[should_panic(expected = "late: take the turn before the first world")]
fn who_has_a_world_cannot_be_alone() {
    let turns = turns();
    let _world = turns.shared("late");
    let _alone = turns.alone("late");
}
