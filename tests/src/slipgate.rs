//! The program under test: started, asked, killed and started again.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use serde::Deserialize;

pub use crate::builds::{another_build, binary};
use crate::{
    builds::refusals_of,
    error::{Error, Result, Tried, checked},
    netns::NetNs,
    ordinary_user::OrdinaryUser,
    owner,
    pins::PinDir,
};

/// Start of the line that `slipgate attach` writes to stdout when it serves.
pub const READY: &str = "slipgate: ready";
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

const ATTACH: &str = "attach";
const SERVE: &str = "serve";

/// Deviations from the usual start of slipgate.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// Another binary than the one under test.
    pub binary: Option<PathBuf>,
    /// The number of a capability that neither it nor any child of its can have.
    pub without_capability: Option<u8>,
    /// Variables of its environment.
    pub environment: Vec<(String, String)>,
    /// Descriptors that it gets too, under the same numbers.
    pub descriptors: Vec<Arc<OwnedFd>>,
}

impl Start {
    fn command(&self) -> Result<Command> {
        let mut command = Command::new(match &self.binary {
            Some(binary) => binary.clone(),
            None => binary()?,
        });
        if let Some(capability) = self.without_capability {
            let drop_it = move || {
                let (capability, none) = (libc::c_ulong::from(capability), 0 as libc::c_ulong);
                // SAFETY: a plain system call that takes numbers, allowed between fork and exec.
                let done =
                    unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, none, none, none) };
                checked(done).map(drop)
            };
            // SAFETY: `drop_it` makes a system call only: no allocation, no lock.
            unsafe { command.pre_exec(drop_it) };
        }
        command.envs(self.environment.iter().cloned());
        for descriptor in self.descriptors.clone() {
            let pass_on = move || {
                // Not closed by exec.
                // SAFETY: a plain system call that takes numbers, allowed between fork and exec.
                checked(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0) }).map(drop)
            };
            // SAFETY: `pass_on` makes a system call only: no allocation, no lock.
            unsafe { command.pre_exec(pass_on) };
        }
        Ok(command)
    }
}

/// A row of `slipgate flows --json`.
#[allow(
    missing_docs,
    reason = "the names are those of `slipgate flows --json`"
)]
#[derive(Clone, Debug, Deserialize)]
pub struct FlowRow {
    pub id: String,
    pub vm: String,
    pub proto: String,
    pub guest: String,
    pub remote: String,
    #[serde(default)]
    pub nat: String,
    pub verdict: String,
    #[serde(default)]
    pub path: String,
    #[serde(default)]
    pub direction: String,
    pub state: String,
    #[serde(default)]
    pub rule: serde_json::Value,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub rx_packets: u64,
    pub rx_bytes: u64,
    pub age_ms: u64,
    pub idle_ms: u64,
}

/// A running `slipgate attach` or `slipgate serve`. Broker and engine are killed on drop; pins go with the [`PinDir`].
pub struct Slipgate {
    ns: NetNs,
    pins: PinDir,
    /// Subcommand that is running, `attach` or `serve`.
    command: &'static str,
    args: Vec<String>,
    /// The user without privileges that runs it, if one does.
    user: Option<OrdinaryUser>,
    broker: Child,
    engines: Vec<u32>,
    stderr: Arc<Mutex<String>>,
    ready_line: String,
}

