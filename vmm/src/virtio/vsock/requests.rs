//! Requests of the guest for connections to programs of the host: another process connects, because
//! no thread of this one may make a socket.
use std::{
    cell::Cell,
    fmt, io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd, RawFd},
    time::{Duration, Instant},
};

use super::MAX_REQUESTS;

/// Time in which a request has to be answered. Linux's guests wait as long by default.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// Whoever connects the guest to programs of the host. Its descriptor is readable when there is an
/// answer, or when it is gone. It answers each request once.
pub trait Connector: AsFd + fmt::Debug + Send {
    /// Asks for a connection to the program at a port of the host. It does not wait. `id`: returned
    /// with the answer.
    ///
    /// # Errors
    /// It is gone, or takes nothing now.
    fn ask(&self, id: u32, port: u32) -> io::Result<()>;

    /// Returns the next answer, without waiting; `None` if there is none yet.
    ///
    /// # Errors
    /// It is gone.
    fn next(&self) -> io::Result<Option<Answer>>;
}

/// Answer to a request.
#[derive(Debug)]
pub struct Answer {
    /// Number of the request.
    pub id: u32,
    /// The socket to the program, a non-blocking stream; `None`: no program is there.
    pub socket: Option<OwnedFd>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No program is there.
    Program,
    /// There are too many connections, or too many requests without an answer.
    Full,
    /// Nobody answers.
    Silence,
}

/// The requests under way, whatever became of their connections: those of a driver that was reset
/// too, so that there are never more.
#[derive(Debug)]
pub(super) struct Requests {
    connector: Option<Box<dyn Connector>>,
    /// Time in which each has to be answered.
    within: Duration,
    is_gone: Cell<bool>,
    next_id: Cell<u32>,
    under_way: Cell<usize>,
}

impl Requests {
    /// Without a connector every request is refused.
    pub(super) fn new(connector: Option<Box<dyn Connector>>, within: Duration) -> Requests {
        Requests {
            connector,
            within,
            is_gone: Cell::new(false),
            next_id: Cell::new(0),
            under_way: Cell::new(0),
        }
    }

    /// Returns the descriptor on which answers come, while there may be any.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        let connector = self.connector.as_ref().filter(|_| !self.is_gone.get());
        connector.map(|connector| connector.as_fd().as_raw_fd())
    }

    /// Returns whether an answer is still to come.
    pub(super) fn are_under_way(&self) -> bool {
        self.under_way.get() > 0
    }

    /// Asks for a connection to the program at this port. Returns the request's number, and the time
    /// at which it has to be answered.
    pub(super) fn ask(&self, port: u32) -> Result<(u32, Instant), Refusal> {
        let Some(connector) = &self.connector else {
            return Err(Refusal::Program);
        };
        if self.is_gone.get() {
            return Err(Refusal::Silence);
        }
        if self.under_way.get() >= MAX_REQUESTS {
            return Err(Refusal::Full);
        }
        let id = self.next_id.get();
        connector.ask(id, port).map_err(|_| Refusal::Silence)?;
        self.next_id.set(id.wrapping_add(1));
        self.under_way.set(self.under_way.get() + 1);
        Ok((id, Instant::now() + self.within))
    }

    /// Returns the next answer; `None` if there is none yet.
    ///
    /// # Errors
    /// No answer comes any more.
    pub(super) fn next(&self) -> Result<Option<Answer>, Refusal> {
        let Some(connector) = self.connector.as_ref().filter(|_| !self.is_gone.get()) else {
            return Err(Refusal::Silence);
        };
        match connector.next() {
            Ok(Some(answer)) => {
                self.under_way.set(self.under_way.get().saturating_sub(1));
                Ok(Some(answer))
            }
            Ok(None) => Ok(None),
            Err(_) => {
                self.is_gone.set(true);
                Err(Refusal::Silence)
            }
        }
    }
}

#[cfg(test)]
#[path = "requests_test.rs"]
pub(super) mod tests;
