//! `slipgate run`: a microVM under slipgate's own VMM, from its first line to its report.

use std::{
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Result, Tried},
    netns::NetNs,
    ordinary_user::OrdinaryUser,
    owner,
    pins::PinDir,
    slipgate::{binary, keep},
};

/// A running `slipgate run`. All its processes are killed on drop; pins go with the [`PinDir`].
pub struct MicroVm {
    ns: NetNs,
    by: By,
    broker: Child,
    started: Instant,
    lines: mpsc::Receiver<Line>,
    seen: Vec<Line>,
    stderr: Arc<Mutex<String>>,
    reading: Option<JoinHandle<()>>,
    report: PathBuf,
}

/// User that the machine runs as.
enum By {
    /// Root's, with the directory of its report.
    Root(
        PinDir,
        #[expect(dead_code, reason = "it goes with the VM")] tempfile::TempDir,
    ),
    User(OrdinaryUser),
}

/// A line on the guest's console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Time since the start of `slipgate run`.
    pub after: Duration,
    /// Text of the line, without its end.
    pub text: String,
}

impl Line {
    /// Parses the line as JSON; `None` if it is not JSON.
    pub fn json(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.text).ok()
    }
}

/// Outcome of a microVM.
#[derive(Debug)]
pub struct MicroVmEnd {
    /// Exit status of the broker.
    pub status: ExitStatus,
    /// Time since the start.
    pub after: Duration,
    /// Every line of the guest's console.
    pub lines: Vec<Line>,
    /// Text that slipgate wrote to stderr.
    pub stderr: String,
    /// Contents of the `--report` file; null when there is none.
    pub report: serde_json::Value,
}

impl MicroVmEnd {
    /// The console's lines that are JSON objects and have this key.
    pub fn said(&self, key: &str) -> Vec<serde_json::Value> {
        let objects = self.lines.iter().filter_map(Line::json);
        objects.filter(|object| object.get(key).is_some()).collect()
    }

    /// Checks that the guest ended by itself, and with success.
    ///
    /// # Panics
    /// If not, with the console and slipgate's messages.
    #[track_caller]
    pub fn assert_success(&self) {
        let code = self.status.code();
        assert_eq!(code, Some(0), "{:#?}\n{}", self.lines, self.stderr);
    }
}

impl MicroVm {
    /// Starts `slipgate run --pin-dir PINS --report FILE ARGS…` in `ns`.
    ///
    /// # Errors
    /// The program is missing or cannot be started.
    pub fn start(ns: &NetNs, pins: &PinDir, args: &[&str]) -> Result<MicroVm> {
        Self::start_changed(ns, pins, args, |_| {})
    }

    /// As [`MicroVm::start`], of a command to which something is done before, such as what a host refuses
    /// it.
    ///
    /// # Errors
    /// As of [`MicroVm::start`].
    pub fn start_changed(
        ns: &NetNs,
        pins: &PinDir,
        args: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Result<MicroVm> {
        let scratch = tempfile::tempdir().tried("make a directory for the report")?;
        let report = scratch.path().join("report.json");
        let mut command = Command::new(binary()?);
        command
            .arg("run")
            .arg("--pin-dir")
            .arg(pins.path())
            .arg("--report")
            .arg(&report)
            .args(args);
        change(&mut command);
        Self::spawn(ns, command, By::Root(pins.clone(), scratch), report)
    }

    /// Starts `slipgate run --mode userspace --report FILE ARGS…` in `ns`, by a user who may open
    /// /dev/kvm.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_by(ns: &NetNs, user: &OrdinaryUser, args: &[&str]) -> Result<MicroVm> {
        let report = user.file("run/report.json");
        let report_arg = report.display().to_string();
        let run = ["run", "--mode", "userspace", "--report", &report_arg];
        let command = user.slipgate_with_kvm(&[&run, args].concat());
        Self::spawn(ns, command, By::User(user.clone()), report)
    }

