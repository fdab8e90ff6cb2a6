//! Supervision of a process that answers the API: the broker starts it with the maps and the
//! socket, carries out its clients' requests, sends it events, and starts it again when it ends.
use std::{
    collections::{HashMap, HashSet},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags};
use slipgate_ipc::{
    api::{ApiStart, Event, FromApi, ToApi},
    channel::Received,
    client::{ClientAnswer, ClientId, ClientRequest},
    engine::ToEngine,
};

use super::{
    MESSAGES_AT_ONCE, Scraped,
    outgoing::{Outgoing, unread_bytes},
    supervisor::Supervisor,
};
use crate::role::Role;

/// Maximum number of answers and events that wait for room in the channel. A process that accepts
/// none hangs.
const MOST_QUEUED: usize = 4_096;
/// Maximum number of its requests in progress: more than it has clients. Further ones wait in the
/// channel, so that a process which another has taken over can't fill the broker's memory.
const MOST_PENDING: usize = 512;
/// Memory of answers that it has not read from which on its requests wait, bytes with the kernel's
/// overhead. Each answer may have megabytes in a memfd.
const MOST_UNREAD: usize = 32 * 1024;
/// Interval at which a process that has not read its answers is looked at again: the kernel reports
/// when there is room, not when everything has been read.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Time within which the processes answer the clients that they have, and end.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// A socket of the API, and the process that serves it.
#[derive(Debug)]
pub(crate) struct Api {
    listener: UnixListener,
    /// Whether its clients may change anything.
    may_change: bool,
    log: String,
    supervisor: Supervisor,
    outgoing: Outgoing,
    /// Requests in progress, with the process's own numbers.
    pending: HashMap<ClientId, u64>,
    /// Our ends of the sockets of captures that the engine has not begun yet.
    captures: HashMap<ClientId, OwnedFd>,
    /// Workers to whose present engine it has a socket.
    hears: HashSet<usize>,
}

impl Api {
    /// Creates the state of a socket that is served from now on.
    pub(crate) fn new(
        listener: UnixListener,
        may_change: bool,
        of: &impl Scraped,
        log: &str,
    ) -> Self {
        let mut api = Self {
            listener,
            may_change,
            log: log.to_owned(),
            supervisor: Supervisor::default(),
            outgoing: Outgoing::new(MOST_QUEUED),
            pending: HashMap::new(),
            captures: HashMap::new(),
            hears: HashSet::new(),
        };
        api.start(of);
        api
    }

    /// Has the processes end once their clients have an answer: where none is left here, that slipgate ends.
    pub(crate) fn finish(apis: &mut [Self]) {
        for api in apis.iter_mut() {
            if let Some(process) = api.supervisor.process() {
                // What has no room is not answered by us.
                let _ = api.outgoing.flush(process.channel());
                process.say_end();
            }
        }
        let until = Instant::now() + ENDS_WITHIN;
        let processes = apis.iter().filter_map(|api| api.supervisor.process());
        processes.for_each(|process| process.await_end(until));
    }

