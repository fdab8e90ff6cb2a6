//! The meeting: where vCPU threads wait while the machine is paused, and save their state, or go back
//! to that of power-on, when asked.
use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    time::Duration,
};

use crate::snapshot::{SnapshotError, VcpuState};

/// Order to a vCPU that waits at the meeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Save the vCPU's state.
    Save,
    /// Go back to its state at power-on.
    Reset,
    /// Go on: the last order.
    Leave,
}

type Saved = Result<VcpuState, SnapshotError>;

/// The meeting of a machine's vCPUs.
pub(crate) struct Meeting {
    called: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    called: bool,
    ended: bool,
    /// Number of vCPUs that are here.
    present: usize,
    /// Orders to each vCPU, and their answers.
    asked: Vec<Option<Order>>,
    saved: Vec<Option<Saved>>,
}

impl Meeting {
    /// Makes the meeting of so many vCPUs.
    pub(crate) fn of(cpus: usize) -> Self {
        let state = State {
            asked: vec![None; cpus],
            saved: (0..cpus).map(|_| None).collect(),
            ..State::default()
        };
        Self {
            called: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a vCPU is to come here.
    pub(crate) fn is_called(&self) -> bool {
        self.called.load(Acquire)
    }

    /// Calls the vCPUs. Each must be kicked until it is here.
    pub(crate) fn call(&self) {
        self.lock().called = true;
        self.called.store(true, Release);
        self.changed.notify_all();
    }

    /// Waits until all are here, no longer than `within`. Returns whether they are; `None` when the
    /// machine stops.
    pub(crate) fn is_complete(&self, within: Duration) -> Option<bool> {
        let missing = |state: &mut State| !state.ended && state.present < state.asked.len();
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), within, missing)
            .unwrap_or_else(PoisonError::into_inner);
        (!state.ended).then_some(state.present == state.asked.len())
    }

    /// Has all save their state; all are here. Returns the states by index; `None` when the machine
    /// stops.
    pub(crate) fn save(&self) -> Option<Vec<Saved>> {
        self.ask(Order::Save)
    }

    /// Has all go back to their state at power-on; all are here. Returns that state by index; `None`
    /// when the machine stops.
    pub(crate) fn reset(&self) -> Option<Vec<Saved>> {
        self.ask(Order::Reset)
    }

    /// Waits until the vCPUs are called here, or the machine stops.
    pub(crate) fn await_call(&self) {
        let waiting = |state: &mut State| !state.called && !state.ended;
        let state = self.changed.wait_while(self.lock(), waiting);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }

    fn ask(&self, order: Order) -> Option<Vec<Saved>> {
        let mut state = self.lock();
        state.asked.fill(Some(order));
        self.changed.notify_all();
        let waiting = |state: &mut State| !state.ended && state.saved.iter().any(Option::is_none);
        let mut state = self
            .changed
            .wait_while(state, waiting)
            .unwrap_or_else(PoisonError::into_inner);
        state.saved.iter_mut().map(Option::take).collect()
    }

    /// Has all go on.
    pub(crate) fn dismiss(&self) {
        self.called.store(false, Release);
        self.lock().called = false;
        self.changed.notify_all();
    }

    /// Ends all waiting, for good: the machine stops.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits as vCPU `index`, and carries out its orders, until the meeting is over.
    pub(crate) fn attend(&self, index: usize, mut carry_out: impl FnMut(Order) -> Option<Saved>) {
        let mut state = self.lock();
        state.present += 1;
        self.changed.notify_all();
        while state.called && !state.ended {
            if let Some(order) = state.asked[index].take() {
                drop(state);
                let saved = carry_out(order);
                state = self.lock();
                state.saved[index] = saved;
                self.changed.notify_all();
                continue;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.present -= 1;
        drop(state);
        carry_out(Order::Leave);
    }
}

#[cfg(test)]
#[path = "meeting_test.rs"]
mod tests;
