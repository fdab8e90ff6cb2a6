//! The engine for as long as the broker serves: watched, and another one in its place when it ends
//! or hangs.
//!
//! # Theory of operation
//! Established flows need no engine, and all that a new one needs the broker has: the descriptors of
//! maps and port, the forwards' sockets, the flow log, the policy in force, the owner's row. So one
//! that ends unasked is replaced, and the next adopts the flows as after a start of slipgate
//! ([`super::engine_process`]); what waits in the port's queue it finds there. What only the old one
//! knew is gone with it: relayed connections, inspections and questions that were under way, captures.
//!
//! It is seen to have ended by its pidfd, by the end of its channel, and by nonsense on it. It is
//! seen to hang by not answering [`ToEngine::Ping`], which its loop answers. That is counted in looks
//! of the broker's own, not in time: where both were stopped (a suspended machine, a frozen cgroup)
//! neither is to blame. One that hangs is killed, and has ended.
//!
//! The first time it is started again at once, then after a growing while. One that ends again and
//! again, by a bug that a guest has found or for what this host lacks, is given up: then nothing new
//! gets in, and what is established goes on.
use std::{
    collections::VecDeque,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags};
use slipgate_control::owner;
use slipgate_ipc::{
    channel::{ChannelError, Received},
    engine::{FromEngine, OnExit, ToEngine},
};

use super::{HEARD_AT_ONCE, engine_process::EngineProcess};
use crate::kernel_state::Attached;

/// Between two looks at whether it answers.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Looks at which it has not answered yet, after which it hangs.
const SILENT_LOOKS: u32 = 4;
/// The same while it adopts.
const SILENT_LOOKS_AT_START: u32 = 30;
/// How long it may take to answer before it is told to stop.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// How long ends count.
const ENDS_COUNT_FOR: Duration = Duration::from_secs(60);
/// Before it is started again, by how often it has ended in that time; once more, and it is given up.
const BACK_OFF: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// It ended too often.
#[derive(thiserror::Error, Debug)]
#[error("the engine {how}; it has ended {times} times within a minute and is not started again")]
pub(crate) struct GivenUp {
    /// The last time.
    how: String,
    times: usize,
}

/// The engine, or the place of one.
#[derive(Debug)]
pub(crate) struct Engine {
    /// Level of messages on its stderr.
    log: String,
    state: State,
    ends: Ends,
    watch: Watch,
    /// What was heard of it, or not, that ends it.
    failure: Option<String>,
}

#[derive(Debug)]
enum State {
    /// It adopts, and is not ready.
    Begins(EngineProcess),
    Serves(EngineProcess),
    /// There is none; when there is to be one.
    Due(Instant),
}