    /// Returns the descriptors to poll and the events: messages, and room for queued ones.
    pub(crate) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let mut wants = PollFlags::empty();
        wants.set(PollFlags::POLLOUT, !self.outgoing.is_empty());
        wants.set(PollFlags::POLLIN, self.takes_requests());
        self.supervisor
            .process()
            .into_iter()
            .flat_map(move |process| {
                [
                    PollFd::new(process.pidfd(), PollFlags::POLLIN),
                    PollFd::new(process.channel().as_fd(), wants),
                ]
            })
    }

    /// Whether it may make further requests: it has taken most of the answers.
    fn takes_requests(&self) -> bool {
        let unread = self
            .supervisor
            .process()
            .map_or(0, |it| unread_bytes(it.channel()));
        self.pending.len() < MOST_PENDING && !self.outgoing.is_behind() && unread < MOST_UNREAD
    }

    /// The socket that clients connect to.
    pub(crate) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Returns the time at which [`Api::requests`] must be called; `None` if there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        let again = || Instant::now() + LOOK_AGAIN_AFTER;
        let held_back = self.is_held_back();
        self.supervisor.due().or_else(|| held_back.then(again))
    }

    /// Whether its requests wait until it has read its answers.
    pub(crate) fn is_held_back(&self) -> bool {
        self.supervisor.process().is_some() && !self.takes_requests()
    }

    /// Returns the requests that have arrived, each with the number that `number` assigns to it, or
    /// an error if no descriptor is left for its answer. Detects the end of the process, and
    /// restarts it.
    pub(crate) fn requests(
        &mut self,
        of: &impl Scraped,
        mut number: impl FnMut() -> ClientId,
    ) -> Vec<(ClientId, io::Result<ClientRequest>)> {
        let Some(process) = self.supervisor.process_mut() else {
            if self.supervisor.is_due() {
                self.start(of);
            }
            return Vec::new();
        };
        let mut requests = Vec::new();
        let flushed = self.outgoing.flush(process.channel());
        let mut failure = flushed
            .err()
            .map(|e| format!("can't be told anything: {e}"));
        while failure.is_none() && requests.len() < MESSAGES_AT_ONCE && self.takes_requests() {
            let Some(process) = self.supervisor.process_mut() else {
                break;
            };
            match process.try_receive::<FromApi>() {
                Ok(Received::Message(FromApi { id, request })) => {
                    let client = number();
                    self.pending.insert(client, id);
                    let captures = &mut self.captures;
                    let request = request.into_client_request(|| {
                        let (ours, theirs) = stream_pair()?;
                        captures.insert(client, ours);
                        io::Result::Ok(theirs)
                    });
                    requests.push((client, request));
                }
                Ok(Received::Nothing) => break,
                Ok(Received::End) => failure = Some(process.how_it_ended()),
                Err(e) => failure = Some(format!("talks nonsense ({e:#})")),
            }
        }
        if let Some(how) = failure {
            self.ended(&how);
        }
        requests
    }

    /// Whether a client may make a request.
    pub(crate) fn permits(&self, request: &ClientRequest) -> bool {
        self.may_change || request.is_read_only()
    }

    /// Passes an answer on, if the request came from this process.
    pub(crate) fn answer(&mut self, client: ClientId, answer: &ClientAnswer) {
        if let Some(id) = self.pending.remove(&client) {
            let stream = self.captures.remove(&client);
            self.send(ToApi::Answer {
                id,
                answer: Box::new(answer.clone()),
                stream: stream.filter(|_| *answer == ClientAnswer::Done),
            });
        }
    }

    /// Sends the process an event.
    pub(crate) fn event(&mut self, event: &Event) {
        self.send(ToApi::Event(event.clone()));
    }

    /// The engine of a worker is another one.
    pub(crate) fn engine_serves(&mut self, worker: usize) {
        self.hears.remove(&worker);
    }

    /// Connects it to the engine of a worker, unless it is. Returns the message for the engine.
    ///
    /// # Errors
    /// There is no descriptor left for the sockets.
    pub(crate) fn connect_engine(&mut self, worker: usize) -> io::Result<Option<ToEngine>> {
        if self.hears.contains(&worker) || self.supervisor.process().is_none() {
            return Ok(None);
        }
        let (ours, theirs) = stream_pair()?;
        self.hears.insert(worker);
        self.send(ToApi::Records(ours));
        Ok(Some(ToEngine::Events(theirs)))
    }

    fn send(&mut self, message: ToApi<OwnedFd>) {
        let Some(process) = self.supervisor.process() else {
            return;
        };
        let failure = match self.outgoing.send(process.channel(), message) {
            Ok(()) if self.outgoing.failure().is_some() => "hangs: it takes no answers".into(),
            Ok(()) => return,
            Err(e) => format!("can't be told anything: {e}"),
        };
        self.ended(&failure);
    }

    fn start(&mut self, of: &impl Scraped) {
        self.forget_requests();
        let start = ToApi::Start(Box::new(ApiStart {
            maps: of.map_fds(),
            listener: self.listener.as_fd(),
            may_change: self.may_change,
            owner_rows: of.owner_rows(),
            label_keys: of.label_keys().to_vec(),
            log: self.log.clone(),
        }));
        let role = match self.may_change {
            true => Role::Api,
            false => Role::ApiReader,
        };
        self.outgoing = Outgoing::new(MOST_QUEUED);
        if let Err(how) = self.supervisor.start(role, of.users(), start) {
            self.ended(&how);
        }
        if self.may_change
            && let Some(process) = self.supervisor.process_mut()
        {
            // A VM's definition may come with its TAP.
            process.take_descriptors();
        }
    }

    fn ended(&mut self, how: &str) {
        tracing::warn!(
            "the API's process {how}; guests are served all the same, and it is started again"
        );
        self.forget_requests();
        self.supervisor.ended();
    }

    /// Forgets what the process asked and was given: it is another one from now on.
    fn forget_requests(&mut self) {
        self.pending.clear();
        self.captures.clear();
        self.hears.clear();
    }
}

/// A connected pair of stream sockets, the first for the API's process: non-blocking, for it can't
/// change that.
fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours.into(), theirs.into()))
}
