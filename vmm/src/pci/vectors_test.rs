use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
};

use super::*;

fn taken(vectors: &Vectors, vector: u16) -> u64 {
    vectors.irqfd(vector).read().unwrap_or(0)
}

#[test]
fn held_is_pending_and_released_once() {
    let vectors = Vectors::new(2).unwrap();
    for _ in 0..3 {
        vectors.signal(1);
    }
    assert!(vectors.is_pending(1));
    assert!(!vectors.is_pending(0));
    assert_eq!(taken(&vectors, 1), 0);
    vectors.release(1);
    assert_eq!(taken(&vectors, 1), 1);
    assert!(!vectors.is_pending(1));
    vectors.release(1);
    assert_eq!(taken(&vectors, 1), 0);
    vectors.signal(1);
    assert_eq!(taken(&vectors, 1), 1);
    vectors.hold(1);
    vectors.signal(1);
    assert_eq!(taken(&vectors, 1), 0);
    vectors.forget(1);
    vectors.release(1);
    assert_eq!(taken(&vectors, 1), 0);
    assert_eq!(vectors.sent(1), 2);
}

#[test]
fn vectors_that_do_not_exist_are_left_alone() {
    let vectors = Vectors::new(1).unwrap();
    vectors.signal(1);
    vectors.signal(0xffff);
    assert!(!vectors.is_pending(0xffff));
    assert_eq!(vectors.sent(7), 0);
}

/// In each round, signals race with a vCPU that masks and unmasks. One signal is exactly one
/// interrupt, and several signals are at least one.
#[test]
fn no_signal_is_lost_or_doubled() {
    const ROUNDS: usize = 20_000;
    for signallers in [1_usize, 2] {
        let vectors = Vectors::new(1).unwrap();
        // Rounds that have begun, and threads that have finished theirs.
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let each_round = |act: &dyn Fn(usize)| {
            for round in 0..ROUNDS {
                while begun.load(SeqCst) <= round {
                    thread::yield_now();
                }
                act(round);
                done.fetch_add(1, SeqCst);
            }
        };
        thread::scope(|scope| {
            for _ in 0..signallers {
                scope.spawn(|| each_round(&|_| vectors.signal(0)));
            }
            scope.spawn(|| {
                each_round(&|round| {
                    for _ in 0..round % 4 {
                        vectors.hold(0);
                        vectors.release(0);
                    }
                });
            });
            for round in 0..ROUNDS {
                if round % 2 == 0 {
                    vectors.hold(0);
                }
                begun.store(round + 1, SeqCst);
                while done.load(SeqCst) < (round + 1) * (signallers + 1) {
                    thread::yield_now();
                }
                vectors.release(0);
                let interrupts = taken(&vectors, 0);
                assert!(
                    (1..=signallers as u64).contains(&interrupts),
                    "{interrupts} in {round}"
                );
                assert!(!vectors.is_pending(0));
            }
        });
    }
}
