//! VMs that are brought to the daemon of the network namespace, and taken away again.
//!
//! What is kept open meanwhile is a socket: when it is closed, however this process ends, the
//! daemon removes the VM. A daemon that starts again finds the VM as it was, and waits for us; a
//! byte on the socket says that the VM was removed by somebody else.
mod machine;

use std::{
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
};
use slipgate_ipc::client::{
    ClientAnswer, ClientError, ClientRequest, ErrorKind, VmDefinition, VmStatus, ask,
};

pub(crate) use self::machine::JoinedMachine;
use crate::{
    asking::{Asking, StoppedEarly, signal_to_stop, timeout_of},
    serve::signals,
};

/// How long another daemon is waited for.
const DAEMON_WITHIN: Duration = Duration::from_secs(20);
/// Time within which a daemon has to serve a TAP that has come, and after which it is said that this is
/// waited for.
const SERVED_WITHIN: Duration = Duration::from_secs(20);
const SAYS_AFTER: Duration = Duration::from_secs(1);
/// Between two questions whether it does: at first, and at most.
const ASK_AGAIN: Duration = Duration::from_millis(2);
const ASK_AGAIN_AT_MOST: Duration = Duration::from_millis(50);
/// Between two questions whether there is one, ms.
const ASK_EVERY_MS: u16 = 200;

/// How a VM is this process's.
#[derive(Clone, Debug)]
enum Claim {
    /// It is brought, and goes with this process, unless somebody has it kept.
    Brought {
        definition: Box<VmDefinition>,
        uplink: Option<String>,
    },
    /// It is kept by the daemon, and has its machine here.
    Kept { name: String },
}

impl Claim {
    fn name(&self) -> &str {
        match self {
            Self::Brought { definition, .. } => &definition.name,
            Self::Kept { name } => name,
        }
    }

    /// Has the daemon serve the VM for this process. Returns the lifeline, and the VM as it is served.
    /// `returns`: another daemon did so before.
    fn make(&self, daemon: &Path, returns: bool) -> Made {
        let (ours, theirs) = UnixStream::pair().context("making a pair of sockets")?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let lifeline = theirs.as_fd();
        let request = match self {
            Self::Brought { definition, uplink } => ClientRequest::ServeVm {
                vm: definition.clone(),
                uplink: uplink.clone(),
                returns,
                lifeline,
            },
            Self::Kept { name } => ClientRequest::RunVm {
                name: name.clone(),
                lifeline,
            },
        };
        match ask(daemon, request)? {
            ClientAnswer::Vm { vm, .. } => Ok((ours, *vm)),
            ClientAnswer::UnknownVm { .. } => {
                bail!("the daemon has no VM {:?} any more", self.name())
            }
            ClientAnswer::Error {
                error,
                kind: ErrorKind::Busy,
            } => Err(Busy(error).into()),
            ClientAnswer::Error { error, .. } => bail!(error),
            _ => bail!("the daemon gave another answer: it is of another version"),
        }
    }

    /// As [`Claim::make`], in a thread.
    fn begin(&self, daemon: &Path, returns: bool) -> anyhow::Result<Asking<Made>> {
        let (daemon, claim) = (daemon.to_owned(), self.clone());
        Asking::begin("daemon", move || claim.make(&daemon, returns))
    }
}

/// What [`Claim::make`] returns.
type Made = anyhow::Result<(UnixStream, VmStatus)>;

/// A VM that the daemon serves for this process.
#[derive(Debug)]
pub(crate) struct JoinedVm {
    daemon: PathBuf,
    claim: Claim,
    /// The VM as it was when it was claimed.
    pub(crate) claimed: VmStatus,
    lifeline: UnixStream,
    /// The search for another daemon, while there is none.
    search: Option<Search>,
    /// Whether the lifeline is one that [`JoinedVm::new_line`] has not returned yet.
    has_new_line: bool,
}

/// The search for another daemon.
#[derive(Debug)]
struct Search {
    until: Instant,
    asking: Option<Asking<Made>>,
}

/// News about a VM that a daemon serves for this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum News {
    /// Nothing has happened since.
    None,
    /// The daemon has ended.
    DaemonGone,
    /// Somebody has removed the VM.
    Removed,
}

impl JoinedVm {
    /// Has the daemon serve a VM. `uplink`: the device by which it is to leave, if that matters.
    ///
    /// # Errors
    /// The daemon does not serve it, and the error says why; or a signal asks to stop ([`StoppedEarly`]).
    pub(crate) fn join(
        daemon: &Path,
        definition: VmDefinition,
        uplink: Option<String>,
        signals: &SignalFd,
    ) -> anyhow::Result<Self> {
        let claim = Claim::Brought {
            definition: Box::new(definition),
            uplink,
        };
        let asking = claim.begin(daemon, false)?;
        let (lifeline, claimed) = asking.answer_unless_stopped(signals)??;
        Ok(Self::with(daemon, claim, lifeline, claimed))
    }

