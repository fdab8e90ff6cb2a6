//! Supervision of a process that answers the API: the broker starts it with the maps and the
//! socket, carries out its clients' requests, sends it events, and starts it again when it ends.
use std::{
    collections::HashMap,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags};
use slipgate_ipc::{
    api::{ApiStart, Event, FromApi, ToApi},
    channel::{ChannelError, Packet, Received},
    client::{ClientAnswer, ClientId, ClientRequest},
};

use super::{HEARD_AT_ONCE, child::ChildProcess};
use crate::{kernel_state::Attached, role::Role};

/// Delay before the first restart, and the maximum delay.
const BACK_OFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// Maximum number of answers and events that wait for room in the channel. A process that accepts
/// none hangs.
const MOST_QUEUED: usize = 4_096;

/// A socket of the API, and the process that serves it.
#[derive(Debug)]
pub(crate) struct Api {
    listener: UnixListener,
    /// Whether its clients may change anything.
    may_change: bool,
    log: String,
    state: State,
    /// Delay before the next start, if this one fails.
    back_off: Duration,
    /// Requests in progress, with the process's own numbers.
    asked: HashMap<ClientId, u64>,
}

#[derive(Debug)]
enum State {
    Runs(Running),
    Due(Instant),
}

#[derive(Debug)]
struct Running {
    process: ChildProcess,
    since: Instant,
    waiting: std::collections::VecDeque<Packet>,
}

impl Api {
    /// Creates the state of a socket that is served from now on.
    pub(crate) fn new(
        listener: UnixListener,
        may_change: bool,
        attached: &Attached,
        log: &str,
    ) -> Self {
        let mut api = Self {
            listener,
            may_change,
            log: log.to_owned(),
            state: State::Due(Instant::now()),
            back_off: BACK_OFF[0],
            asked: HashMap::new(),
        };
        api.start(attached);
        api
    }

    /// Returns the descriptors to poll and the events: messages, and room for queued ones.
    pub(crate) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let running = match &self.state {
            State::Runs(running) => Some(running),
            State::Due(_) => None,
        };
        running.into_iter().flat_map(|it| {
            let room = match it.waiting.is_empty() {
                true => PollFlags::empty(),
                false => PollFlags::POLLOUT,
            };
            [
                PollFd::new(it.process.pidfd(), PollFlags::POLLIN),
                PollFd::new(it.process.channel().as_fd(), PollFlags::POLLIN | room),
            ]
        })
    }

    /// Returns the time at which [`Api::requests`] must be called; `None` if there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Runs(_) => None,
            State::Due(due) => Some(due),
        }
    }

    /// Returns the requests that have arrived, each with the number that `number` assigns to it.
    /// Detects the end of the process, and restarts it.
    pub(crate) fn requests(
        &mut self,
        attached: &Attached,
        mut number: impl FnMut() -> ClientId,
    ) -> Vec<(ClientId, ClientRequest)> {
        let State::Runs(running) = &mut self.state else {
            if self.due().is_some_and(|due| due <= Instant::now()) {
                self.start(attached);
            }
            return Vec::new();
        };
        let mut requests = Vec::new();
        let mut failure = running
            .flush()
            .err()
            .map(|e| format!("can't be told anything: {e}"));
        while failure.is_none() && requests.len() < HEARD_AT_ONCE {
            match running.process.heard::<FromApi>() {
                Ok(Received::Message(FromApi { id, request })) => {
                    let client = number();
                    self.asked.insert(client, id);
                    requests.push((client, request.into()));
                }
                Ok(Received::Nothing) => break,
                Ok(Received::End) => failure = Some(running.process.how_it_ended()),
                Err(e) => failure = Some(format!("talks nonsense ({e:#})")),
            }
        }
        if let Some(how) = failure {
            let ran = running.since.elapsed();
            self.ended(&how, ran);
        }
        requests
    }

    /// Whether a client may make a request.
    pub(crate) fn permits(&self, request: &ClientRequest) -> bool {
        self.may_change || request.is_read_only()
    }

    /// Passes an answer on, if the request came from this process.
    pub(crate) fn answer(&mut self, client: ClientId, answer: &ClientAnswer) {
        if let Some(id) = self.asked.remove(&client) {
            self.tell(ToApi::Answer {
                id,
                answer: Box::new(answer.clone()),
            });
        }
    }

    /// Sends the process an event.
    pub(crate) fn event(&mut self, event: &Event) {
        self.tell(ToApi::Event(event.clone()));
    }

    fn tell(&mut self, message: ToApi<OwnedFd>) {
        let State::Runs(running) = &mut self.state else {
            return;
        };
        let queued = Packet::new(message).and_then(|packet| {
            running.waiting.push_back(packet);
            running.flush()
        });
        let failure = match queued {
            Ok(()) if running.waiting.len() > MOST_QUEUED => "hangs: it takes no answers".into(),
            Ok(()) => return,
            Err(e) => format!("can't be told anything: {e}"),
        };
        let ran = running.since.elapsed();
        self.ended(&failure, ran);
    }

    fn start(&mut self, attached: &Attached) {
        let start = ToApi::Start(Box::new(ApiStart {
            maps: attached.datapath.maps().fds(),
            listener: self.listener.as_fd(),
            may_change: self.may_change,
            log: self.log.clone(),
        }));
        let role = match self.may_change {
            true => Role::Api,
            false => Role::ApiReader,
        };
        let started = ChildProcess::start(role, &attached.users).and_then(|process| {
            process.channel().send(start)?;
            Ok(process)
        });
        self.asked.clear();
        match started {
            Ok(process) => {
                self.state = State::Runs(Running {
                    process,
                    since: Instant::now(),
                    waiting: Default::default(),
                });
            }
            Err(e) => self.ended(&format!("could not be started: {e:#}"), Duration::ZERO),
        }
    }

    fn ended(&mut self, how: &str, ran: Duration) {
        if ran >= BACK_OFF[1] {
            self.back_off = BACK_OFF[0];
        }
        tracing::warn!(
            "the API's process {how}; guests are served all the same, and it is started again"
        );
        self.asked.clear();
        self.state = State::Due(Instant::now() + self.back_off);
        self.back_off = (2 * self.back_off).min(BACK_OFF[1]);
    }
}

impl Running {
    fn flush(&mut self) -> Result<(), ChannelError> {
        while let Some(packet) = self.waiting.front() {
            match self.process.channel().try_send_packet(packet) {
                Ok(true) => drop(self.waiting.pop_front()),
                Ok(false) => break,
                Err(e) if e.is_peer_gone() => {
                    self.waiting.clear();
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
