//! The connection to the broker: requests with numbers, answered in any order.
//!
//! The broker takes one message at a time without waiting, so what has no room in the channel waits
//! here. Requests beyond [`MOST_WAITING`] are refused at once.
use std::{collections::HashMap, io, os::fd::OwnedFd, rc::Rc, time::Duration};

use hyper::StatusCode;
use slipgate_ipc::{
    api::{ApiRequest, FromApi, ToApi},
    channel::{Channel, Packet, Received},
    client::{ClientAnswer, ErrorKind, PassedOrder, SAVED_WITHIN},
    engine::{EngineInventory, EngineReply, Silence, VmId},
};
use tokio::{
    io::unix::AsyncFd,
    sync::{
        mpsc::{self, error::TrySendError},
        oneshot,
    },
    task::spawn_local,
    time::timeout,
};

use crate::{events::Events, problem::Problem, records};

/// Largest number of requests that wait for the broker.
pub const MOST_WAITING: usize = 256;
/// Time within which the broker answers: a change may end many flows, or read long lists.
const ANSWER_WITHIN: Duration = Duration::from_secs(150);
/// Time within which an engine tells of a VM's activity. Who reads a VM does not wait for one that hangs
/// until that is replaced.
const ACTIVITY_WITHIN: Duration = Duration::from_secs(1);
/// Largest number of inventory pages that are read for one request.
const MOST_PAGES: usize = 1_024;

/// Handle to the connection; cheap to clone.
#[derive(Clone, Debug)]
pub struct Broker {
    requests: mpsc::Sender<Ask>,
}

#[derive(Debug)]
struct Ask {
    request: ApiRequest,
    answer: oneshot::Sender<Answered>,
}

/// An answer, and the socket that came with it.
pub type Answered = (ClientAnswer, Option<OwnedFd>);

impl Broker {
    /// Makes a handle, and the task that serves it until the broker is gone.
    pub fn new(channel: Channel, events: Rc<Events>) -> (Self, Connection) {
        let (requests, asked) = mpsc::channel(MOST_WAITING);
        let connection = Connection {
            channel,
            events,
            asked,
            waiting: HashMap::new(),
            last: 0,
        };
        (Self { requests }, connection)
    }

    /// Asks the broker, and waits for its answer.
    ///
    /// # Errors
    /// Too many requests wait, or the broker is gone.
    pub async fn ask(&self, request: ApiRequest) -> Result<ClientAnswer, Problem> {
        self.ask_for_stream(request).await.map(|(answer, _)| answer)
    }

    /// The same; returns what came with the answer, too.
    ///
    /// # Errors
    /// Too many requests wait, or the broker is gone.
    pub async fn ask_for_stream(&self, request: ApiRequest) -> Result<Answered, Problem> {
        let within = time_for(&request);
        let (answer, answered) = oneshot::channel();
        let ask = Ask { request, answer };
        self.requests.try_send(ask).map_err(|e| match e {
            TrySendError::Full(_) => {
                let detail = "too many requests wait for the daemon: try again";
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            }
            TrySendError::Closed(_) => ends(),
        })?;
        match timeout(within, answered).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) if self.requests.is_closed() => Err(ends()),
            _ => {
                let detail = "the daemon did not answer: try again";
                Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
            }
        }
    }

    /// Reads a page of the data that only the engines have; `None` where the last engine does not answer.
    /// In place of another one's page comes one that leads to those behind it. `from`: 0, or
    /// [`EngineInventory::next`] of the page before.
    ///
    /// # Errors
    /// Those of [`Self::ask`], and an answer that is none to this.
    pub(crate) async fn page(&self, from: u64) -> Result<Option<EngineInventory>, Problem> {
        match self.ask(ApiRequest::Inventory { from }).await? {
            ClientAnswer::Engine {
                reply: EngineReply::Inventory(page),
            } => Ok(Some(page)),
            ClientAnswer::Error {
                kind: ErrorKind::Busy,
                ..
            } => Ok(None),
            other => {
                let detail = format!("the daemon did not tell what its engines have: {other:?}");
                Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
            }
        }
    }

    /// Reads the data that only the engines have of VMs and links, page by page. An engine that does
    /// not answer contributes nothing. Flows, which may be a million, are left out.
    pub async fn inventory(&self) -> Vec<EngineInventory> {
        let mut pages = Vec::new();
        let mut from = 0;
        while pages.len() < MOST_PAGES {
            let Ok(Some(mut page)) = self.page(from).await else {
                break;
            };
            let next = page.next_with_vms();
            (page.flows, page.relayed_flows) = <_>::default();
            pages.push(page);
            match next {
                Some(next) if next > from => from = next,
                _ => break,
            }
        }
        pages
    }

    /// Asks the engine of a VM how long it has been silent, page by page. `id`: the VM that is meant.
    /// `None`: the engine does not tell within [`ACTIVITY_WITHIN`], as while it takes flows over, or the
    /// name is another VM's by now.
    pub async fn silence(&self, vm: &str, id: VmId) -> Option<Silence> {
        let pages = self.pages_of_silence(vm, id);
        timeout(ACTIVITY_WITHIN, pages).await.ok().flatten()
    }

    async fn pages_of_silence(&self, vm: &str, id: VmId) -> Option<Silence> {
        let mut known: Option<Silence> = None;
        let mut from = 0;
        for _ in 0..MOST_PAGES {
            let request = ApiRequest::Activity {
                vm: vm.to_owned(),
                from,
            };
            let Ok(ClientAnswer::Engine {
                reply: EngineReply::Activity(page),
            }) = self.ask(request).await
            else {
                return None;
            };
            if page.vm != id {
                return None;
            }
            known = Some(known.map_or(page.silence, |known| known.with(page.silence)));
            match page.next {
                // From the last flows to the first.
                Some(next) if next > 0 && (from == 0 || next < from) => from = next,
                _ => break,
            }
        }
        known
    }
}