impl Engine {
    /// The first one, which serves; how many flows it took over.
    pub(crate) fn start(
        attached: &Attached,
        reserved_ports: &[(u8, u16)],
        log: &str,
        within: Duration,
    ) -> anyhow::Result<(Self, u64)> {
        let mut process = EngineProcess::start(attached, reserved_ports, log)?;
        let adopted = process.await_ready(within)?;
        let engine = Self {
            log: log.to_owned(),
            state: State::Serves(process),
            ends: Ends::default(),
            watch: Watch::new(SILENT_LOOKS),
            failure: None,
        };
        Ok((engine, adopted))
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

    /// What to wait on, if there is one: its pidfd, and its channel.
    pub(crate) fn watched(&self) -> Option<[PollFd<'_>; 2]> {
        let process = self.process()?;
        Some([
            PollFd::new(process.pidfd(), PollFlags::POLLIN),
            PollFd::new(process.channel().as_fd(), process.wants()),
        ])
    }

    /// When [`Engine::failed`] or [`Engine::start_again`] may have something to do in any case.
    pub(crate) fn due(&self) -> Instant {
        match self.state {
            State::Due(due) => due,
            State::Begins(_) | State::Serves(_) => self.watch.due,
        }
    }

    /// Sends a message, now or when there is room. Where there is no engine it is told by how the
    /// next one is started.
    pub(crate) fn tell(&mut self, message: ToEngine) -> anyhow::Result<()> {
        self.process_mut().map_or(Ok(()), |it| it.tell(message))
    }

    /// Whether it is better asked nothing now.
    pub(crate) fn is_behind(&self) -> bool {
        match &self.state {
            State::Serves(process) => process.is_behind(),
            State::Begins(_) | State::Due(_) => true,
        }
    }

    /// What it has said, up to so much at a time; answers to the watch are taken out.
    pub(crate) fn hear(&mut self) -> anyhow::Result<Vec<FromEngine>> {
        let mut heard = Vec::new();
        let Some(process) = self.process_mut() else {
            return Ok(heard);
        };
        process.flush()?;
        let failure = loop {
            if heard.len() == HEARD_AT_ONCE {
                break None;
            }
            match process.channel().try_receive::<FromEngine>() {
                Ok(Received::Nothing) => break None,
                Ok(Received::Message(message)) => heard.push(message),
                Ok(Received::End) => break Some(process.how_it_ended()),
                // What comes of it is not to be believed, whatever else it does.
                Err(ChannelError::Foreign(why)) => break Some(format!("talks nonsense ({why})")),
                Err(error) => return Err(error.into()),
            }
        };
        self.failure = self.failure.take().or(failure);
        heard.retain(|message| match message {
            FromEngine::Pong { id } => {
                self.watch.answered(*id);
                false
            }
            _ => true,
        });
        Ok(heard)
    }

    /// It says that it is ready; whether it was to say so.
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

    /// Asks it whether it is there, when it is time; how it ended or failed, if it did. Then there
    /// is none any more.
    pub(crate) fn failed(&mut self) -> anyhow::Result<Option<String>> {
        let mut failure = self.failure.take();
        let asks = self.watch.look(Instant::now());
        let hangs = self.watch.hangs();
        if let Some(process) = self.process_mut() {
            if let Some(id) = asks {
                process.tell(ToEngine::Ping { id })?;
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

    /// Its pidfd says that it has.
    pub(crate) fn has_ended(&mut self) {
        let how = self.process_mut().map(EngineProcess::how_it_ended);
        self.failure = self.failure.take().or(how);
    }

    /// Sees to it that there is another one in time, unless it has ended too often.
    pub(crate) fn plan(&mut self, how: String) -> Result<(), GivenUp> {
        match self.ends.add(Instant::now()) {
            Ok(due) => {
                let said = "established flows go on, and it is started again";
                tracing::error!("the engine {how}; {said}");
                self.state = State::Due(due);
                Ok(())
            }
            Err(times) => Err(GivenUp { how, times }),
        }
    }

    /// Whether another one is to be started now.
    pub(crate) fn is_due(&self) -> bool {
        matches!(self.state, State::Due(due) if due <= Instant::now())
    }

    /// Not now: what has to be done before can't be.
    pub(crate) fn put_off(&mut self) {
        self.state = State::Due(Instant::now() + LOOK_EVERY);
    }

    /// Starts it; it says when it is ready. One that can't be started has ended.
    pub(crate) fn start_again(&mut self, attached: &Attached, reserved_ports: &[(u8, u16)]) {
        match EngineProcess::start(attached, reserved_ports, &self.log) {
            Ok(process) => {
                self.watch = Watch::new(SILENT_LOOKS_AT_START);
                self.state = State::Begins(process);
            }
            Err(e) => self.failure = Some(format!("can't be started again: {e:#}")),
        }
    }

    /// Stops it in order, within so long. Where it does not answer any more, ends meanwhile, or there
    /// is none just now, another one is started to do it.
    pub(crate) fn stop(
        self,
        exit: OnExit,
        attached: &mut Attached,
        reserved_ports: &[(u8, u16)],
        within: Duration,
    ) -> anyhow::Result<()> {
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
            Ok(Some(())) => return Ok(()),
            Ok(None) => {}
            Err(e) => tracing::error!("{e:#}; another one is started, to stop in its place"),
        }
        attached.clean_after_engine(owner::PATIENCE)?;
        let mut process = EngineProcess::start(attached, reserved_ports, &self.log)?;
        process.await_ready(within)?;
        process.stop(exit, within)
    }
}

/// How often it has ended of late.
#[derive(Debug, Default)]
struct Ends(VecDeque<Instant>);

impl Ends {
    /// Once more; when it is to be started again, or how often it was.
    fn add(&mut self, now: Instant) -> Result<Instant, usize> {
        self.0.push_back(now);
        let counts = |end: &Instant| now.duration_since(*end) < ENDS_COUNT_FOR;
        self.0.retain(counts);
        let times = self.0.len();
        let wait = BACK_OFF.get(times - 1);
        wait.map(|wait| now + *wait).ok_or(times)
    }
}

/// Whether it answers.
#[derive(Debug)]
struct Watch {
    due: Instant,
    /// What it was asked and has not answered, and at how many looks it had not.
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

    /// Looks, when it is time; what to ask it, if anything.
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

    /// For how long it has said nothing, if that is too long.
    fn hangs(&self) -> Option<Duration> {
        let (_, silent) = self.asked?;
        (silent >= self.most_silent).then_some(silent * LOOK_EVERY)
    }
}

#[cfg(test)]
#[path = "engine_test.rs"]
mod tests;