    /// Becomes the machine of a VM that the daemon keeps, once it serves the TAP, which is there.
    ///
    /// # Errors
    /// The VM is not there, is not kept, or has another machine; its TAP is not served in time; or a signal
    /// asks to stop ([`StoppedEarly`]).
    pub(crate) fn run_as(daemon: &Path, name: &str, signals: &SignalFd) -> anyhow::Result<Self> {
        Self::run_as_once(daemon, name, signals, |waits| tracing::warn!("{waits}"))
    }

    /// `say` is told of a wait that takes long.
    fn run_as_once(
        daemon: &Path,
        name: &str,
        signals: &SignalFd,
        say: impl FnOnce(String),
    ) -> anyhow::Result<Self> {
        let claim = Claim::Kept {
            name: name.to_owned(),
        };
        let began = Instant::now();
        let most_s = SERVED_WITHIN.as_secs();
        let mut say = Some(say);
        let mut pause = ASK_AGAIN;
        loop {
            let asking = claim.begin(daemon, false)?;
            if say.is_some()
                && !asking.is_over_within(signals, SAYS_AFTER)?
                && let Some(say) = say.take()
            {
                say(format!(
                    "{name} waits: the daemon was asked to take its machine, and has not answered yet"
                ));
            }
            let why = match asking.answer_unless_stopped(signals)? {
                Ok((lifeline, claimed)) => return Ok(Self::with(daemon, claim, lifeline, claimed)),
                Err(e) if e.is::<Busy>() => e,
                Err(e) => return Err(e),
            };
            if began.elapsed() >= SERVED_WITHIN {
                return Err(why.context(format!(
                    "the daemon has not taken the machine of {name} in {most_s} s"
                )));
            }
            if began.elapsed() >= SAYS_AFTER
                && let Some(say) = say.take()
            {
                say(format!(
                    "{name} waits until the daemon takes its machine, {most_s} s at most in all: {why}"
                ));
            }
            if let Some(signal) = stop_within(signals, pause)? {
                return Err(StoppedEarly { signal }.into());
            }
            pause = (2 * pause).min(ASK_AGAIN_AT_MOST);
        }
    }

    fn with(daemon: &Path, claim: Claim, lifeline: UnixStream, claimed: VmStatus) -> Self {
        Self {
            daemon: daemon.to_owned(),
            claim,
            claimed,
            lifeline,
            search: None,
            has_new_line: true,
        }
    }

    /// Name of the VM.
    fn name(&self) -> &str {
        self.claim.name()
    }

    /// Readable when there is news; `None` while another daemon is waited for.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.search.is_none().then(|| self.lifeline.as_fd())
    }

    /// A copy of the lifeline, for notices of a machine to the daemon; `None` if this one was returned
    /// before.
    pub(crate) fn new_line(&mut self) -> Option<UnixStream> {
        std::mem::take(&mut self.has_new_line)
            .then(|| self.lifeline.try_clone().ok())
            .flatten()
    }

    fn news(&mut self) -> News {
        match self.lifeline.read(&mut [0; 8]) {
            Ok(0) => News::DaemonGone,
            Ok(_) => News::Removed,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => News::None,
            Err(_) => News::DaemonGone,
        }
    }

    /// Has another daemon serve the VM, once there is one. Does not block.
    fn look_for_daemon(&mut self) -> anyhow::Result<()> {
        let search = self.search.get_or_insert_with(|| {
            tracing::warn!("the daemon has ended; waiting for another one");
            Search {
                until: Instant::now() + DAEMON_WITHIN,
                asking: None,
            }
        });
        let name = self.claim.name();
        if let Some(asking) = &search.asking {
            let answer = asking.answer_if_over();
            let Some(answer) = answer.context("the thread that asks has failed")? else {
                return Ok(());
            };
            match answer {
                Ok((lifeline, _)) => {
                    tracing::info!("{name} is served by another daemon");
                    self.lifeline = lifeline;
                    self.has_new_line = true;
                    self.search = None;
                    return Ok(());
                }
                Err(e) if !is_passing(&e) || Instant::now() >= search.until => {
                    return Err(e.context(format!("the daemon that served {name} has ended")));
                }
                Err(_) => {}
            }
        }
        search.asking = match self.claim.begin(&self.daemon, true) {
            Ok(asking) => Some(asking),
            Err(e) if Instant::now() >= search.until => {
                return Err(e.context(format!("the daemon that served {name} has ended")));
            }
            // This process may have too many files open at present: the next turn tries again.
            Err(e) => {
                tracing::debug!("{name}: another daemon could not be asked: {e:#}");
                None
            }
        };
        Ok(())
    }

    /// Goes on: whether somebody has removed the VM.
    ///
    /// # Errors
    /// There is no other daemon in time, or it does not serve the VM.
    pub(crate) fn turn(&mut self) -> anyhow::Result<bool> {
        match self.news() {
            News::Removed => return Ok(true),
            News::DaemonGone => self.look_for_daemon()?,
            News::None => {}
        }
        Ok(false)
    }

    /// Longest time until [`JoinedVm::turn`] is due.
    pub(crate) fn timeout(&self) -> Option<PollTimeout> {
        let search = self.search.as_ref();
        search.map(|_| PollTimeout::from(ASK_EVERY_MS))
    }

    /// Has the daemon remove the VM, and waits until its flows have ended. One that is kept stays.
    ///
    /// # Errors
    /// The daemon does not answer, or can't remove it now.
    pub(crate) fn leave(self) -> anyhow::Result<()> {
        if self.search.is_some() {
            // The next daemon removes it, as nobody comes back for it.
            return Ok(());
        }
        let Claim::Brought { definition, .. } = self.claim else {
            return Ok(());
        };
        let name = definition.name;
        let answer = match ask(&self.daemon, ClientRequest::LeaveVm { name }) {
            // The next one removes it, as nobody comes back for it.
            Err(e) if e.is_nobodys() => return Ok(()),
            answer => answer?,
        };
        match answer {
            ClientAnswer::Done | ClientAnswer::UnknownVm { .. } => Ok(()),
            ClientAnswer::Error { error, .. } => bail!(error),
            _ => bail!("the daemon gave another answer: it is of another version"),
        }
    }
}

