//! The engine process: this very binary, started with one end of the channel and nothing else.
use std::{
    os::{
        fd::{AsRawFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::Context as _;

use crate::channel::Channel;

/// Starts the engine. It inherits the channel's other end and stderr; its environment is empty but
/// for what changes how it logs.
pub(super) fn spawn() -> anyhow::Result<(Child, Channel)> {
    let (ours, theirs) = Channel::pair()?;
    let inherited = theirs.as_raw_fd();
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("slipgate-engine")
        .args(["engine", "--fd", &inherited.to_string()])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    for name in ["RUST_BACKTRACE", "NO_COLOR"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    // SAFETY: between fork and exec only async-signal-safe calls are made.
    unsafe { command.pre_exec(move || keep(inherited)) };
    let child = command
        .spawn()
        .context("starting the engine process (/proc/self/exe)")?;
    Ok((child, ours))
}

/// Lets a descriptor survive the execve, gives the child a clean signal mask and a process group of
/// its own: a ^C at the terminal is for the broker, which ends the engine in order.
fn keep(fd: RawFd) -> std::io::Result<()> {
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

/// How the engine ended, in words.
pub(super) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (_, Some(libc::SIGSYS)) => "made a system call that its sandbox forbids, and was killed \
                                    for it; please report this"
            .into(),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        (Some(code), _) => format!("ended with code {code}"),
        (None, None) => "ended".into(),
    }
}
