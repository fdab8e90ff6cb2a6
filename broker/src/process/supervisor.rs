//! Supervision of a process that guests do without: it is started, and again when it ends, after a
//! wait that grows.
use std::time::{Duration, Instant};

use slipgate_control::Users;
use slipgate_ipc::descriptors::Outbound;

use super::child::ChildProcess;
use crate::role::Role;

/// Delay before the first restart, and the maximum delay.
const BACK_OFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// A process, or the time of its next start.
#[derive(Debug)]
pub(super) struct Supervisor {
    state: State,
    /// Delay before the next start, if this one fails.
    back_off: Duration,
}

#[derive(Debug)]
enum State {
    Runs {
        process: ChildProcess,
        since: Instant,
    },
    Due(Instant),
}

impl Default for Supervisor {
    /// Nothing runs, and a start is due.
    fn default() -> Self {
        Self {
            state: State::Due(Instant::now()),
            back_off: BACK_OFF[0],
        }
    }
}

impl Supervisor {
    /// The process, while it runs.
    pub(super) fn process(&self) -> Option<&ChildProcess> {
        match &self.state {
            State::Runs { process, .. } => Some(process),
            State::Due(_) => None,
        }
    }

    /// Same as [`Supervisor::process`], mutable.
    pub(super) fn process_mut(&mut self) -> Option<&mut ChildProcess> {
        match &mut self.state {
            State::Runs { process, .. } => Some(process),
            State::Due(_) => None,
        }
    }

    /// Time of the next start; `None` while the process runs.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Runs { .. } => None,
            State::Due(due) => Some(due),
        }
    }

    /// Whether the process is to be started now.
    pub(super) fn is_due(&self) -> bool {
        self.due().is_some_and(|due| due <= Instant::now())
    }

    /// Starts the process and sends it its first message.
    ///
    /// # Errors
    /// It could not be started; the error says so in words.
    pub(super) fn start(
        &mut self,
        role: Role,
        users: &Users,
        first: impl Outbound,
    ) -> Result<(), String> {
        let started = ChildProcess::start(role, users).and_then(|process| {
            process.channel().send(first)?;
            Ok(process)
        });
        let process = started.map_err(|e| format!("could not be started: {e:#}"))?;
        let since = Instant::now();
        self.state = State::Runs { process, since };
        Ok(())
    }

    /// Ends the process, if it still runs. The next start is due after the wait. Returns whether it
    /// had run for longer than the longest wait.
    pub(super) fn ended(&mut self) -> bool {
        let had_run = match &self.state {
            State::Runs { since, .. } => since.elapsed() >= BACK_OFF[1],
            State::Due(_) => false,
        };
        if had_run {
            self.back_off = BACK_OFF[0];
        }
        self.state = State::Due(Instant::now() + self.back_off);
        self.back_off = (2 * self.back_off).min(BACK_OFF[1]);
        had_run
    }
}
