//! Notifies a service manager (sd_notify(3)), where one has set `NOTIFY_SOCKET`: that guests are
//! served, that the policy is read again, that the end has begun, what it is to keep for the next
//! start, and, where it watches, that the loop turns.
use std::{
    io::{self, IoSlice},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd},
        unix::net::UnixDatagram,
    },
    time::{Duration, Instant},
};

use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, poll},
    sys::socket::{ControlMessage, MsgFlags, sendmsg},
};
use sd_notify::NotifyState;

use crate::handover::STORE;

const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// Descriptors in one message: the kernel passes 253 at most (`SCM_MAX_FD`, <net/scm.h>).
const FDS_AT_ONCE: usize = 128;
/// Longest wait for the manager, ms.
const HEARD_WITHIN_MS: u16 = 2_000;

/// The service manager that started this process, or none.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    /// Interval of signs of life, and when the next is due; `None`: nobody watches.
    watchdog: Option<(Duration, Instant)>,
    /// Whether it was told that the policy is read again, and not yet that this is done.
    reloads: bool,
}

impl ServiceManager {
    /// Reads the service manager's socket and interval from the environment.
    pub(crate) fn of_this_process() -> Self {
        // Two signs in its time, so that one may be late.
        let watchdog = sd_notify::watchdog_enabled().map(|within| within / 2);
        Self {
            watchdog: watchdog.map(|every| (every, Instant::now() + every)),
            reloads: false,
        }
    }

    /// Guests are served. `status`: a sentence for `systemctl status`.
    pub(crate) fn ready(&self, status: &str) {
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The policy is read again.
    pub(crate) fn reloading(&mut self) {
        let Ok(now) = NotifyState::monotonic_usec_now() else {
            return;
        };
        self.reloads = true;
        tell(&[NotifyState::Reloading, now]);
    }

    /// Nothing is being changed: says so if it was told otherwise.
    pub(crate) fn reloaded(&mut self) {
        if std::mem::take(&mut self.reloads) {
            tell(&[NotifyState::Ready]);
        }
    }

    /// The end has begun.
    pub(crate) fn stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Leaves descriptors with the manager for the next start, if it keeps any: it passes them to
    /// the process with its sockets. Returns once it has them.
    pub(crate) fn keep<'a>(&self, fds: impl Iterator<Item = BorrowedFd<'a>>) {
        let fds: Vec<RawFd> = fds.map(|fd| fd.as_raw_fd()).collect();
        let message = format!("FDSTORE=1\nFDNAME={STORE}\n");
        let sent = fds
            .chunks(FDS_AT_ONCE)
            .try_for_each(|some| send(&message, some));
        if let Err(e) = sent.and_then(|()| await_manager()) {
            tracing::warn!("leaving descriptors to the service manager at {NOTIFY_SOCKET}: {e}");
        }
    }

    /// Has the manager close what [`ServiceManager::keep`] left with it: this process has taken it.
    pub(crate) fn forget_kept(&self) {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        if !names.split(':').any(|name| name == STORE) {
            return;
        }
        let name = format!("FDNAME={STORE}");
        let message = ["FDSTOREREMOVE=1", &name].map(NotifyState::Custom);
        tell(&message);
    }

    /// When the next sign of life is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.watchdog.map(|(_, due)| due)
    }

    /// The loop turns: says so if it is time.
    pub(crate) fn is_alive(&mut self) {
        let now = Instant::now();
        if let Some((every, due)) = &mut self.watchdog
            && *due <= now
        {
            *due = now + *every;
            tell(&[NotifyState::Watchdog]);
        }
    }
}

/// Waits until the manager has handled all earlier messages: it knows a sender only while that lives.
fn await_manager() -> io::Result<()> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    send("BARRIER=1\n", &[write.as_raw_fd()])?;
    drop(write);
    let mut fds = [PollFd::new(read.as_fd(), PollFlags::empty())];
    match poll(&mut fds, HEARD_WITHIN_MS)? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// Sends a message with descriptors to the socket that `NOTIFY_SOCKET` names, if there is one.
fn send(message: &str, fds: &[RawFd]) -> io::Result<()> {
    let Some(path) = std::env::var_os(NOTIFY_SOCKET) else {
        return Ok(());
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect(path)?;
    let rights = [ControlMessage::ScmRights(fds)];
    let parts = [IoSlice::new(message.as_bytes())];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &parts,
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

/// Sends to the socket that `NOTIFY_SOCKET` names, if there is one. A manager that does not hear is
/// no reason not to serve.
fn tell(state: &[NotifyState]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::warn!("telling the service manager at NOTIFY_SOCKET: {e}");
    }
}
