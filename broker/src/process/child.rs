//! A child process of slipgate: this binary in another role, started with one end of a channel and
//! nothing else.
use std::{
    ffi::CString,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        socket::{Shutdown, shutdown},
        wait::WaitStatus,
    },
};
use slipgate_control::Users;
use slipgate_ipc::{
    channel::{Channel, ChannelError, Received},
    descriptors::Inbound,
};

use super::spawn::{Child, Namespaces, Program};
use crate::role::Role;

/// Time limit for an ended process's exit status to become available, ms. Its channel is closed
/// before its namespaces are taken down, which takes a busy machine longer than a moment.
const STATUS_WITHIN: u16 = 2_000;

/// A running process. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    role: Role,
    child: Child,
    channel: Channel,
}

impl ChildProcess {
    /// Starts the process, to run as its role's user. It inherits the channel's other end and
    /// stderr; its environment is empty except for variables that configure logging.
    pub(crate) fn start(role: Role, users: &Users) -> anyhow::Result<Self> {
        let mut process = Self::begin_in(role, users, Namespaces::Ours)?;
        process.await_execve()?;
        Ok(process)
    }

    /// As [`ChildProcess::start`], in these namespaces, and without waiting until it is executed, which
    /// [`ChildProcess::await_execve`] does. It may be sent messages before.
    pub(crate) fn begin_in(
        role: Role,
        users: &Users,
        namespaces: Namespaces,
    ) -> anyhow::Result<Self> {
        let (ours, theirs) = Channel::pair()?;
        let inherited = theirs.as_raw_fd();
        let (fd, user) = (inherited.to_string(), users.user(role.user()).to_string());
        let arguments = [role.title(), role.command(), "--fd", &fd, "--user", &user];
        let environment = ["RUST_BACKTRACE", "NO_COLOR"].iter().filter_map(|name| {
            let value = std::env::var_os(name)?;
            CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
        });
        let program = Program {
            arguments: arguments
                .into_iter()
                .map(CString::new)
                .collect::<Result<_, _>>()
                .context("an argument with a zero byte")?,
            environment: environment.collect(),
            prepare: keep,
            inherited,
        };
        let child = program.start(namespaces);
        let child = child.with_context(|| not_started(role))?;
        Ok(Self {
            role,
            child,
            channel: ours,
        })
    }

    /// Waits until it is executed.
    pub(crate) fn await_execve(&mut self) -> anyhow::Result<()> {
        let executed = self.child.await_execve();
        executed.with_context(|| not_started(self.role))
    }

    /// Process id, in this process's namespace.
    pub(crate) fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Returns the pidfd, which is readable when the process has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.child.pidfd()
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// From now on its messages may come with a descriptor each.
    pub(crate) fn take_descriptors(&mut self) {
        self.channel.take_descriptors();
    }

    /// Receives the next message of the channel, if one has arrived.
    pub(crate) fn try_receive<M: Inbound>(&self) -> Result<Received<M>, ChannelError> {
        self.channel.try_receive()
    }

    /// Waits for the next message; `None` if the process has closed the channel.
    pub(crate) fn next<M: Inbound>(&self, within: Duration) -> anyhow::Result<Option<M>> {
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{} says nothing for {} s", self.role, within.as_secs());
            }
            let mut fds = [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut fds, timeout) {
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => match self.try_receive() {
                    Ok(Received::Message(message)) => return Ok(Some(message)),
                    Ok(Received::Nothing) => {}
                    Ok(Received::End) => return Ok(None),
                    // It has not read all that it was sent.
                    Err(e) if e.is_peer_gone() => return Ok(None),
                    Err(e) => return Err(e.into()),
                },
                Err(e) => return Err(e).with_context(|| format!("waiting for {}", self.role)),
            }
        }
    }

    /// Tells a process that serves clients that nothing more comes: it answers them, and ends.
    pub(crate) fn say_end(&self) {
        // If it is gone already, that is as well.
        let _ = shutdown(self.channel.as_fd().as_raw_fd(), Shutdown::Write);
    }

    /// Waits until it has ended, or until this time.
    pub(crate) fn await_end(&self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.child.pidfd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut fds, timeout) {
                Err(nix::Error::EINTR) => {}
                _ => return,
            }
        }
    }

    /// Describes how the process ended; `None` while it runs.
    pub(crate) fn end(&mut self) -> Option<String> {
        let mut fds = [PollFd::new(self.child.pidfd(), PollFlags::POLLIN)];
        // What it said or closed last is heard a moment before its end is seen.
        let _ = poll(&mut fds, STATUS_WITHIN);
        match self.child.try_wait() {
            Ok(status) => status.map(describe),
            Err(e) => Some(format!("ended somehow ({e})")),
        }
    }

    /// Describes how a process that has closed its channel ended.
    pub(crate) fn how_it_ended(&mut self) -> String {
        let end = self.end();
        end.unwrap_or_else(|| "closed its channel".into())
    }

    /// Makes an error that says how the process ended too early.
    pub(crate) fn ended_before(&mut self, what: &str) -> anyhow::Error {
        let end = self.how_it_ended();
        anyhow!("{} {end} before {what}", self.role)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.child.kill();
        self.child.wait();
    }
}

/// Signals that end a process in order. Service managers send them to every process of a service at
/// once (systemd's `KillMode=control-group`); they are for the broker, which ends the others.
const FOR_THE_BROKER: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Prepares the child between fork and execve: keeps the descriptor open, gives the process a
/// process group of its own (a ^C at the terminal is for the broker) and an empty signal mask, and
/// ignores the signals of [`FOR_THE_BROKER`]. Until this call the child has the broker's mask,
/// which blocks these signals, so none of them ends it.
fn keep(fd: RawFd) -> std::io::Result<()> {
    for signal in FOR_THE_BROKER {
        // SAFETY: no handler is installed. What is ignored stays so over the execve.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(std::io::Error::last_os_error());
        }
    }
    // SAFETY: numbers only, and a set that is initialised here.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        let masked = libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        if libc::fcntl(fd, libc::F_SETFD, 0) < 0 || masked < 0 || libc::setpgid(0, 0) < 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns a pidfd, which is readable when the process has ended.
pub(crate) fn pidfd_of(child: &std::process::Child) -> std::io::Result<OwnedFd> {
    // It has not been waited for, so the id is its.
    pidfd_of_id(child.id())
}

/// As [`pidfd_of`], of the process that has this id now.
pub(crate) fn pidfd_of_id(id: u32) -> std::io::Result<OwnedFd> {
    // SAFETY: numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id as libc::pid_t, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel made it for us just now.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn not_started(role: Role) -> String {
    format!("starting {role}'s process (/proc/self/exe)")
}

/// Describes how a process ended.
fn describe(status: WaitStatus) -> String {
    match status {
        WaitStatus::Signaled(_, Signal::SIGSYS, _) => {
            "made a system call that its sandbox forbids, and was killed for it; please report this"
                .into()
        }
        WaitStatus::Signaled(_, signal, _) => {
            format!("was killed by signal {}", signal as libc::c_int)
        }
        WaitStatus::Exited(_, code) => format!("ended with code {code}"),
        _ => "ended".into(),
    }
}