/// The daemon is to be asked again a little later.
#[derive(thiserror::Error, Debug)]
#[error("{0}")]
struct Busy(String);

/// Waits for a time, or until a signal asks to stop, which is returned.
fn stop_within(signals: &SignalFd, time: Duration) -> anyhow::Result<Option<Signal>> {
    let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, timeout_of(time)) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(e) => return Err(e).context("waiting for signals"),
    }
    signal_to_stop(signals)
}

/// Whether a daemon that is just starting may be the reason, or that this process has too many files open.
fn is_passing(e: &anyhow::Error) -> bool {
    let of_socket = e.downcast_ref::<ClientError>();
    let is_foreign = matches!(of_socket, Some(ClientError::Foreign { .. }));
    e.is::<Busy>() || e.is::<io::Error>() || of_socket.is_some() && !is_foreign
}

/// Has the daemon behind this control socket serve VMs, until a signal asks to stop: what
/// `slipgate attach` does beside a daemon.
///
/// # Errors
/// The daemon does not serve one of them, ends for good, or somebody removes a VM.
pub fn attach_to_daemon(
    daemon: &Path,
    definitions: Vec<VmDefinition>,
    uplink: Option<String>,
) -> anyhow::Result<()> {
    let signals = signals(&[]).context("waiting for signals")?;
    let join = |definition| JoinedVm::join(daemon, definition, uplink.clone(), &signals);
    let joined = definitions.into_iter().map(join);
    let mut vms: Vec<JoinedVm> = match joined.collect::<anyhow::Result<_>>() {
        // The daemon removes those that it serves already: their lifelines are closed.
        Err(e) if e.is::<StoppedEarly>() => return Ok(()),
        vms => vms?,
    };
    let names: Vec<&str> = vms.iter().map(JoinedVm::name).collect();
    let mut out = io::stdout().lock();
    writeln!(out, "slipgate: ready: {}, by the daemon", names.join(", "))
        .and_then(|()| out.flush())
        .unwrap_or_else(|e| tracing::warn!("writing `ready` to stdout: {e}"));
    while !asks_to_stop(&signals, &vms)? {
        for vm in &mut vms {
            if vm.turn()? {
                let name = vm.name();
                bail!("{name} was removed from the daemon by somebody else");
            }
        }
    }
    vms.into_iter().try_for_each(JoinedVm::leave)
}

/// Waits until there is news of a VM, or a signal; whether that asks to stop.
fn asks_to_stop(signals: &SignalFd, vms: &[JoinedVm]) -> anyhow::Result<bool> {
    let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
    let mut fds = vec![input(signals.as_fd())];
    fds.extend(vms.iter().filter_map(JoinedVm::fd).map(input));
    let timeout = vms.iter().find_map(JoinedVm::timeout);
    match poll(&mut fds, timeout.unwrap_or(PollTimeout::NONE)) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(e) => return Err(e).context("waiting for something to do"),
    }
    Ok(signal_to_stop(signals)?.is_some())
}

#[cfg(test)]
#[path = "joined_test.rs"]
mod tests;
