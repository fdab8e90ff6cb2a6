//! Output of a guest, and the end of the program that ran it.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ExitStatus},
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    error::{Error, Result, Tried},
    rig,
};

/// A guest's output from its start to its end.
#[derive(Clone, Debug)]
pub struct GuestOutput {
    /// Lines of the guest's console.
    pub console: Vec<String>,
    /// Text of the VMM's stderr.
    pub stderr: String,
    /// The VMM's exit status; `None` when it was killed because its time was over.
    pub status: Option<ExitStatus>,
    /// Time from the start of the VMM to the first line of the guest.
    pub to_first_line: Option<Duration>,
    /// Time from the start of the VMM to its end.
    pub took: Duration,
}

impl GuestOutput {
    /// The lines that are JSON objects.
    pub fn lines(&self) -> impl Iterator<Item = Value> + '_ {
        let objects = self.console.iter().filter(|line| line.starts_with('{'));
        objects.filter_map(|line| serde_json::from_str(line).ok())
    }

    /// The results of a workload, in order.
    pub fn results(&self, workload: &str) -> Vec<Value> {
        let of = |line: &Value| line["workload"] == workload;
        self.lines().filter(of).collect()
    }

    /// Whether the guest came to its end and all its workloads did well.
    pub fn is_well(&self) -> bool {
        self.lines()
            .any(|line| line["end"] == true && line["status"] == 0)
    }

    /// Checks [`GuestOutput::is_well`].
    ///
    /// # Errors
    /// It is false; the error has the whole output.
    pub fn expect_well(self) -> Result<Self> {
        match self.is_well() {
            true => Ok(self),
            false => Err(Error::unexpected(self.to_string())),
        }
    }
}

impl std::fmt::Display for GuestOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.status {
            Some(status) => writeln!(f, "the VMM ended with {status}")?,
            None => writeln!(f, "the VMM was killed after {:?}", self.took)?,
        }
        writeln!(f, "console:\n{}", self.console.join("\n"))?;
        write!(f, "stderr:\n{}", self.stderr)
    }
}

/// Reads a VMM's output until it ends; kills it when it runs longer than `timeout`.
pub(super) fn follow(mut vmm: Child, timeout: Duration) -> Result<GuestOutput> {
    let started = Instant::now();
    let (Some(out), Some(err)) = (vmm.stdout.take(), vmm.stderr.take()) else {
        return Err(Error::unexpected(
            "the VMM was started without pipes".to_owned(),
        ));
    };
    let (said, lines) = mpsc::channel();
    let reader = thread::spawn(move || {
        let lines = BufReader::new(out).split(b'\n').map_while(|line| line.ok());
        for line in lines {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if said.send((started.elapsed(), line)).is_err() {
                return;
            }
        }
    });
    let stderr = all_of(err);
    let status = rig::wait(&mut vmm, started + timeout).tried("wait for the VMM")?;
    let took = started.elapsed();
    let _ = reader.join();
    let (times, console): (Vec<_>, Vec<_>) = lines.iter().unzip();
    let first = console
        .iter()
        .position(|line: &String| line.starts_with('{'));
    Ok(GuestOutput {
        to_first_line: first.map(|at| times[at]),
        console,
        stderr: stderr.join().unwrap_or_default(),
        status,
        took,
    })
}

fn all_of(mut source: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = source.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
