//! Tests of one binary run side by side, each in namespaces of its own; some run alone.
//!
//! # Theory of operation
//! libtest runs as many tests at once as it has threads (`--test-threads`). What a test shares with
//! others is the machine: its CPUs, the kernel's memory, what the host has once (`/run/slipgate`, the
//! numbers of users). A test that measures a rate, counts on being woken within milliseconds, or
//! changes something of the host begins with [`alone`] and says why. It then waits for the tests that
//! run, and none begins until it ends.
//!
//! Every other test takes part in the common turn with its first [`World`](crate::World), and leaves it
//! with its last. There is nothing to write for that. Tests are told apart by the name of their thread,
//! which libtest sets and [`NetNs::run`](crate::NetNs::run) passes on. A thread without a name is part
//! of a test that has its turn, and takes none of its own: it would wait for a test that waits for it.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
};

/// A turn of a test; others can begin when all its copies are dropped.
#[derive(Clone, Debug)]
#[must_use = "the turn ends when it is dropped"]
pub struct Turn {
    _held: Option<Arc<Held>>,
}

/// Waits until no other test of this process has a world, and keeps others from making one while the
/// turn is held. `why` the test can't run beside others is for the reader.
///
/// # Panics
/// If the test has a world already: two that wait for each other's end would wait for ever.
pub fn alone(why: &str) -> Turn {
    assert!(!why.is_empty(), "a test that runs alone says why");
    TURNS.alone(&test_name().unwrap_or_default())
}

/// Takes part in the common turn, unless this test has a turn or is a thread without a name.
pub(crate) fn shared() -> Turn {
    match test_name() {
        Some(test) => TURNS.shared(&test),
        None => Turn { _held: None },
    }
}

fn test_name() -> Option<String> {
    thread::current().name().map(str::to_owned)
}

static TURNS: Turns = Turns::new();

/// Who has a turn, and who waits.
#[derive(Debug)]
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Turns that are held, by the test's name.
    held: Option<HashMap<String, Weak<Held>>>,
    /// Number of tests in the common turn.
    sharing: usize,
    is_alone: bool,
    /// Number of tests that wait to be alone. No other test begins meanwhile, or they might wait until
    /// the last has ended.
    want_alone: usize,
}

#[derive(Debug)]
struct Held {
    turns: &'static Turns,
    is_alone: bool,
}

impl Turns {
    const fn new() -> Self {
        Self {
            state: Mutex::new(State {
                held: None,
                sharing: 0,
                is_alone: false,
                want_alone: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn shared(&'static self, test: &str) -> Turn {
        let mut state = self.state();
        if let Some(held) = state.of(test) {
            return Turn { _held: Some(held) };
        }
        while state.is_alone || state.want_alone > 0 {
            state = self.wait(state);
        }
        state.sharing += 1;
        self.hold(&mut state, test, false)
    }

    fn alone(&'static self, test: &str) -> Turn {
        let mut state = self.state();
        let has_one = state.of(test);
        assert!(
            has_one.is_none(),
            "{test}: take the turn before the first world"
        );
        state.want_alone += 1;
        while state.is_alone || state.sharing > 0 {
            state = self.wait(state);
        }
        state.want_alone -= 1;
        state.is_alone = true;
        self.hold(&mut state, test, true)
    }

    fn hold(&'static self, state: &mut State, test: &str, is_alone: bool) -> Turn {
        let held = Arc::new(Held {
            turns: self,
            is_alone,
        });
        let all = state.held.get_or_insert_default();
        all.insert(test.to_owned(), Arc::downgrade(&held));
        Turn { _held: Some(held) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let state = self.changed.wait(state);
        state.unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn of(&self, test: &str) -> Option<Arc<Held>> {
        self.held.as_ref()?.get(test)?.upgrade()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        match self.is_alone {
            true => state.is_alone = false,
            false => state.sharing -= 1,
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
#[path = "turns_test.rs"]
mod tests;
