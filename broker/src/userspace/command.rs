//! The command of `slipgate exec`: its process, and this binary in it before the command.
use std::{
    convert::Infallible,
    ffi::OsString,
    io::{IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::{
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::{Path, PathBuf},
    process::{Child, ExitCode, ExitStatus},
};

use anyhow::{Context as _, bail};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags},
    sys::{
        signal::{Signal, kill},
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
    unistd::Pid,
};
use slipgate_abi::Protocol;
use slipgate_control::{GuestDevice, GuestNamespace};
use slipgate_model::{GuestIpv6, rights};
use slipgate_policy::document::Forward;

use super::{
    Guest, inside_sockets,
    place::{is_below, private_dirs},
};
use crate::{
    config::{Config, VmConfig},
    privileges::drop_bounding_set,
    process::child::pidfd_of,
    serve::blocked_signals,
};

/// Hidden command that [`run_inside`] is behind.
const COMMAND: &str = "inside";
/// Exit status of a command that can't be found, and of one that can't be executed, as shells have it.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Signals that end the command, and this process only with it: what a terminal sends for a dump, too.
pub(super) const MORE_SIGNALS: &[Signal] = &[Signal::SIGQUIT];

/// The process of the user's command.
#[derive(Debug)]
pub(super) struct Command {
    child: Child,
    pidfd: OwnedFd,
    status: Option<ExitStatus>,
    /// Our end of the connection, until the command begins.
    stream: UnixStream,
}

impl Command {
    /// Starts the process, which makes its namespaces and waits.
    pub(super) fn start(
        nat: &Config,
        vm: &VmConfig,
        (mtu, ipv6): (u32, Option<GuestIpv6>),
        command: &[OsString],
    ) -> anyhow::Result<Self> {
        let (ours, theirs) = UnixStream::pair().context("connecting to the command's process")?;
        let fd = theirs.as_raw_fd();
        let mut process = std::process::Command::new("/proc/self/exe");
        process
            .arg(COMMAND)
            .args(["--fd", &fd.to_string()])
            .args(["--guest", &vm.ip.to_string()])
            .args(["--prefix", &nat.network.prefix_len.to_string()])
            .args(["--gateway", &nat.network.gateway.to_string()])
            .args(["--dns", &nat.network.dns.to_string()])
            .args(["--mtu", &mtu.to_string()]);
        if let Some(ipv6) = ipv6 {
            process
                .args(["--guest6", &ipv6.first_host().to_string()])
                .args(["--gateway6", &ipv6.gateway().to_string()]);
        }
        let private = private_dirs(nat);
        for dir in &private {
            process.arg("--cover").arg(dir);
        }
        // By them the policy can be changed. Those below a directory are covered with it.
        let is_seen = |path: &PathBuf| !path.parent().is_some_and(|dir| is_below(dir, &private));
        for path in nat.api_paths().into_iter().filter(is_seen) {
            process.arg("--cover").arg(path);
        }
        // Only connections of forwards need them, which clients of the API may add.
        let is_tcp = |forward: &Forward| forward.protocol == Protocol::Tcp as u8;
        if nat.forwards.iter().any(is_tcp) || nat.api.iter().any(|api| api.may_change) {
            process.arg("--sockets");
        }
        process.arg("--").args(command);
        // SAFETY: between fork and exec only an async-signal-safe call is made.
        unsafe { process.pre_exec(move || keep(fd)) };
        let child = process
            .spawn()
            .context("starting the command's process (/proc/self/exe)")?;
        Ok(Self {
            pidfd: pidfd_of(&child).context("watching the command")?,
            child,
            status: None,
            stream: ours,
        })
    }

    /// Receives the TAP's queue, and the connection to a process that makes sockets in its namespace;
    /// `None` if the process ended before it had them.
    pub(super) fn device(&mut self) -> anyhow::Result<Option<(GuestDevice, Option<OwnedFd>)>> {
        let mut takes_uso = [0];
        let (stream, flags) = (self.stream.as_fd(), MsgFlags::empty());
        let received = rights::receive(stream, &mut takes_uso, 2, flags)
            .context("receiving the command's device")?;
        if received.was_cut {
            bail!(
                "receiving the command's device: this process has too few descriptors left; raise \
                 its limit (ulimit -n)"
            );
        }
        let mut fds = received.fds.into_iter();
        let Some(queue) = fds.next() else {
            self.wait()?;
            return Ok(None);
        };
        let takes_uso = takes_uso == [1];
        Ok(Some((GuestDevice { queue, takes_uso }, fds.next())))
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let status = match self.status {
            Some(status) => status,
            None => self.child.wait().context("waiting for the command")?,
        };
        self.status = Some(status);
        Ok(status)
    }

    /// Returns the command's exit status, as a shell has it: 128 and the signal that ended it.
    pub(super) fn ended(&mut self) -> anyhow::Result<ExitCode> {
        let status = self.wait()?;
        let signal = status.signal().map(|signal| 128 + signal);
        let code = status.code().or(signal).unwrap_or(1);
        Ok(ExitCode::from(code as u8))
    }
}

impl Guest for Command {
    fn poll_fds(&self) -> Vec<PollFd<'_>> {
        vec![PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)]
    }

    fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_some()
    }

    fn begin(&mut self, _socket: &Path) -> anyhow::Result<()> {
        self.stream
            .write_all(&[1])
            .context("letting the command begin")
    }

    /// A terminal sends its signals to the command too; the others are passed on.
    fn signal(&mut self, signal: Signal) -> bool {
        if matches!(signal, Signal::SIGTERM | Signal::SIGHUP) {
            // It may have ended just now.
            let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
        }
        false
    }

    fn lost_engine(&mut self, how: String) {
        tracing::error!("the engine {how}: the command has no network any more");
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        if !self.has_ended() {
            // A start that failed: it is not to run without a network.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Between fork and execve: keeps the descriptor open.
fn keep(fd: RawFd) -> std::io::Result<()> {
    // SAFETY: a number only.
    match unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Instructions for the command's process, inside its namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inside {
    /// Descriptor of the connection, inherited.
    pub fd: RawFd,
    /// Addresses of its namespace.
    pub namespace: GuestNamespace,
    /// Directories and sockets that the command does not see: what rules it is there, and it runs as their
    /// owner.
    pub covered: Vec<PathBuf>,
    /// Whether a process that makes sockets stays in it.
    pub makes_sockets: bool,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Makes the namespaces, leaves a process in them that makes sockets, passes the TAP's queue and a
/// connection to that process on, and becomes the command when told to.
///
/// # Errors
/// The host refuses a namespace or the TAP, or the command can't be executed.
pub fn run_inside(inside: &Inside) -> anyhow::Result<Infallible> {
    if inside.fd <= libc::STDERR_FILENO {
        bail!("inside --fd {}: slipgate starts these by itself", inside.fd);
    }
    // SAFETY: the one that started this left it open for us, and nobody else here has it.
    let mut stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(inside.fd) });
    fcntl(&stream, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .with_context(|| format!("inside --fd {}: not a descriptor", inside.fd))?;
    let device = inside.namespace.enter(&inside.covered)?;
    let sockets = inside.makes_sockets.then(inside_sockets::leave_behind);
    let sockets = match sockets.transpose() {
        Ok(sockets) => sockets,
        Err(error) => {
            crate::say(format_args!(
                "{error:#}: connections of forwards go by the TAP"
            ));
            None
        }
    };
    let takes_uso = [u8::from(device.takes_uso)];
    let all = [Some(&device.queue), sockets.as_ref()]
        .into_iter()
        .flatten();
    let fds: Vec<_> = all.map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let parts = [IoSlice::new(&takes_uso)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(stream.as_raw_fd(), &parts, &rights, flags, None)
        .context("passing the TAP on")?;
    drop((device, sockets));
    let mut go = [0];
    if stream.read(&mut go).unwrap_or(0) == 0 {
        bail!("slipgate has ended before the command began");
    }
    let Some((program, arguments)) = inside.command.split_first() else {
        bail!("no command");
    };
    // `slipgate exec` waits for its signals by a descriptor, and has them blocked for that: the command is to
    // have them as it is used to, and what its user has blocked stays so.
    blocked_signals(MORE_SIGNALS)
        .thread_unblock()
        .context("unblocking signals")?;
    // Root's programs would have every capability in these namespaces, and could undo them.
    drop_bounding_set(0)?;
    let error = std::process::Command::new(program).args(arguments).exec();
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    crate::say(format_args!("{}: {error}", program.display()));
    std::process::exit(code.into())
}
