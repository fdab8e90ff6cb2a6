//! Supervision of the engine: the broker watches it and replaces it when it ends or hangs.
//!
//! # Theory of operation
//! Established flows need no engine, and the broker has all that a new one needs: the descriptors
//! of maps and port, the forwards' sockets, the flow log, the policy in force, the owner's row. So
//! an engine that ends unasked is replaced, and the next one adopts the flows as after a start of
//! slipgate ([`super::engine_process`]) and finds the frames that wait in the port's queue. State
//! that only the old engine had is lost: relayed connections, inspections and questions under way,
//! captures.
//!
//! The broker detects the end by the engine's pidfd, by the end of its channel, and by an invalid
//! message. It detects a hang by unanswered [`ToEngine::Ping`]s, which the engine's loop answers.
//! Silence is counted in checks by the broker, not in time: if both were stopped (a suspended
//! machine, a frozen cgroup), neither is at fault. A hanging engine is killed.
//!
//! The first restart is immediate, later ones are delayed increasingly. An engine that ends
//! repeatedly, because of a bug that a guest has found or for lack of a resource, is given up: then
//! no new flow is admitted, and established flows continue. A daemon gives up none: it serves many
//! guests, of which one may be the cause, and a start of the daemon would do no more than another
//! engine does. Its engines are started a second after the end at the latest.
use std::{
    collections::VecDeque,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags};
use slipgate_ipc::{
    channel::{ChannelError, Received},
    engine::{FromEngine, OnExit, OpenQuestion, ToEngine},
};

use super::{MESSAGES_AT_ONCE, engine_process::EngineProcess};
use crate::kernel_state::Attached;

/// Interval of the checks whether the engine answers.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Number of checks without an answer after which the engine counts as hanging.
const SILENT_LOOKS: u32 = 4;
/// The same number while the engine adopts flows.
const SILENT_LOOKS_AT_START: u32 = 30;
/// Time limit for an answer before the engine is asked to stop.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// Time for which an engine's end counts.
const ENDS_COUNT_FOR: Duration = Duration::from_secs(60);
/// Delays before a restart, by the number of ends within that time. After one more end the broker
/// gives up.
const BACK_OFF: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// The longest of these delays for a daemon, which never gives up.
const BACK_OFF_OF_DAEMON: Duration = Duration::from_secs(1);

/// Error: the engine ended too often to be started again.
#[derive(thiserror::Error, Debug)]
#[error("the engine {how}; it has ended {times} times within a minute and is not started again")]
pub(crate) struct GivenUp {
    /// Description of the last end of the engine.
    how: String,
    times: usize,
}

/// The engine process, or its absence, with restarts and watchdog.
#[derive(Debug)]
pub(crate) struct Engine {
    /// The worker that it belongs to.
    worker: usize,
    /// Whether there are others.
    is_one_of_several: bool,
    /// Level of messages on its stderr.
    log: String,
    /// Number of engines that were started.
    number: u64,
    state: State,
    ends: Ends,
    watch: Watch,
    /// Reason to end the engine: a message that it sent, or silence.
    failure: Option<String>,
}

#[derive(Debug)]
enum State {
    /// The engine is adopting flows, and is not ready yet.
    Begins(EngineProcess),
    Serves(EngineProcess),
    /// No engine runs; the next one starts at this time.
    Due(Instant),
}

impl Engine {
    /// Starts the first engine of a worker; [`Engine::await_ready`] must follow.
    pub(crate) fn begin(
        attached: &Attached,
        worker: usize,
        reserved_ports: &[(u8, u16)],
        log: &str,
    ) -> anyhow::Result<Self> {
        let process = EngineProcess::start(attached, worker, reserved_ports, log)?;
        Ok(Self {
            worker,
            is_one_of_several: attached.workers.len() > 1,
            log: log.to_owned(),
            number: 1,
            state: State::Begins(process),
            ends: Ends {
                never_too_many: attached.config.is_daemon,
                ..Ends::default()
            },
            watch: Watch::new(SILENT_LOOKS),
            failure: None,
        })
    }

    /// Waits until the first engine serves. Returns the number of flows that it adopted.
    pub(crate) fn await_ready(&mut self, within: Duration) -> anyhow::Result<u64> {
        let process = self.process_mut().context("the engine was not started")?;
        let adopted = process.await_ready(within)?;
        self.serves();
        Ok(adopted)
    }

    /// The engine in messages to people.
    fn title(&self) -> String {
        match self.is_one_of_several {
            true => format!("the engine of worker {}", self.worker),
            false => "the engine".to_owned(),
        }
    }

