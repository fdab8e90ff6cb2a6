//! A VM that sleeps by a snapshot: its machine is saved and ended, and the daemon keeps the VM.
//!
//! # Theory of operation
//! The VM is put to sleep first, so that what comes for it from then on is held and wakes. Then its guest
//! is paused, so that the snapshot and what the guest has sent agree. When the snapshot is whole, the daemon
//! is told to keep the VM, and only then the machine ends. Until then all of it can be taken back, which
//! happens where this is dropped: the guest goes on, and gets what was held.
//!
//! A machine answers the order to end before it ends. So its process is waited for: what comes next may
//! be another machine on the same disks, as the same VM.
use std::{
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt::PeerCredentials},
};
use slipgate_ipc::{
    client::{
        ClientAnswer, ClientError, ClientRequest, ErrorKind, MachineOrder, MachineState,
        MachineStatus, Target, VmState, ask,
    },
    engine::EngineRequest,
};

use crate::process::child::pidfd_of_id;

/// Time within which a daemon that is busy has to keep the VM.
const KEPT_WITHIN: Duration = Duration::from_secs(20);
/// Between two requests to a daemon that is busy.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Time within which a machine has to end.
const ENDED_WITHIN: Duration = Duration::from_secs(10);

/// A VM that is being put to sleep.
#[derive(Debug)]
pub struct SleepBySnapshot {
    /// Control socket of the daemon that serves the VM, and the socket of its machine.
    daemon: PathBuf,
    machine: PathBuf,
    vm: String,
    /// What is to be taken back.
    wakes: bool,
    resumes: bool,
}

impl SleepBySnapshot {
    /// Has the VM sleep, and its guest paused. `machine`: the socket of its machine, and what that is.
    ///
    /// # Errors
    /// The daemon does not serve the machine's VM, or one of the two refuses.
    pub fn begin(
        daemon: &Path,
        (machine, status): (&Path, &MachineStatus),
    ) -> anyhow::Result<Self> {
        let vm = status.name.clone();
        let ClientAnswer::VmList { vms, .. } = asked(daemon, ClientRequest::ListVms)? else {
            bail!("the daemon gave another answer: it is of another version");
        };
        let served = vms.into_iter().find(|served| {
            served.definition.name == vm && Some(&served.definition.tap) == status.tap.as_ref()
        });
        let Some(served) = served else {
            bail!(
                "no daemon serves {vm}, so nothing would wake it: --sleep is for machines beside \
                 `slipgate serve`"
            );
        };
        let mut sleep = Self {
            daemon: daemon.to_owned(),
            machine: machine.to_owned(),
            vm,
            wakes: false,
            resumes: false,
        };
        if served.state != VmState::Asleep {
            sleep.wakes = true;
            done(&sleep.daemon, sleep.of_engine(EngineRequest::Sleep))
                .context("having the VM sleep")?;
        }
        if status.state != MachineState::Paused {
            sleep.resumes = true;
            sleep.order(MachineOrder::Pause)?;
        }
        Ok(sleep)
    }

    /// Keeps the VM, and ends its machine, whose snapshot is whole. Returns once the machine's process
    /// is gone, and with it the locks of its disks.
    ///
    /// # Errors
    /// The daemon does not keep it: then the guest goes on. Or the machine does not end in time.
    pub fn finish(mut self) -> anyhow::Result<()> {
        let until = Instant::now() + KEPT_WITHIN;
        loop {
            let name = self.vm.clone();
            match ask(&self.daemon, ClientRequest::KeepVm { name })? {
                ClientAnswer::Vm { .. } => break,
                ClientAnswer::Error {
                    kind: ErrorKind::Busy,
                    ..
                } if Instant::now() < until => thread::sleep(ASK_AGAIN),
                ClientAnswer::Error { error, .. } => bail!("keeping {}: {error}", self.vm),
                _ => bail!("the daemon does not serve {} any more", self.vm),
            }
        }
        // From here on it sleeps, also where the machine was quicker.
        (self.wakes, self.resumes) = (false, false);
        let order = MachineOrder::Kill;
        let running = Running::at(&self.machine);
        match ask(&self.machine, ClientRequest::Machine { order }) {
            Err(e) if e.is_nobodys() || matches!(e, ClientError::NoAnswer { .. }) => {}
            Ok(ClientAnswer::Done) => {}
            Ok(ClientAnswer::Error { error, .. }) => bail!("ending {}: {error}", self.vm),
            Ok(_) => bail!("ending {}: another answer", self.vm),
            Err(e) => return Err(e.into()),
        }
        // Where there was no connection, it had ended.
        if running.is_some_and(|running| !running.ends_within(ENDED_WITHIN)) {
            bail!(
                "{} is saved and kept, but its machine has not ended within {} s: see `slipgate ps`",
                self.vm,
                ENDED_WITHIN.as_secs()
            );
        }
        Ok(())
    }

