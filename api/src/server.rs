//! The HTTP server: connections, their bounds, and the dispatch of requests.
//!
//! When the broker ends, or wants this process to, whoever has connected gets an answer: to a request that
//! waits for the broker, and to one that is still read, it is 503. Then connections are closed, and events
//! end.
use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    future::poll_fn,
    io,
    os::unix::net::UnixListener,
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use hyper::{
    Request, StatusCode,
    body::{Body as _, Bytes, Incoming},
    server::conn::http1,
    service::HttpService,
};
use hyper_util::rt::TokioTimer;
use serde::Deserialize;
use slipgate_ipc::channel::Channel;
use tokio::{
    sync::{Notify, Semaphore, watch},
    task::LocalSet,
    time::timeout,
};

use crate::{
    Figures,
    broker::Broker,
    conditions::Conditions,
    connection::{Arrived, Connection},
    events::{Events, Filter, Kinds},
    handlers::{Daemon, Input, MOST_FLOW_LISTS, carry_out, query},
    problem::Problem,
    response::{Content, Response, with},
    routes::{Action, forbidden, route},
};

/// Largest number of simultaneous connections; further ones wait to be accepted.
pub const MOST_CONNECTIONS: usize = 128;
/// Largest number of connections that read events.
pub const MOST_EVENT_READERS: usize = 32;
/// Longest body of a request, bytes: it fits into a message to the broker.
pub const MAX_BODY: usize = 48 << 10;
/// Number of bytes of a body that are read at most.
const MOST_DISCARDED: usize = 1 << 20;
/// Longest head of a request, bytes.
pub const MAX_HEAD: usize = 16 << 10;
/// Time that a client may take to send a head, and then a body.
pub const REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// Time for which connections are accepted and read after the broker's end: what came before is known then.
const LINGER: Duration = Duration::from_millis(20);
/// Time after the broker's end within which clients have their answers.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Media type of events: one JSON object a line.
const NDJSON: &str = "application/x-ndjson";

/// Settings of a server.
pub struct Settings {
    /// Listening socket, on which clients connect.
    pub listener: UnixListener,
    /// Connection to the broker.
    pub channel: Channel,
    /// Source of the figures in answers: VMs, flows, counters.
    pub figures: Box<dyn Figures>,
    /// Whether clients may change anything.
    pub may_change: bool,
}

/// Serves clients until the broker is gone. `ready` is called when everything has been set up.
///
/// # Errors
/// The event loop can't be made, or the channel to the broker fails.
pub fn run<E: From<io::Error>>(
    settings: Settings,
    ready: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let Settings {
            listener,
            channel,
            figures,
            may_change,
        } = settings;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let events = Rc::new(Events::default());
        let (broker, connection) = Broker::new(channel, events.clone());
        let daemon = Rc::new(Daemon {
            broker,
            events,
            figures,
            flow_lists: Arc::new(Semaphore::new(MOST_FLOW_LISTS)),
            may_change,
            page: RefCell::default(),
        });
        ready()?;
        let (end, ends) = watch::channel(false);
        tokio::task::spawn_local(accept(listener, daemon, Ends(ends)));
        let served = connection.run().await;
        end.send_replace(true);
        // Whoever does not read his answer does not keep us.
        let _ = timeout(ENDS_WITHIN, end.closed()).await;
        Ok(served?)
    })
}

/// Tells of the end. It is waited for who has one.
#[derive(Clone)]
struct Ends(watch::Receiver<bool>);

impl Ends {
    /// Waits until the end has come, and what came before it is known.
    async fn come(mut self) -> Self {
        // The sender lives until there is no receiver.
        let _ = self.0.wait_for(|has_come| *has_come).await;
        tokio::time::sleep(LINGER).await;
        self
    }
}

