//! A VMM that is followed line by line while its guest works.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    error::{Error, Result},
    netns::NetNs,
};

/// A running VMM with the guest's console on its stdout. Killed on drop.
pub struct Followed {
    vmm: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Followed {
    /// Starts a VMM in a namespace.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(namespace: &NetNs, mut command: Command) -> Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut vmm = namespace.spawn(command)?;
        let (said, lines) = mpsc::channel();
        if let Some(console) = vmm.stdout.take() {
            std::thread::spawn(move || {
                // Reads on after nobody listens: the guest must not wait for a full pipe.
                for line in BufReader::new(console)
                    .split(b'\n')
                    .map_while(|line| line.ok())
                {
                    let _ = said.send(String::from_utf8_lossy(&line).trim_end().to_owned());
                }
            });
        }
        Ok(Followed {
            vmm,
            lines,
            seen: Vec::new(),
        })
    }

    /// Process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.vmm.id()
    }

    /// Waits for a line of JSON that contains `part`.
    ///
    /// # Errors
    /// No such line came in time, or the VMM has ended.
    pub fn await_line(&mut self, part: &str, within: Duration) -> Result<Value> {
        let json = |line: &str| serde_json::from_str(line).ok();
        self.await_any(part, within, json)
    }

    /// Waits for a line that contains `part`.
    ///
    /// # Errors
    /// As [`Followed::await_line`].
    pub fn await_text(&mut self, part: &str, within: Duration) -> Result<String> {
        self.await_any(part, within, |line| Some(line.to_owned()))
    }

    fn await_any<T>(
        &mut self,
        part: &str,
        within: Duration,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                let why = format!("the guest did not say {part:?}, but {:?}", self.seen);
                return Err(Error::unexpected(why));
            };
            let is_it = line.contains(part);
            let told = is_it.then(|| read(&line)).flatten();
            self.seen.push(line);
            if let Some(told) = told {
                return Ok(told);
            }
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}