    fn spawn(ns: &NetNs, mut command: Command, by: By, report: PathBuf) -> Result<MicroVm> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let started = Instant::now();
        let mut broker = ns.spawn(command)?;
        let stderr = Arc::new(Mutex::new(String::new()));
        let (to, lines) = mpsc::channel();
        let mut reading = None;
        if let (Some(out), Some(err)) = (broker.stdout.take(), broker.stderr.take()) {
            // Both read on after nobody listens: the guest must not wait for a full pipe.
            std::thread::spawn(move || read_lines(out, started, &to));
            let kept = stderr.clone();
            reading = Some(std::thread::spawn(move || keep(err, &kept)));
        }
        Ok(MicroVm {
            ns: ns.clone(),
            by,
            broker,
            started,
            lines,
            seen: Vec::new(),
            stderr,
            reading,
            report,
        })
    }

    /// Waits for a line of the console that contains `part`.
    ///
    /// # Errors
    /// No such line came in time, or the program has ended.
    pub fn await_line(&mut self, part: &str, within: Duration) -> Result<Line> {
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.text.contains(part) {
                        return Ok(line);
                    }
                }
                Err(_) => {
                    return Err(Error::unexpected(format!(
                        "the guest did not say {part:?}, but {:?}; stderr:\n{}",
                        self.seen,
                        self.stderr()
                    )));
                }
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end in time; then it is killed.
    pub fn finish(mut self, within: Duration) -> Result<MicroVmEnd> {
        let deadline = Instant::now() + within;
        let status = loop {
            if let Some(status) = self.broker.try_wait().tried("wait for slipgate")? {
                break status;
            }
            if Instant::now() >= deadline {
                return Err(Error::unexpected(format!(
                    "`slipgate run` did not end within {} s; its guest said {:?}; stderr:\n{}",
                    within.as_secs(),
                    self.lines.try_iter().collect::<Vec<_>>(),
                    self.stderr()
                )));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let after = self.started.elapsed();
        // To their ends: all writers are gone.
        self.seen.extend(self.lines.iter());
        if let Some(reading) = self.reading.take() {
            let _ = reading.join();
        }
        let report = std::fs::read(&self.report).unwrap_or_default();
        Ok(MicroVmEnd {
            status,
            after,
            lines: std::mem::take(&mut self.seen),
            stderr: self.stderr(),
            report: serde_json::from_slice(&report).unwrap_or_default(),
        })
    }

    /// Returns the text that slipgate has written to stderr so far.
    pub fn stderr(&self) -> String {
        let text = self.stderr.lock();
        text.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs `slipgate ARGS…` in the same namespace, as who started the VM.
    ///
    /// # Errors
    /// The command can't be started.
    pub fn run(&self, args: &[&str]) -> Result<std::process::Output> {
        match &self.by {
            By::Root(pins, _) => crate::slipgate::run(&self.ns, pins, args),
            By::User(user) => user.run(&self.ns, args),
        }
    }

    /// The process that was started.
    pub fn broker_pid(&self) -> u32 {
        self.broker.id()
    }

    /// The process of the VMM, while it runs.
    pub fn vmm_pid(&self) -> Option<u32> {
        self.child("slipgate-vmm")
    }

    /// The process of the engine, while it runs.
    pub fn engine_pid(&self) -> Option<u32> {
        self.child("slipgate-engine")
    }

    /// Memory of the broker and the VMM, each page divided by the number of processes that have it
    /// (PSS), KiB.
    ///
    /// # Errors
    /// One of them has ended.
    pub fn memory_kib(&self) -> Result<u64> {
        let none = || Error::unexpected("it has no VMM");
        let vmm = self.vmm_pid().ok_or_else(none)?;
        let began = Instant::now();
        let of = |pid: u32| {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = std::fs::read_to_string(&path).tried(format!("reading {path}"))?;
            let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            kib.ok_or_else(|| Error::unexpected(format!("{path} after {:?}", began.elapsed())))
        };
        Ok(of(vmm)? + of(self.broker_pid())?)
    }

    fn child(&self, title: &str) -> Option<u32> {
        owner::children_named(self.broker.id(), title).pop()
    }
}

impl Drop for MicroVm {
    fn drop(&mut self) {
        // The others die with it, by the kernel's hand.
        let _ = self.broker.kill();
        let _ = self.broker.wait();
        if std::thread::panicking() {
            eprintln!("--- slipgate's stderr:\n{}---", self.stderr());
        }
    }
}

fn read_lines(from: impl Read, started: Instant, to: &mpsc::Sender<Line>) {
    for line in BufReader::new(from)
        .split(b'\n')
        .map_while(std::result::Result::ok)
    {
        let text = String::from_utf8_lossy(&line);
        let _ = to.send(Line {
            after: started.elapsed(),
            text: text.trim_end_matches('\r').to_owned(),
        });
    }
}
