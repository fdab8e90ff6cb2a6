//! A NAT that runs as a process: its start, CPU pinning, CPU time and end.

use std::{
    env, fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use slipgate_testbed::{NetNs, affinity};

use crate::machine::Pinning;

/// A child that is killed when dropped.
pub(crate) struct NatProcess {
    child: Child,
    stderr: mpsc::Receiver<String>,
    pinning: Pinning,
}

impl NatProcess {
    /// Starts `command` in `ns`.
    ///
    /// # Errors
    /// It cannot be started or pinned.
    pub(crate) fn start(ns: &NetNs, mut command: Command, pinning: Pinning) -> Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = ns.spawn(command)?;
        let (said, stderr) = mpsc::channel();
        if let Some(mut pipe) = child.stderr.take() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(len @ 1..) = pipe.read(&mut buffer) {
                    // Reads on after nobody listens: it must not block on a full pipe.
                    let _ = said.send(String::from_utf8_lossy(&buffer[..len]).into_owned());
                }
            });
        }
        let process = NatProcess {
            child,
            stderr,
            pinning,
        };
        Ok(process)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the CPU that it is pinned to.
    pub(super) fn cpu(&self) -> Option<usize> {
        self.pinning.middle
    }

    /// Pins the threads that the process has at present.
    pub(super) fn pin(&self) -> Result<()> {
        pin(self.pid(), self.pinning.middle)
    }

    /// Checks that the process still runs.
    ///
    /// # Errors
    /// It has ended; the error has its output.
    pub(crate) fn check(&mut self) -> Result<()> {
        let Some(status) = self
            .child
            .try_wait()
            .context("look after the NAT process")?
        else {
            return Ok(());
        };
        let said = self.stderr.recv_timeout(Duration::from_millis(100));
        let mut said = said.unwrap_or_default();
        said.extend(self.stderr.try_iter());
        bail!("the NAT process ended with {status}: {}", said.trim());
    }
}

impl Drop for NatProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pins all threads of a process to `cpu`; `None` leaves them unpinned.
pub(crate) fn pin(pid: u32, cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    for thread in threads(pid)? {
        affinity::pin(thread as i32, cpu)?;
    }
    Ok(())
}

/// Run and wait times of all threads of a process, since their start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scheduled {
    /// Time on a CPU, user and system.
    pub(crate) ran: Duration,
    /// Time ready to run while another thread had the CPU.
    pub(crate) waited: Duration,
}

/// Reads the run and wait times of a process.
pub(crate) fn scheduled(pid: u32) -> Result<Scheduled> {
    let mut all = Scheduled::default();
    for thread in threads(pid)? {
        // Time on a CPU and time on a run queue, ns (Documentation/scheduler/sched-stats.rst).
        let path = format!("/proc/{pid}/task/{thread}/schedstat");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let mut fields = text.split_whitespace().map(str::parse);
        let (Some(Ok(ran)), Some(Ok(waited))) = (fields.next(), fields.next()) else {
            bail!("{path}: `{text}`");
        };
        all.ran += Duration::from_nanos(ran);
        all.waited += Duration::from_nanos(waited);
    }
    Ok(all)
}

/// Stops a process by signal, or lets it continue.
pub(super) fn hold(pid: u32, held: bool) -> Result<()> {
    let signal = if held { libc::SIGSTOP } else { libc::SIGCONT };
    // SAFETY: numbers only; the process is a child of ours, or a child's, that was not waited for.
    match unsafe { libc::kill(pid as i32, signal) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).with_context(|| format!("signal process {pid}")),
    }
}

fn threads(pid: u32) -> Result<Vec<u32>> {
    let path = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&path).with_context(|| format!("read {path}"))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect())
}

/// Returns the path of the program that a variable names.
///
/// # Errors
/// The variable is not set.
pub(crate) fn named(variable: &str) -> Result<PathBuf> {
    let named = env::var_os(variable).map(PathBuf::from);
    named.with_context(|| format!("{variable} names no binary"))
}

/// Returns the first line that a program prints as its version.
pub(crate) fn version_of(program: &Path) -> Result<String> {
    let itself = Command::new(program).arg("--version").output();
    let name = program.display();
    let itself = itself.with_context(|| format!("`{name}` is not installed"))?;
    let text = String::from_utf8_lossy(&itself.stdout);
    Ok(text
        .lines()
        .next()
        .map_or_else(|| name.to_string(), |line| line.trim().to_owned()))
}

/// Returns the version of a program that must be on `PATH`, from the package manager or from the
/// program.
pub(crate) fn version(program: &str, package: &str) -> Result<String> {
    let first = version_of(Path::new(program))?;
    let packaged = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Version}", package])
        .output();
    match packaged {
        Ok(output) if output.status.success() => {
            let version = String::from_utf8_lossy(&output.stdout);
            Ok(format!("{package} {version} (Debian)"))
        }
        _ => Ok(first),
    }
}