    fn process(&self) -> Option<&EngineProcess> {
        match &self.state {
            State::Begins(process) | State::Serves(process) => Some(process),
            State::Due(_) => None,
        }
    }

    fn process_mut(&mut self) -> Option<&mut EngineProcess> {
        match &mut self.state {
            State::Begins(process) | State::Serves(process) => Some(process),
            State::Due(_) => None,
        }
    }

    /// Returns the descriptors to poll, if an engine runs: its pidfd and its channel.
    pub(crate) fn watched(&self) -> Option<[PollFd<'_>; 2]> {
        let process = self.process()?;
        Some([
            PollFd::new(process.pidfd(), PollFlags::POLLIN),
            PollFd::new(process.channel().as_fd(), process.wants()),
        ])
    }

    /// Returns the time at which [`Engine::failed`] or [`Engine::start_again`] must be called.
    pub(crate) fn due(&self) -> Instant {
        match self.state {
            State::Due(due) => due,
            State::Begins(_) | State::Serves(_) => self.watch.due,
        }
    }

    /// Sends a message, now or when there is room. Without an engine the message is dropped: the
    /// next one gets the present state at its start.
    pub(crate) fn send(&mut self, message: ToEngine) -> anyhow::Result<()> {
        self.process_mut().map_or(Ok(()), |it| it.send(message))
    }

    /// Number of the engine that messages are sent to, or would have been: the next one starts with
    /// the state that results from them.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether the engine is behind, so that clients' requests should wait. Where there is none, it
    /// is not: the next one starts with the state that requests lead to.
    pub(crate) fn is_behind(&self) -> bool {
        self.process().is_some_and(EngineProcess::is_behind)
    }

    /// Whether the engine answers requests.
    pub(crate) fn answers(&self) -> bool {
        matches!(&self.state, State::Serves(process) if !process.is_behind())
    }

    /// Receives messages of the engine, a limited number per call; answers to the watchdog are
    /// removed.
    pub(crate) fn receive(&mut self) -> anyhow::Result<Vec<FromEngine>> {
        let mut messages = Vec::new();
        let Some(process) = self.process_mut() else {
            return Ok(messages);
        };
        process.flush()?;
        let failure = loop {
            if messages.len() == MESSAGES_AT_ONCE {
                break None;
            }
            match process.channel().try_receive::<FromEngine>() {
                Ok(Received::Nothing) => break None,
                Ok(Received::Message(message)) => messages.push(message),
                Ok(Received::End) => break Some(process.how_it_ended()),
                // What comes of it is not to be believed, whatever else it does.
                Err(ChannelError::Foreign(why)) => break Some(format!("talks nonsense ({why})")),
                Err(error) => return Err(error.into()),
            }
        };
        self.failure = self.failure.take().or(failure);
        messages.retain(|message| match message {
            FromEngine::Pong { id } => {
                self.watch.answered(*id);
                false
            }
            _ => true,
        });
        Ok(messages)
    }

    /// Handles the engine's message that it is ready; returns whether that was expected.
    pub(crate) fn serves(&mut self) -> bool {
        let none = State::Due(Instant::now());
        let (state, begins) = match std::mem::replace(&mut self.state, none) {
            State::Begins(process) => (State::Serves(process), true),
            other => (other, false),
        };
        self.state = state;
        if begins {
            self.watch = Watch::new(SILENT_LOOKS);
        }
        begins
    }

    /// Sends a ping if one is due. Returns how the engine ended or failed, if it did; then no
    /// engine runs any more.
    pub(crate) fn failed(&mut self) -> anyhow::Result<Option<String>> {
        let mut failure = self.failure.take();
        let asks = self.watch.look(Instant::now());
        let hangs = self.watch.hangs();
        if let Some(process) = self.process_mut() {
            if let Some(id) = asks {
                process.send(ToEngine::Ping { id })?;
            }
            let hangs = hangs.map(|silent| {
                let silent = silent.as_secs();
                format!("hangs: it has answered nothing for {silent} s")
            });
            failure = failure.or_else(|| process.failure()).or(hangs);
        }
        if failure.is_some() {
            // Killed, if it runs.
            self.state = State::Due(Instant::now());
        }
        Ok(failure)
    }

    /// Records the engine's end, which its pidfd has reported.
    pub(crate) fn has_ended(&mut self) {
        let how = self.process_mut().map(EngineProcess::how_it_ended);
        self.failure = self.failure.take().or(how);
    }

