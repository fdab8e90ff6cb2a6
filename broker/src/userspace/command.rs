//! The command of `slipgate exec`: its process, and this binary in it before the command.
use std::{
    convert::Infallible,
    ffi::OsString,
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::{
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::Path,
    process::{Child, ExitCode, ExitStatus},
};

use anyhow::{Context as _, bail};
use nix::{
    cmsg_space,
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags},
    sys::{
        signal::{Signal, kill},
        socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
    },
    unistd::Pid,
};
use slipgate_control::{GuestDevice, GuestNamespace};
use slipgate_model::GuestIpv6;

use super::Guest;
use crate::{
    config::{Config, VmConfig},
    process::child::pidfd_of,
};

/// Hidden command that [`run_inside`] is behind.
const COMMAND: &str = "inside";
/// Exit status of a command that can't be found, and of one that can't be executed, as shells have it.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// The command's process.
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

    /// Receives the TAP's queue; `None` if the process ended before it had one.
    pub(super) fn device(&mut self) -> anyhow::Result<Option<GuestDevice>> {
        let mut takes_uso = [0];
        let mut space = cmsg_space!([RawFd; 1]);
        let received = {
            let mut parts = [IoSliceMut::new(&mut takes_uso)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let fd = self.stream.as_raw_fd();
            let received = recvmsg::<()>(fd, &mut parts, Some(&mut space), flags);
            let received = received.context("receiving the command's device")?;
            received.cmsgs()?.find_map(|message| match message {
                ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
                _ => None,
            })
        };
        let Some(queue) = received else {
            self.wait()?;
            return Ok(None);
        };
        Ok(Some(GuestDevice {
            // SAFETY: the kernel made it for us just now.
            queue: unsafe { OwnedFd::from_raw_fd(queue) },
            takes_uso: takes_uso == [1],
        }))
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

/// What the command's process is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inside {
    /// The inherited connection.
    pub fd: RawFd,
    /// Addresses of its namespace.
    pub namespace: GuestNamespace,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Makes the namespaces, passes the TAP's queue on, and becomes the command when told to.
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
    let device = inside.namespace.enter()?;
    let takes_uso = [u8::from(device.takes_uso)];
    let queue = [device.queue.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&queue)];
    let parts = [IoSlice::new(&takes_uso)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(stream.as_raw_fd(), &parts, &rights, flags, None)
        .context("passing the TAP on")?;
    drop(device);
    let mut go = [0];
    if stream.read(&mut go).unwrap_or(0) == 0 {
        bail!("slipgate has ended before the command began");
    }
    let Some((program, arguments)) = inside.command.split_first() else {
        bail!("no command");
    };
    let error = std::process::Command::new(program).args(arguments).exec();
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    crate::say(format_args!("{}: {error}", program.display()));
    std::process::exit(code.into())
}
