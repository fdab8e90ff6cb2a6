//! The end of the flows that a VM has of a guest which does not run any more.
//!
//! They are ended by the broker that serves the VM, by a request like that of `slipgate generation`. Its
//! engine may hang, or be replaced just then: a daemon has another one within some ten seconds, and the
//! request is made again meanwhile.
use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use slipgate_ipc::{
    client::{ClientAnswer, ClientError, ClientRequest, ErrorKind, Target, ask_within},
    engine::{EngineReply, EngineRequest},
};

use crate::asking::Asking;

/// Time within which the flows have to be ended, for instance while another engine is started: twice
/// what a broker takes to notice that one hangs.
pub(crate) const ENDED_WITHIN: Duration = Duration::from_secs(20);
/// Between two requests to end them.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// What to do where asking again may not help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// Ask again, whatever the reason: another daemon may come.
    ForAnything,
    /// Ask again only where the daemon is there and is to be asked again.
    ForTheEngine,
}

/// The end of a VM's flows, while it is under way in a thread.
#[derive(Debug)]
pub(crate) struct EndingFlows(Asking<Result<u64, String>>);

impl EndingFlows {
    /// Has the daemon behind a socket end the flows of a VM.
    ///
    /// # Errors
    /// No thread can be made.
    pub(crate) fn begin(daemon: PathBuf, name: String) -> anyhow::Result<Self> {
        let end = move || end_flows(&daemon, &name, ENDED_WITHIN, Patience::ForTheEngine);
        Asking::begin("former", end).map(Self)
    }

    /// Readable when [`EndingFlows::result`] does not wait.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Waits until they have ended. Returns how many there were.
    ///
    /// # Errors
    /// They can't be ended, or not in time; the text says why.
    pub(crate) fn result(self) -> Result<u64, String> {
        let result = self.0.answer();
        result.unwrap_or_else(|_| Err("the thread that asks has failed".into()))
    }
}

/// Has the broker behind a socket end the flows of a VM, of which its guest does not know. Returns how
/// many there were.
///
/// # Errors
/// They are not ended in time, or there is nobody who will; the text says why.
pub(crate) fn end_flows(
    socket: &Path,
    name: &str,
    within: Duration,
    patience: Patience,
) -> Result<u64, String> {
    let until = Instant::now() + within;
    loop {
        // An answer that takes longer than what is left is none. Zero would be no limit.
        let left = until.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let request = ClientRequest::Engine {
            about: Some(Target::Vm(name.to_owned())),
            ask: EngineRequest::EndGeneration,
        };
        let answer = ask_within(socket, request, left);
        let is_final = patience == Patience::ForTheEngine && !is_passing(&answer);
        let why = match answer {
            Ok(ClientAnswer::Engine {
                reply: EngineReply::Cut { flows },
            }) => return Ok(flows),
            Ok(ClientAnswer::Error { error, .. }) => error,
            Ok(ClientAnswer::UnknownVm { .. }) => format!("it serves no VM {name:?}"),
            Ok(_) => "an answer to another question".to_owned(),
            Err(e) if e.is_nobodys() => format!("no daemon is at {} any more", socket.display()),
            Err(e) => format!("{:#}", anyhow::Error::from(e)),
        };
        if is_final || Instant::now() >= until {
            return Err(why);
        }
        thread::sleep(ASK_AGAIN);
    }
}

/// Whether the same question may have another answer a little later.
fn is_passing(answer: &Result<ClientAnswer, ClientError>) -> bool {
    match answer {
        Ok(ClientAnswer::Error { kind, .. }) => *kind == ErrorKind::Busy,
        Ok(_) | Err(ClientError::Foreign { .. }) => false,
        // A daemon that ends has closed the connection, and the next question finds nobody.
        Err(e) => !e.is_nobodys(),
    }
}

#[cfg(test)]
#[path = "former_flows_test.rs"]
mod tests;