async fn accept(listener: tokio::net::UnixListener, daemon: Rc<Daemon>, ends: Ends) {
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let readers = Arc::new(Semaphore::new(MOST_EVENT_READERS));
    let mut over = pin!(ends.clone().come());
    loop {
        let accepted = async {
            let place = room.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            accepted = accepted => accepted,
            _ = &mut over => return,
        };
        let Ok(place) = place else {
            return;
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Short of descriptors: others are freed as connections end.
                tracing::debug!("accepting a client of the API: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (daemon, readers, ends) = (daemon.clone(), readers.clone(), ends.clone());
        tokio::task::spawn_local(async move {
            let arrived = Rc::new(Arrived::default());
            let connection = Connection::new(stream, daemon.may_change.then(|| arrived.clone()));
            let begun = Rc::new(Notify::new());
            let (begins, of_readers) = (begun.clone(), ends.clone());
            let service = hyper::service::service_fn(move |request| {
                begins.notify_one();
                let (daemon, readers) = (daemon.clone(), (readers.clone(), of_readers.clone()));
                let arrived = arrived.clone();
                async move {
                    let response = respond(&daemon, readers, request, &arrived).await;
                    // What the request did not take is closed.
                    let _ = arrived.take();
                    Ok::<_, Infallible>(response)
                }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_WITHIN)
                .max_buf_size(MAX_HEAD)
                .serve_connection(connection, service);
            let served = finish_in_time(pin!(served), ends, &begun).await;
            if let Err(e) = served {
                tracing::debug!("a client of the API: {e}");
            }
            drop(place);
        });
    }
}

/// Serves a connection to its end, or to that of the request which it has at the end of all.
async fn finish_in_time<S>(
    mut served: Pin<&mut http1::Connection<Connection, S>>,
    ends: Ends,
    begun: &Notify,
) -> hyper::Result<()>
where
    S: HttpService<Incoming, ResBody = Content>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let _ends = tokio::select! {
        biased;
        served = &mut served => return served,
        ends = ends.come() => ends,
    };
    // The first request of a client that has connected is waited for.
    tokio::select! {
        biased;
        served = &mut served => return served,
        () = begun.notified() => {}
    }
    served.as_mut().graceful_shutdown();
    served.await
}

async fn respond(
    daemon: &Rc<Daemon>,
    readers: (Arc<Semaphore>, Ends),
    request: Request<Incoming>,
    arrived: &Arrived,
) -> Response {
    match try_respond(daemon, readers, request, arrived).await {
        Ok(response) => response,
        Err(problem) => problem.into(),
    }
}

async fn try_respond(
    daemon: &Rc<Daemon>,
    readers: (Arc<Semaphore>, Ends),
    request: Request<Incoming>,
    arrived: &Arrived,
) -> Result<Response, Problem> {
    let (head, body) = request.into_parts();
    let (route, parameter) = route(&head.method, head.uri.path())?;
    if route.changes && !daemon.may_change {
        return Err(forbidden(route));
    }
    if route.action == Action::Events {
        return events(daemon, readers, query(&head.uri)?);
    }
    let body = read(body).await?;
    let tap = arrived.take()?;
    if tap.is_some() && route.action != Action::PutVm {
        let detail = "a descriptor came with the request: only PUT /v1/vms/{name} takes one";
        return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
    }
    let input = Input {
        parameter,
        conditions: Conditions::of(&head.headers)?,
        body: &body,
        tap: Cell::new(tap),
    };
    carry_out(daemon, route.action, &head.uri, &input).await
}

/// Reads a body, within its bounds.
async fn read(body: Incoming) -> Result<Bytes, Problem> {
    match timeout(REQUEST_WITHIN, read_all(body)).await {
        Ok(read) => read,
        Err(_) => Err(Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "the body did not come within {} s",
                REQUEST_WITHIN.as_secs()
            ),
        )),
    }
}

/// Reads a body to its end. One that is too long is read a while longer and discarded: a client
/// reads the answer only after it has sent everything.
async fn read_all(mut body: Incoming) -> Result<Bytes, Problem> {
    let mut kept = Vec::new();
    let mut length = 0;
    while length < MOST_DISCARDED {
        let frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        let Some(frame) = frame.transpose().map_err(|e| {
            let detail = format!("the body can't be read: {e}");
            Problem::new(StatusCode::BAD_REQUEST, detail)
        })?
        else {
            break;
        };
        let data = frame.into_data().unwrap_or_default();
        length += data.len();
        if length <= MAX_BODY {
            kept.extend_from_slice(&data);
        }
    }
    if length > MAX_BODY {
        let detail = format!("the body is longer than {MAX_BODY} bytes");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    Ok(kept.into())
}

/// Parameters of a request for events.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct EventsQuery {
    vm: Option<String>,
    kind: Option<String>,
    after: Option<u64>,
}

fn events(
    daemon: &Rc<Daemon>,
    (readers, ends): (Arc<Semaphore>, Ends),
    query: EventsQuery,
) -> Result<Response, Problem> {
    let Ok(place) = readers.try_acquire_owned() else {
        let detail = format!("{MOST_EVENT_READERS} clients read events already: try again");
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
    };
    let kinds = Kinds::parse(query.kind.as_deref().unwrap_or_default());
    let kinds = kinds.map_err(|e| Problem::new(StatusCode::BAD_REQUEST, e.to_string()))?;
    let filter = Filter {
        vm: query.vm,
        kinds,
    };
    let reader = daemon.events.read(filter, query.after);
    // hyper asks for the next part when the client has taken the one before.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
    tokio::task::spawn_local(async move {
        let mut over = pin!(ends.come());
        loop {
            let text = tokio::select! {
                biased;
                () = sender.closed() => break,
                // More may come for as long as there is an engine.
                _ = &mut over => break,
                text = reader.next() => text,
            };
            if sender.send(text.into()).await.is_err() {
                break;
            }
        }
        drop(place);
    });
    Ok(with(StatusCode::OK, NDJSON, Content::Parts(receiver)))
}

#[cfg(test)]
#[path = "server_test.rs"]
mod tests;