    fn of_engine<F>(&self, ask: EngineRequest<F>) -> ClientRequest<F> {
        ClientRequest::Engine {
            about: Some(Target::Vm(self.vm.clone())),
            ask,
        }
    }

    fn order(&self, order: MachineOrder<std::os::fd::BorrowedFd<'_>>) -> anyhow::Result<()> {
        done(&self.machine, ClientRequest::Machine { order })
    }
}

impl Drop for SleepBySnapshot {
    fn drop(&mut self) {
        let vm = &self.vm;
        // The guest first: it answers what is delivered.
        if self.resumes
            && let Err(e) = self.order(MachineOrder::Resume)
        {
            tracing::warn!("{vm} may be paused still ({e:#}): `slipgate resume {vm}`");
        }
        if self.wakes
            && let Err(e) = done(&self.daemon, self.of_engine(EngineRequest::Resume))
        {
            tracing::warn!("{vm} may sleep still ({e:#}): `slipgate resume {vm}`");
        }
    }
}

/// The process of a machine.
#[derive(Debug)]
enum Running {
    Here(OwnedFd),
    /// It has no id here, or is this one: its end is that of a connection to it.
    Elsewhere(UnixStream),
}

impl Running {
    /// The process that listens at this socket; `None`: there is none.
    fn at(socket: &Path) -> Option<Self> {
        let connection = UnixStream::connect(socket).ok()?;
        let peer = getsockopt(&connection, PeerCredentials).map_or(0, |peer| peer.pid());
        let peer = u32::try_from(peer).unwrap_or(0);
        if peer == 0 || peer == process::id() {
            return Some(Self::Elsewhere(connection));
        }
        Some(match pidfd_of_id(peer) {
            Ok(process) => Self::Here(process),
            Err(_) => Self::Elsewhere(connection),
        })
    }

    /// Waits for the end. Returns whether it has come.
    fn ends_within(self, within: Duration) -> bool {
        let until = Instant::now() + within;
        match self {
            Self::Here(process) => loop {
                let left = until.saturating_duration_since(Instant::now());
                let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
                let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
                match poll(&mut fds, left) {
                    Err(nix::Error::EINTR) => {}
                    ended => return matches!(ended, Ok(1..)),
                }
            },
            Self::Elsewhere(mut connection) => {
                // Nothing is asked, so nothing but the end comes.
                let set = connection.set_read_timeout(Some(within));
                let read = set.and_then(|()| connection.read(&mut [0]));
                !matches!(read, Err(e) if e.kind() == io::ErrorKind::WouldBlock)
            }
        }
    }
}

fn asked(
    socket: &Path,
    request: ClientRequest<std::os::fd::BorrowedFd<'_>>,
) -> anyhow::Result<ClientAnswer> {
    match ask(socket, request)? {
        ClientAnswer::Error { error, .. } => bail!(error),
        answer => Ok(answer),
    }
}

fn done(socket: &Path, request: ClientRequest<std::os::fd::BorrowedFd<'_>>) -> anyhow::Result<()> {
    match asked(socket, request)? {
        ClientAnswer::Done => Ok(()),
        _ => bail!("another answer"),
    }
}

#[cfg(test)]
#[path = "sleep_by_snapshot_test.rs"]
mod tests;