impl Slipgate {
    /// Runs `slipgate attach --pin-dir PINS ARGS…` in `ns` and waits until it is ready.
    ///
    /// # Errors
    /// The program cannot be started, or ended before it was ready.
    pub fn attach(ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<Slipgate> {
        Self::attach_as(&Start::default(), ns, pins, args)
    }

    /// Attaches as `attach` does, with a deviating start.
    ///
    /// # Errors
    /// slipgate does not become ready.
    pub fn attach_as(start: &Start, ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<Slipgate> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self::start(start, ns.clone(), pins.clone(), ATTACH, args)
    }

    /// Runs `slipgate serve --pin-dir PINS ARGS…` in `ns` and waits until it is ready.
    ///
    /// # Errors
    /// The program cannot be started, or ended before it was ready.
    pub fn serve(ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<Slipgate> {
        Self::serve_as(&Start::default(), ns, pins, args)
    }

    /// The same, started in some other way.
    ///
    /// # Errors
    /// The program cannot be started, or ended before it was ready.
    pub fn serve_as(start: &Start, ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<Slipgate> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self::start(start, ns.clone(), pins.clone(), SERVE, args)
    }

    fn start(
        start: &Start,
        ns: NetNs,
        pins: PinDir,
        subcommand: &'static str,
        args: Vec<String>,
    ) -> Result<Slipgate> {
        let mut command = start.command()?;
        command
            .arg(subcommand)
            .arg("--pin-dir")
            .arg(pins.path())
            .args(&args);
        Self::start_by(command, None, ns, pins, subcommand, args)
    }

    /// Runs `slipgate attach --socket PATH ARGS…` in `ns` as a user without privileges, and waits
    /// until it is ready. The VM is called as the socket's file.
    ///
    /// # Errors
    /// slipgate does not become ready.
    pub fn attach_socket(
        ns: &NetNs,
        user: &OrdinaryUser,
        socket: &Path,
        args: &[&str],
    ) -> Result<Slipgate> {
        let flags = ["--socket", &socket.display().to_string()].map(str::to_owned);
        let args = args.iter().map(|arg| (*arg).to_owned());
        let args: Vec<String> = flags.into_iter().chain(args).collect();
        let mut all = vec![ATTACH];
        all.extend(args.iter().map(String::as_str));
        let command = user.slipgate(&all);
        let (user, pins) = (Some(user.clone()), PinDir::new()?);
        Self::start_by(command, user, ns.clone(), pins, ATTACH, args)
    }

    fn start_by(
        mut command: Command,
        user: Option<OrdinaryUser>,
        ns: NetNs,
        pins: PinDir,
        subcommand: &'static str,
        args: Vec<String>,
    ) -> Result<Slipgate> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut broker = ns.spawn(command)?;
        let stderr = Arc::new(Mutex::new(String::new()));
        let (lines, stdout) = mpsc::channel();
        if let (Some(out), Some(err)) = (broker.stdout.take(), broker.stderr.take()) {
            std::thread::spawn(move || {
                // Reads on after nobody listens: slipgate must not block on a full pipe.
                BufReader::new(out)
                    .lines()
                    .map_while(Result::ok)
                    .for_each(|line| {
                        let _ = lines.send(line);
                    });
            });
            let kept = stderr.clone();
            std::thread::spawn(move || keep(err, &kept));
        }
        let mut slipgate = Slipgate {
            ns,
            pins,
            command: subcommand,
            args,
            user,
            broker,
            engines: Vec::new(),
            stderr,
            ready_line: String::new(),
        };
        slipgate.await_ready(&stdout)?;
        slipgate.engines = owner::children(slipgate.broker.id());
        Ok(slipgate)
    }

    fn await_ready(&mut self, stdout: &mpsc::Receiver<String>) -> Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let why = match stdout.recv_timeout(left) {
                Ok(line) if line.starts_with(READY) => {
                    self.ready_line = line;
                    return Ok(());
                }
                Ok(_) => continue,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    format!("said no `{READY}` within {} s", READY_TIMEOUT.as_secs())
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let status = self.broker.wait().tried("wait for slipgate")?;
                    // The reader of stderr may be a moment behind.
                    std::thread::sleep(Duration::from_millis(50));
                    format!("ended with {status}")
                }
            };
            let args = self.args.join(" ");
            return Err(Error::unexpected(format!(
                "`slipgate {} {args}` {why}; stderr:\n{}",
                self.command,
                self.stderr()
            )));
        }
    }

    /// Line that it printed when it was ready.
    pub fn ready_line(&self) -> &str {
        &self.ready_line
    }

    /// The engine port's name, which the line ends with.
    pub fn engine_port(&self) -> &str {
        let name = self.ready_line.rsplit_once("engine port ");
        name.map_or("", |(_, name)| name.trim())
    }

    /// Returns whether the flow would be admitted, by `slipgate why VM TO --proto PROTO`, and the
    /// command's output.
    ///
    /// # Errors
    /// The command fails; a refusal of the flow is no failure.
    pub fn why(&self, vm: &str, to: &str, proto: &str) -> Result<(bool, String)> {
        let output = self.run(&["why", vm, to, "--proto", proto])?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok((said.starts_with("yes"), said))
    }

    /// Returns the text that slipgate has written to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Directory of its pinned maps.
    pub fn pins(&self) -> &PinDir {
        &self.pins
    }

    /// Directory of its locks, its sockets, and the definitions that a daemon keeps.
    ///
    /// # Errors
    /// `/run/slipgate` cannot be read, or has no directory of these pins.
    pub fn run_dir(&self) -> Result<PathBuf> {
        const ALL: &str = "/run/slipgate";
        let pins = self.pins.path().as_os_str().as_encoded_bytes();
        let dirs = fs::read_dir(ALL).tried(format!("read {ALL}"))?.flatten();
        let is_ours =
            |dir: &PathBuf| fs::read(dir.join("pin-dir")).is_ok_and(|kept| kept.starts_with(pins));
        let ours = dirs.map(|entry| entry.path()).find(is_ours);
        ours.ok_or_else(|| Error::unexpected(format!("{ALL} has no directory of this slipgate's")))
    }

    /// Runs `slipgate ARGS… --pin-dir PINS` in the same namespace; as a user without privileges
    /// `slipgate ARGS…`.
    ///
    /// # Errors
    /// The command can't be started.
    pub fn run(&self, args: &[&str]) -> Result<Output> {
        match &self.user {
            Some(user) => user.run(&self.ns, args),
            None => run(&self.ns, &self.pins, args),
        }
    }

    /// The command that [`Slipgate::run`] runs; what runs it has to do so in the same namespace.
    ///
    /// # Errors
    /// There is no binary.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        match &self.user {
            Some(user) => Ok(user.slipgate(args)),
            None => command(&self.pins, args),
        }
    }

    /// Returns the output of `slipgate flows`, for all VMs.
    ///
    /// # Errors
    /// The command fails, or its output cannot be read.
    pub fn flows(&self) -> Result<Vec<FlowRow>> {
        self.json(&["flows", "--json"])
    }

    /// Runs `slipgate stats` and returns its JSON.
    ///
    /// # Errors
    /// The command fails, or its output is not JSON.
    pub fn stats(&self) -> Result<serde_json::Value> {
        self.json(&["stats", "--json"])
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, args: &[&str]) -> Result<T> {
        let output = self.run(args)?.stdout;
        serde_json::from_slice(&output).map_err(|error| {
            let text = String::from_utf8_lossy(&output);
            Error::unexpected(format!(
                "`slipgate {}`: {error}; it wrote:\n{text}",
                args.join(" ")
            ))
        })
    }

    /// The broker's process: the one we started.
    pub fn broker_pid(&self) -> u32 {
        self.broker.id()
    }

    /// The broker's children whose command line begins with `title`, such as `slipgate-engine`.
    pub fn children_named(&self, title: &str) -> Vec<u32> {
        owner::children_named(self.broker.id(), title)
    }

    /// The engine's process: the broker's child, while one runs.
    pub fn engine_pid(&mut self) -> Option<u32> {
        for pid in owner::children(self.broker.id()) {
            if !self.engines.contains(&pid) {
                self.engines.push(pid);
            }
        }
        self.engines
            .iter()
            .rev()
            .copied()
            .find(|pid| owner::runs(*pid))
    }

    /// Whether the broker runs.
    pub fn broker_runs(&self) -> bool {
        owner::runs(self.broker.id())
    }

    /// Kills the engine (`kill -9`). The broker may start another.
    ///
    /// # Errors
    /// No engine runs.
    pub fn kill_engine(&mut self) -> Result<u32> {
        let none = || Error::unexpected("kill the engine: the broker has no child that runs");
        let pid = self.engine_pid().ok_or_else(none)?;
        owner::kill(pid);
        Ok(pid)
    }

    /// Kills the broker (`kill -9`), and waits until it is gone.
    ///
    /// # Errors
    /// The broker cannot be killed or awaited.
    pub fn kill_broker(&mut self) -> Result<ExitStatus> {
        // Remember the engine while its parent can still tell.
        self.engine_pid();
        self.broker.kill().tried("kill the broker")?;
        self.broker.wait().tried("wait for the broker")
    }

    /// Kills both (`kill -9`), the engine first.
    ///
    /// # Errors
    /// A process cannot be killed or awaited.
    pub fn kill_both(&mut self) -> Result<()> {
        let engine = self.engine_pid();
        let _ = engine.map(owner::kill);
        self.kill_broker().map(drop)
    }

    /// Sends SIGTERM and returns the exit status.
    ///
    /// # Errors
    /// It does not end in time; then it is killed.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.engine_pid();
        // The child has not been waited for, so the pid is its.
        owner::signal(self.broker.id(), libc::SIGTERM);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.broker.try_wait().tried("wait for slipgate")? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill_both()?;
        let seconds = STOP_TIMEOUT.as_secs();
        Err(Error::unexpected(format!(
            "slipgate did not end {seconds} s after SIGTERM"
        )))
    }

    /// Starts a successor with the same arguments and pins, whatever is left of the old process:
    /// stop or kill that first, or replace it while it runs.
    ///
    /// # Errors
    /// As [`Slipgate::attach`].
    pub fn again(&self) -> Result<Slipgate> {
        self.again_as(&Start::default())
    }

    /// Starts a successor with these flags too.
    ///
    /// # Errors
    /// slipgate does not become ready.
    pub fn again_with(&self, flags: &[&str]) -> Result<Slipgate> {
        let mut args = self.args.clone();
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        Self::start(
            &Start::default(),
            self.ns.clone(),
            self.pins.clone(),
            self.command,
            args,
        )
    }

    /// Starts the successor with a deviating start.
    ///
    /// # Errors
    /// slipgate does not become ready.
    pub fn again_as(&self, start: &Start) -> Result<Slipgate> {
        let args = self.args.clone();
        Self::start(
            start,
            self.ns.clone(),
            self.pins.clone(),
            self.command,
            args,
        )
    }
}

impl Drop for Slipgate {
    fn drop(&mut self) {
        let engine = self.engine_pid();
        // A child that was waited for is not killed: `Child` knows.
        let _ = self.broker.kill();
        let _ = self.broker.wait();
        let _ = engine.map(owner::kill);
        if std::thread::panicking() {
            eprintln!("--- slipgate's stderr:\n{}---", self.stderr());
        }
    }
}

/// Runs `slipgate ARGS… --pin-dir PINS` in `ns` to its end.
///
/// # Errors
/// The program is missing, cannot be started, or fails.
pub fn run(ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<Output> {
    ns.output_with(command(pins, args)?, refusals_of(args))
}

fn command(pins: &PinDir, args: &[&str]) -> Result<Command> {
    let mut command = Command::new(binary()?);
    command.args(args).arg("--pin-dir").arg(pins.path());
    Ok(command)
}

/// Reads to the end, so that who writes never waits; what came is kept.
pub(crate) fn keep(mut from: impl Read, kept: &Mutex<String>) {
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let text = String::from_utf8_lossy(&buffer[..len]);
        kept.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_str(&text);
    }
}
