//! The event loop: connections, and the broker's answers.
//!
//! Each connection has a buffer for its request, then one for its answer, and a deadline for both
//! together. The loop blocks in `poll` only. With [`MOST_CLIENTS`] connections the oldest is closed
//! for the next: slow or numerous clients delay only themselves.
//!
//! Making a page reads every slot, so it is made once per [`FRESH`], and all requests within that
//! time get the same page. Before that, the broker is asked for the engine's inventory; the loop
//! waits at most [`NAMES_WITHIN`], and data that has not come by then is left out.
use std::{
    collections::VecDeque,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use slipgate_api::OPENMETRICS;
use slipgate_control::maps::ReadOnlyMaps;
use slipgate_ipc::{
    channel::{Channel, Received},
    metrics::{FromMetrics, ToMetrics},
};

use super::{
    http::{self, MAX_REQUEST, Wanted},
    page::{self, Shown},
};
use crate::show::names::Known;

/// Largest number of simultaneous connections.
const MOST_CLIENTS: usize = 32;
/// Time limit of a connection.
const CLIENT_WITHIN: Duration = Duration::from_secs(5);
/// Time for which a page is reused.
const FRESH: Duration = Duration::from_secs(1);
/// Time limit for the engine's answers.
const NAMES_WITHIN: Duration = Duration::from_millis(500);
/// Bytes read at most after a client's request.
const MOST_UNREAD: usize = 64 << 10;
/// Largest number of inventory pages read for one scrape.
const MOST_PAGES: usize = 256;

pub(super) struct Server {
    maps: ReadOnlyMaps,
    shown: Shown,
    channel: Channel,
    listener: TcpListener,
    clients: VecDeque<Client>,
    /// Inventory that the engines gave last.
    known: Known,
    asking: Option<Asking>,
    page: Option<(Instant, Arc<str>)>,
}

struct Asking {
    until: Instant,
    pages: usize,
    found: Known,
}

struct Client {
    stream: TcpStream,
    until: Instant,
    state: State,
}

enum State {
    Reading(Vec<u8>),
    /// For the page; `head`: without its text.
    Waiting {
        head: bool,
    },
    Writing {
        answer: Vec<u8>,
        sent: usize,
    },
    /// Answered; a limited number of further bytes is read and discarded.
    Ending {
        room: usize,
    },
}

impl Server {
    pub(super) fn new(
        maps: ReadOnlyMaps,
        shown: Shown,
        channel: Channel,
        listener: TcpListener,
    ) -> Self {
        Self {
            maps,
            shown,
            channel,
            listener,
            clients: VecDeque::new(),
            known: Known::default(),
            asking: None,
            page: None,
        }
    }

    /// Serves until the broker is gone.
    pub(super) fn run(&mut self) -> anyhow::Result<()> {
        loop {
            let ready = self.wait()?;
            if ready[0] && !self.hear()? {
                return Ok(());
            }
            if ready[1] {
                self.accept();
            }
            self.serve();
        }
    }

    /// Whether the channel, and whether the listener is ready. Clients are tried in any case.
    fn wait(&self) -> anyhow::Result<[bool; 2]> {
        let now = Instant::now();
        let ends = self.clients.iter().map(|client| client.until);
        let first = ends
            .chain(self.asking.iter().map(|asking| asking.until))
            .min();
        let timeout = first.map_or(PollTimeout::NONE, |first| {
            let left = first.saturating_duration_since(now) + Duration::from_millis(1);
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![input(self.channel.as_fd()), input(self.listener.as_fd())];
        fds.extend(self.clients.iter().filter_map(|client| {
            let flags = match client.state {
                State::Reading(_) | State::Ending { .. } => PollFlags::POLLIN,
                State::Waiting { .. } => return None,
                State::Writing { .. } => PollFlags::POLLOUT,
            };
            Some(PollFd::new(client.stream.as_fd(), flags))
        }));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("waiting for scrapers"),
        }
        Ok([0, 1].map(|at: usize| fds[at].any().unwrap_or(true)))
    }

    /// Takes the broker's answers; `false` when it is gone.
    fn hear(&mut self) -> anyhow::Result<bool> {
        loop {
            match self.channel.try_receive::<ToMetrics>()? {
                Received::Nothing => return Ok(true),
                Received::End => return Ok(false),
                Received::Message(ToMetrics::Start(_)) => {}
                Received::Message(ToMetrics::Inventory(page)) => {
                    let Some(asking) = &mut self.asking else {
                        continue;
                    };
                    asking.pages += 1;
                    let next = page.next_with_vms();
                    asking.found.add(page);
                    let more = match next {
                        Some(from) if asking.pages < MOST_PAGES => {
                            let ask = FromMetrics::Inventory { from };
                            self.channel.try_send(ask).unwrap_or(false)
                        }
                        _ => false,
                    };
                    if !more {
                        self.known = std::mem::take(&mut asking.found);
                        self.make_page();
                    }
                }
            }
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() >= MOST_CLIENTS {
                self.clients.pop_front();
            }
            self.clients.push_back(Client {
                stream,
                until: Instant::now() + CLIENT_WITHIN,
                state: State::Reading(Vec::new()),
            });
        }
    }

    fn serve(&mut self) {
        let now = Instant::now();
        if self
            .asking
            .as_ref()
            .is_some_and(|asking| asking.until <= now)
        {
            self.make_page();
        }
        let mut clients = std::mem::take(&mut self.clients);
        clients.retain_mut(|client| client.until > now && self.keeps(client));
        self.clients = clients;
    }

    /// Serves a client as far as its socket allows; `false` when the connection is over.
    fn keeps(&mut self, client: &mut Client) -> bool {
        let later = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        let advanced = self.advance(client);
        advanced.map_or_else(|e| later.contains(&e.kind()), |()| true)
    }

    /// Serves a connection as far as possible without blocking.
    ///
    /// # Errors
    /// The connection has ended.
    fn advance(&mut self, client: &mut Client) -> io::Result<()> {
        if let State::Reading(request) = &mut client.state {
            let mut bytes = [0; 1_024];
            let wanted = loop {
                if let Some(wanted) = http::read(request) {
                    break wanted;
                }
                let room = bytes.len().min(MAX_REQUEST - request.len());
                match client.stream.read(&mut bytes[..room])? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    n => request.extend_from_slice(&bytes[..n]),
                }
            };
            client.state = match wanted {
                Wanted::Metrics { head } => State::Waiting { head },
                Wanted::Refused(status, why) => State::Writing {
                    answer: http::answer(status, "text/plain", &format!("{why}\n"), false),
                    sent: 0,
                },
            };
        }
        if let State::Waiting { head } = client.state
            && let Some(page) = self.page()
        {
            let answer = http::answer(200, OPENMETRICS, &page, head);
            client.state = State::Writing { answer, sent: 0 };
        }
        if let State::Writing { answer, sent } = &mut client.state {
            while *sent < answer.len() {
                *sent += client.stream.write(&answer[*sent..])?;
            }
            // A socket that is closed with something to read sends a reset, and the answer is lost.
            client.stream.shutdown(Shutdown::Write)?;
            client.state = State::Ending { room: MOST_UNREAD };
        }
        if let State::Ending { room } = &mut client.state {
            let mut bytes = [0; 1_024];
            while *room > 0 {
                match client.stream.read(&mut bytes)? {
                    0 => break,
                    n => *room = room.saturating_sub(n),
                }
            }
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The page, if there is a fresh one; else it is under way from now on.
    fn page(&mut self) -> Option<Arc<str>> {
        match &self.page {
            Some((made, page)) if made.elapsed() < FRESH => return Some(page.clone()),
            _ => {}
        }
        if self.asking.is_none() {
            let asked = self.channel.try_send(FromMetrics::Inventory { from: 0 });
            if !asked.unwrap_or(false) {
                self.make_page();
                return self.page.as_ref().map(|(_, page)| page.clone());
            }
            self.asking = Some(Asking {
                until: Instant::now() + NAMES_WITHIN,
                pages: 0,
                found: Known::default(),
            });
        }
        None
    }

    fn make_page(&mut self) {
        self.asking = None;
        let page = page::make(&self.maps, &self.shown, &self.known);
        self.page = Some((Instant::now(), page.into()));
    }
}