    /// Schedules the next start of an engine, unless it has ended too often.
    pub(crate) fn plan(&mut self, how: String) -> Result<(), GivenUp> {
        match self.ends.add(Instant::now()) {
            Ok(due) => {
                let said = "established flows go on, and it is started again";
                tracing::error!("{} {how}; {said}", self.title());
                self.state = State::Due(due);
                Ok(())
            }
            Err(times) => Err(GivenUp { how, times }),
        }
    }

    /// Whether another engine must be started now.
    pub(crate) fn is_due(&self) -> bool {
        matches!(self.state, State::Due(due) if due <= Instant::now())
    }

    /// Starts an engine, which reports when it is ready. One that can't be started counts as ended.
    pub(crate) fn start_again(&mut self, attached: &Attached, reserved_ports: &[(u8, u16)]) {
        match EngineProcess::start(attached, self.worker, reserved_ports, &self.log) {
            Ok(process) => {
                self.number += 1;
                self.watch = Watch::new(SILENT_LOOKS_AT_START);
                self.state = State::Begins(process);
            }
            Err(e) => self.failure = Some(format!("can't be started again: {e:#}")),
        }
    }

    /// Stops the engine in order, within a time limit. If it does not respond, ends meanwhile, or
    /// does not run, another one is started to do the work. Returns the questions of guests that
    /// have no reply yet.
    pub(crate) fn stop(
        self,
        exit: OnExit,
        attached: &mut Attached,
        reserved_ports: &[(u8, u16)],
        within: Duration,
    ) -> anyhow::Result<Vec<OpenQuestion>> {
        let worker = self.worker;
        let stopped = match self.state {
            State::Serves(mut process) => process
                .await_answer(ANSWERS_WITHIN)
                .and_then(|()| process.stop(exit, within))
                .map(Some),
            // Two of them at the same flows would record each twice.
            State::Begins(mut process) => process
                .await_ready(within)
                .and_then(|_| process.stop(exit, within))
                .map(Some),
            State::Due(_) => Ok(None),
        };
        // Whichever it was, it does not run any more.
        match stopped {
            Ok(Some(questions)) => return Ok(questions),
            Ok(None) => {}
            Err(e) => tracing::error!("{e:#}; another one is started, to stop in its place"),
        }
        let mut process = EngineProcess::start(attached, worker, reserved_ports, &self.log)?;
        process.await_ready(within)?;
        process.stop(exit, within)
    }
}

/// Times of the engine's recent ends.
#[derive(Debug, Default)]
struct Ends {
    times: VecDeque<Instant>,
    /// Whether there is always a next start.
    never_too_many: bool,
}

impl Ends {
    /// Records an end. Returns the time of the next start.
    ///
    /// # Errors
    /// There were too many ends; the error is their number.
    fn add(&mut self, now: Instant) -> Result<Instant, usize> {
        self.times.push_back(now);
        let counts = |end: &Instant| now.duration_since(*end) < ENDS_COUNT_FOR;
        self.times.retain(counts);
        let times = self.times.len();
        let wait = BACK_OFF.get(times - 1).copied();
        let wait = match self.never_too_many {
            true => Some(wait.unwrap_or(BACK_OFF_OF_DAEMON).min(BACK_OFF_OF_DAEMON)),
            false => wait,
        };
        wait.map(|wait| now + wait).ok_or(times)
    }
}

/// Watchdog of the engine's event loop.
#[derive(Debug)]
struct Watch {
    due: Instant,
    /// Number of the unanswered ping, and the number of checks at which it was unanswered.
    asked: Option<(u64, u32)>,
    last: u64,
    most_silent: u32,
}

impl Watch {
    fn new(most_silent: u32) -> Self {
        Self {
            due: Instant::now() + LOOK_EVERY,
            asked: None,
            last: 0,
            most_silent,
        }
    }

    /// Returns the number of the next ping, when one is due.
    fn look(&mut self, now: Instant) -> Option<u64> {
        if now < self.due {
            return None;
        }
        // From now, not from when it was due: looks that were missed are none.
        self.due = now + LOOK_EVERY;
        if let Some((_, silent)) = &mut self.asked {
            *silent += 1;
            return None;
        }
        self.last += 1;
        self.asked = Some((self.last, 0));
        Some(self.last)
    }

    fn answered(&mut self, request: u64) {
        self.asked.take_if(|(asked, _)| *asked == request);
    }

    /// Returns the time without an answer, if it is too long.
    fn hangs(&self) -> Option<Duration> {
        let (_, silent) = self.asked?;
        (silent >= self.most_silent).then_some(silent * LOOK_EVERY)
    }
}

#[cfg(test)]
#[path = "engine_test.rs"]
mod tests;
