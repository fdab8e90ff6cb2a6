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
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                let why = format!("the guest did not say {part:?}, but {:?}", self.seen);
                return Err(Error::unexpected(why));
            };
            let json = serde_json::from_str(&line);
            self.seen.push(line);
            match json {
                Ok(json) if self.seen.last().is_some_and(|line| line.contains(part)) => {
                    return Ok(json);
                }
                _ => {}
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