/// The problem of a request that comes, or waits, when the broker ends.
fn ends() -> Problem {
    let detail = "slipgate ends, and may not have done this: look again when it serves again";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
}

/// Time within which a request is answered.
fn time_for(request: &ApiRequest) -> Duration {
    match request {
        ApiRequest::OrderMachine {
            order: PassedOrder::Snapshot { .. },
            ..
        } => SAVED_WITHIN + ANSWER_WITHIN,
        _ => ANSWER_WITHIN,
    }
}

/// The task that owns the channel.
#[derive(Debug)]
pub struct Connection {
    channel: Channel,
    events: Rc<Events>,
    asked: mpsc::Receiver<Ask>,
    /// Receivers of pending answers, by the request's number.
    waiting: HashMap<u64, oneshot::Sender<Answered>>,
    last: u64,
}

impl Connection {
    /// Serves the handles until the broker is gone.
    ///
    /// # Errors
    /// The channel fails.
    pub async fn run(self) -> io::Result<()> {
        let Self {
            channel,
            events,
            mut asked,
            mut waiting,
            mut last,
        } = self;
        #[expect(
            deprecated,
            reason = "the channel owns its descriptor for as long as it lives"
        )]
        let channel = AsyncFd::new(channel)?;
        loop {
            // Receivers that have gone away do not fill the table.
            waiting.retain(|_, sender| !sender.is_closed());
            let has_room = waiting.len() < MOST_WAITING;
            tokio::select! {
                ready = channel.readable() => {
                    let mut ready = ready?;
                    match ready.get_inner().try_receive::<ToApi>().map_err(io::Error::other)? {
                        Received::Nothing => ready.clear_ready(),
                        Received::End => return Ok(()),
                        Received::Message(ToApi::Answer { id, answer, stream }) => {
                            if let Some(sender) = waiting.remove(&id) {
                                // Its client may be gone.
                                let _ = sender.send((*answer, stream));
                            }
                        }
                        Received::Message(ToApi::Event(event)) => events.add(&event),
                        Received::Message(ToApi::Records(from)) => {
                            spawn_local(records::pass_on(from, events.clone()));
                        }
                        Received::Message(ToApi::Start(_)) => {}
                    }
                }
                Some(Ask { request, answer }) = asked.recv(), if has_room => {
                    last += 1;
                    let packet = Packet::new(FromApi { id: last, request });
                    let packet = packet.map_err(io::Error::other)?;
                    waiting.insert(last, answer);
                    loop {
                        let mut ready = channel.writable().await?;
                        match ready.get_inner().try_send_packet(&packet) {
                            Ok(true) => break,
                            Ok(false) => ready.clear_ready(),
                            // Longer than a packet: it is answered by a problem.
                            Err(e) => {
                                tracing::debug!("{e}");
                                waiting.remove(&last);
                                break;
                            }
                        }
                    }
                }
            }
        }
    }
}
