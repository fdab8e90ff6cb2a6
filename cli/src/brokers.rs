//! The brokers that serve VMs in this network namespace, and requests to them.
use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use slipgate_broker::DAEMON_SOCKET;
pub(crate) use slipgate_broker::paths;
use slipgate_ipc::{
    client::{ClientAnswer, ClientError, ClientRequest, Target, ask},
    engine::{EngineReply, EngineRequest},
};

/// Error message when no broker runs.
pub(crate) const NOBODY: &str =
    "no slipgate runs in this network namespace: start `slipgate attach` or `slipgate run`";
/// Error message for an answer that does not fit the question.
pub(crate) const ANOTHER_ANSWER: &str =
    "an answer to another question: the broker is of another version";

/// Error message when no daemon runs.
const NO_DAEMON: &str =
    "no daemon serves this network namespace: start `slipgate serve`, or use `slipgate attach`";

/// Asks the daemon of this network namespace.
pub(crate) fn ask_daemon(
    pin_dir: &Path,
    request: ClientRequest<BorrowedFd<'_>>,
) -> anyhow::Result<ClientAnswer> {
    match ask(&paths(pin_dir)?.run_dir.join(DAEMON_SOCKET), request) {
        Ok(ClientAnswer::Error { error, .. }) => bail!(error),
        Err(e) if e.is_nobodys() => bail!(NO_DAEMON),
        other => Ok(other?),
    }
}

/// The control socket of the daemon of this network namespace, if there is a daemon. It is asked nothing:
/// that would be one more wait for it, and what it could refuse, it refuses when it is to serve a VM.
pub(crate) fn daemon(pin_dir: &Path) -> anyhow::Result<Option<PathBuf>> {
    let socket = paths(pin_dir)?.run_dir.join(DAEMON_SOCKET);
    match UnixStream::connect(&socket) {
        Ok(_) => Ok(Some(socket)),
        Err(source) => {
            // Who may not ask could not serve a VM either, and is told so there.
            let may_not = source.kind() == io::ErrorKind::PermissionDenied;
            let path = socket;
            match (ClientError::Io { path, source }) {
                e if may_not || e.is_nobodys() => Ok(None),
                e => Err(e.into()),
            }
        }
    }
}

/// The control sockets of this network namespace's brokers.
pub(crate) fn sockets(pin_dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let dir = paths(pin_dir)?.run_dir;
    let entries = match dir.read_dir() {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => {
            return Err(e).with_context(|| {
                format!(
                    "looking for control sockets in {}: they are for root",
                    dir.display()
                )
            });
        }
    };
    Ok(entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "sock"))
        .collect())
}

/// Makes a request for an engine about a VM or a flow.
pub(crate) fn of_engine<F>(about: Target, ask: EngineRequest<F>) -> ClientRequest<F> {
    ClientRequest::Engine {
        about: Some(about),
        ask,
    }
}

/// Results of asking every broker, when none served the request.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// VMs that they serve.
    served: Vec<String>,
    errors: Vec<String>,
    any: bool,
}

/// Sends the request to every broker here in turn, until one serves it; several may serve VMs.
/// Errors of brokers that do not serve the VM or the flow are left to [`Asked::error`].
pub(crate) fn ask_each(
    pin_dir: &Path,
    request: &ClientRequest<BorrowedFd<'_>>,
) -> anyhow::Result<Result<ClientAnswer, Asked>> {
    let mut asked = Asked::default();
    for socket in sockets(pin_dir)? {
        match ask(&socket, request.clone()) {
            Ok(ClientAnswer::UnknownVm { served }) => {
                asked.any = true;
                asked.served.extend(served);
            }
            Ok(ClientAnswer::Engine {
                reply: EngineReply::UnknownFlow,
            }) => asked.any = true,
            Ok(ClientAnswer::Error { error, .. }) => asked.errors.push(error),
            Ok(answer) => return Ok(Ok(answer)),
            // One that was killed has left it.
            Err(e) if e.is_nobodys() => {}
            Err(e) => asked.errors.push(format!("{:#}", anyhow::Error::from(e))),
        }
    }
    Ok(Err(asked))
}

/// Sends a request whose only answer is [`ClientAnswer::Done`]. `what`: the VM or flow of the
/// request.
pub(crate) fn have_done(
    pin_dir: &Path,
    request: &ClientRequest<BorrowedFd<'_>>,
    what: &str,
) -> anyhow::Result<()> {
    match ask_each(pin_dir, request)? {
        Ok(ClientAnswer::Done) => Ok(()),
        Ok(_) => bail!(ANOTHER_ANSWER),
        Err(asked) => Err(asked.error(what)),
    }
}

impl Asked {
    /// Whether nobody here serves what was asked about.
    pub(crate) fn is_unknown(&self) -> bool {
        self.errors.is_empty()
    }

    /// Error that no broker served the request; `what` is the VM or flow in question.
    pub(crate) fn error(self, what: &str) -> anyhow::Error {
        if !self.errors.is_empty() {
            return anyhow::anyhow!("{}", self.errors.join("; "));
        }
        if !self.any {
            return anyhow::anyhow!(NOBODY);
        }
        match self.served.is_empty() {
            true => anyhow::anyhow!(
                "no flow {what} lives here; `slipgate flows` lists those that do, by their id"
            ),
            false => no_such_vm(what, self.served),
        }
    }
}

/// Error for a VM that is not among the served ones.
pub(crate) fn no_such_vm(vm: &str, mut served: Vec<String>) -> anyhow::Error {
    served.sort();
    let names = served.join(", ");
    anyhow::anyhow!("no VM {vm:?} is served; there is {names}")
}
