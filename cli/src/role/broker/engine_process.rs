//! The engine process as the broker has it: this very binary, started with one end of the channel
//! and nothing else, then handed descriptors.
use std::{
    fs::OpenOptions,
    net::SocketAddrV4,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{
            fs::OpenOptionsExt as _,
            process::{CommandExt, ExitStatusExt as _},
        },
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    attached::{self, Attached},
    reserve,
};
use crate::{
    channel::{Channel, ForwardSocket, MAX_FDS, Start, ToBroker, ToEngine},
    config::Dns,
    host,
};

/// How long an ended engine's exit status may take to show, ms.
const STATUS_WITHIN: u16 = 500;

/// A running engine. It is killed when this is dropped.
#[derive(Debug)]
pub(super) struct EngineProcess {
    child: Child,
    pidfd: OwnedFd,
    channel: Channel,
}

impl EngineProcess {
    /// Starts the engine and tells it everything; it is on its way then.
    pub(super) fn start(
        attached: &Attached,
        reserved_ports: &[(u8, u16)],
        log: &str,
    ) -> anyhow::Result<Self> {
        // What may fail for the user's reasons comes first.
        let flow_log = open_flow_log(attached)?;
        let forwards = reserve_forwards(attached)?;
        let (child, channel) = spawn()?;
        let engine = Self {
            pidfd: pidfd_of(&child)?,
            child,
            channel,
        };
        let config = &attached.config;
        let start = Start {
            owner_row: attached.owner.row(),
            epoch: attached.owner.epoch(),
            flow_log: flow_log.is_some(),
            vms: attached.vms.iter().map(|vm| attached.vm_spec(vm)).collect(),
            rules: attached.rules.clone(),
            rule_base: attached.rule_base,
            forward_texts: attached::forward_texts(config).collect(),
            resolvers: resolvers(&config.dns),
            nat_ports: (*config.nat_ports.start(), *config.nat_ports.end()),
            reserved_ports: reserved_ports.to_vec(),
            network: attached.network_view(),
            log: log.to_owned(),
        };
        let mut fds = attached.datapath.maps().fds();
        fds.push(attached.port.fd.as_fd());
        fds.extend(flow_log.as_ref().map(AsFd::as_fd));
        fds.extend(attached.owner.lock_fds());
        engine
            .channel
            .send(&ToEngine::Start(Box::new(start)), &fds)?;
        for some in forwards.chunks(MAX_FDS) {
            let names = some.iter().map(|(name, _)| name.clone()).collect();
            let fds: Vec<_> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
            engine.channel.send(&ToEngine::Forwards(names), &fds)?;
        }
        engine.channel.send(&ToEngine::Begin, &[])?;
        Ok(engine)
    }

    /// Readable when the engine has ended.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Sends a message.
    pub(super) fn tell(&self, message: &ToEngine) -> anyhow::Result<()> {
        Ok(self.channel.send(message, &[])?)
    }

    /// Has it go on with another file of the flow log's name: the old one was moved away.
    pub(super) fn reopen_flow_log(&self, attached: &Attached) -> anyhow::Result<()> {
        let Some(file) = open_flow_log(attached)? else {
            return Ok(());
        };
        Ok(self.channel.send(&ToEngine::FlowLog, &[file.as_fd()])?)
    }

    /// Waits until it serves; how many flows it took over.
    pub(super) fn await_ready(&mut self, within: Duration) -> anyhow::Result<u64> {
        loop {
            match self.next(within)? {
                Some(ToBroker::Ready { adopted }) => return Ok(adopted),
                Some(_) => {}
                None => return Err(self.ended_before("it was ready")),
            }
        }
    }

    /// Waits until it has stopped as asked.
    pub(super) fn await_stopped(&mut self, within: Duration) -> anyhow::Result<()> {
        while let Some(message) = self.next(within)? {
            if message == ToBroker::Stopped {
                return Ok(());
            }
        }
        Err(self.ended_before("it had stopped in order"))
    }

    /// How the engine ended, in words; `None` while it runs.
    pub(super) fn end(&mut self) -> Option<String> {
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        // What it said or closed last is heard a moment before its end is seen.
        let _ = poll(&mut fds, STATUS_WITHIN);
        match self.child.try_wait() {
            Ok(status) => status.map(describe),
            Err(e) => Some(format!("ended somehow ({e})")),
        }
    }

    fn ended_before(&mut self, what: &str) -> anyhow::Error {
        let end = self.end();
        let end = end.unwrap_or_else(|| "closed its channel".into());
        anyhow!("the engine {end} before {what}")
    }

    fn next(&self, within: Duration) -> anyhow::Result<Option<ToBroker>> {
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the engine says nothing for {} s", within.as_secs());
            }
            let mut fds = [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut fds, timeout) {
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => return Ok(self.channel.receive()?.map(|(message, _)| message)),
                Err(e) => return Err(e).context("waiting for the engine"),
            }
        }
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts it. It inherits the channel's other end and stderr; its environment is empty but for
/// what changes how it logs.
fn spawn() -> anyhow::Result<(Child, Channel)> {
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

/// Lets a descriptor survive the execve, and gives the child a clean signal mask and a process
/// group of its own: a ^C at the terminal is for the broker, which ends the engine in order.
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

fn pidfd_of(child: &Child) -> anyhow::Result<OwnedFd> {
    // SAFETY: numbers only; the child has not been waited for, so the pid is its.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id() as libc::pid_t, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error()).context("watching the engine process");
    }
    // SAFETY: the kernel made it for us just now.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Readable too: an adopting engine looks for what its predecessor recorded last.
fn open_flow_log(attached: &Attached) -> anyhow::Result<Option<OwnedFd>> {
    let Some(path) = &attached.config.flow_log else {
        return Ok(None);
    };
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o640)
        // A FIFO without a reader is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = file.with_context(|| {
        format!(
            "--flow-log {}: can't append to it; give a file in a directory that is there",
            path.display()
        )
    })?;
    // Writing to anything else may block, and every VM waits with it.
    if !file.metadata()?.is_file() {
        bail!(
            "--flow-log {}: it is no regular file; give one, and read it with `tail -F`",
            path.display()
        );
    }
    Ok(Some(file.into()))
}

fn reserve_forwards(attached: &Attached) -> anyhow::Result<Vec<(ForwardSocket, OwnedFd)>> {
    let forwards = attached.config.forwards.iter().map(|forward| {
        let vm = &attached.vms[forward.vm].open;
        let name = ForwardSocket {
            vm: vm.id,
            vm_row: vm.row as u16,
            protocol: forward.protocol,
            host: SocketAddrV4::new(forward.host, forward.host_port),
            guest_port: forward.guest_port,
            rule: attached.forward_rule(forward),
        };
        Ok((name, reserve::reserve(forward)?))
    });
    forwards.collect()
}

/// `None`: nobody is to be asked.
fn resolvers(dns: &Dns) -> Option<Vec<SocketAddrV4>> {
    match dns {
        Dns::Refused => return None,
        Dns::Resolvers(given) => return Some(given.clone()),
        Dns::Host => {}
    }
    let hosts = host::resolvers();
    if hosts.is_empty() {
        tracing::warn!(
            "the host has no IPv4 resolver (/etc/resolv.conf): guests' questions will fail; give \
             --dns"
        );
    }
    Some(hosts)
}

/// How a process ended, in words.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(libc::SIGSYS)) => "made a system call that its sandbox forbids, and was killed \
                                    for it; please report this"
            .into(),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        (Some(code), _) => format!("ended with code {code}"),
        (None, None) => "ended".into(),
    }
}
