use std::{cell::Cell, io::Write as _, time::SystemTime};

use super::*;
use crate::poll::{Interest, Subsystem, Token};

/// Each reading is a microsecond after the one before.
#[derive(Default)]
struct Steps(Cell<u64>);

impl Clock for Steps {
    fn now_ns(&self) -> u64 {
        self.0.set(self.0.get() + 1_000);
        self.0.get()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
    }

    fn sleep_ns(&self, _: u64) {}
}

fn after(waits_ns: impl IntoIterator<Item = u64>) -> Looking {
    let mut looking = Looking::default();
    for waited_ns in waits_ns {
        // As `wait` does: a look is in vain if the event came behind it.
        let in_vain = looking.look_ns() > 0 && waited_ns > looking.look_ns();
        looking.waited(waited_ns, in_vain);
    }
    looking
}

#[test]
fn it_looks_while_events_are_near() {
    assert_eq!(after([]).look_ns(), 0);
    assert_eq!(after([10_000; 3]).look_ns(), 0);
    assert_eq!(after([10_000; 4]).look_ns(), LOOK_NS);
    assert_eq!(after([10_000; 1_000]).look_ns(), LOOK_NS);
}

#[test]
fn an_idle_guest_costs_no_look() {
    let dense = [10_000; 100];
    let idle = after(dense.into_iter().chain([FAR_NS]));
    assert_eq!(idle.look_ns(), 0, "one long sleep is enough");
    assert_eq!(after([200_000; 100]).look_ns(), 0);
}

#[test]
fn looks_in_vain_end() {
    let dense = [10_000; 100];
    let regular = dense.into_iter().chain([NEAR_NS + 1; 3]);
    assert_eq!(after(regular).look_ns(), 0, "three looks in vain");
    // Events that come just behind each look: at most one in three is looked for.
    let mut looking = after(dense);
    let mut looks = 0;
    for _ in 0..300 {
        let in_vain = looking.look_ns() > 0;
        looks += u32::from(in_vain);
        looking.waited(LOOK_NS + 1, in_vain);
    }
    assert!(looks <= 103, "{looks}");
}

#[test]
fn a_wait_looks_first_if_events_have_been_near_and_then_sleeps() {
    let mut poller = Poller::new().unwrap();
    let clock = Steps::default();
    let mut ready = Vec::new();
    // Readings of the clock in a wait: at its beginning, behind each look, and at its end.
    let mut readings = |looking: &mut Looking, timeout_ns| {
        let before = clock.0.get();
        let waited = looking.wait(&mut poller, &clock, timeout_ns, &mut ready, || false);
        waited.unwrap();
        (clock.0.get() - before) / 1_000
    };
    let looks = LOOK_NS / 1_000;
    assert_eq!(readings(&mut Looking::default(), Some(1)), 2, "no look");
    let dense = || Looking { near: MOST };
    // One more, behind what was put off, is no part of the look.
    assert_eq!(readings(&mut dense(), Some(1_000_000)), 3 + looks);
    assert_eq!(readings(&mut dense(), Some(5_000)), 3 + 5, "not longer");
    assert_eq!(readings(&mut dense(), Some(0)), 0, "it is not to wait");
    let mut in_vain = dense();
    readings(&mut in_vain, Some(1));
    assert_eq!(in_vain.near, MOST - 2);
}

#[test]
fn what_a_look_finds_ends_the_wait() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut poller = Poller::new().unwrap();
    let token = Token {
        subsystem: Subsystem::Port,
        key: 3,
    };
    poller.add(&reader, token, Interest::Read).unwrap();
    writer.write_all(b"x").unwrap();
    let (clock, mut ready) = (Steps::default(), Vec::new());
    let mut looking = Looking { near: DENSE };
    let is_called = Cell::new(false);
    let meanwhile = || {
        is_called.set(true);
        false
    };
    looking
        .wait(&mut poller, &clock, None, &mut ready, meanwhile)
        .unwrap();
    assert!(!is_called.get(), "there was something to do");
    let found: Vec<_> = ready.iter().map(|it| it.token).collect();
    assert_eq!((found, clock.0.get()), (vec![token], 2_000));
    assert_eq!(looking.near, DENSE + 1);
}

#[test]
fn what_was_put_off_is_done_before_a_sleep_and_behind_the_first_look() {
    let mut poller = Poller::new().unwrap();
    for (near, looks) in [(0, 0), (DENSE, 1)] {
        let clock = Steps::default();
        let mut called_ns = Vec::new();
        let meanwhile = || {
            called_ns.push(clock.0.get());
            false
        };
        let mut looking = Looking { near };
        looking
            .wait(&mut poller, &clock, Some(1), &mut Vec::new(), meanwhile)
            .unwrap();
        assert_eq!(called_ns, [1_000 + 1_000 * looks], "near {near}");
    }
}

#[test]
fn a_wait_ends_at_once_if_what_was_put_off_has_led_to_more() {
    let mut poller = Poller::new().unwrap();
    for near in [0, DENSE] {
        let (clock, mut ready) = (Steps::default(), Vec::new());
        let mut looking = Looking { near };
        looking
            .wait(&mut poller, &clock, None, &mut ready, || true)
            .unwrap();
        assert!(ready.is_empty());
    }
}
