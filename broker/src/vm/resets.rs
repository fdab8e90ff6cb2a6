//! Resets of a guest that begins anew (`--on-reboot restart`).
//!
//! # Theory of operation
//! The VMM says that the guest has reset itself, and waits: vCPUs and devices rest. A thread has the
//! VM's flows ended at the broker that serves it, by a request like that of `slipgate generation`, so
//! that both ends of each are told before the guest's next life sends a packet. Then the VMM is told to
//! go on. A guest that resets itself again and again is delayed more and more, and ends with the reset
//! that is one too many: so a boot that fails does not keep a CPU busy for ever.
//!
//! The VMM is not trusted: a message that its machine's flags or its last answer don't allow is
//! nonsense, ends nothing of the VM's, and the VMM with it is ended.
use std::{
    collections::VecDeque,
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;

use super::{
    former_flows::{self, ENDED_WITHIN, Patience},
    printable,
};
use crate::counted;

/// Time for which a reset counts.
const COUNTS_FOR: Duration = Duration::from_secs(60);
/// Delays before the next life, by the number of resets within that time. The one after them ends the
/// machine.
const BACK_OFF: [Duration; 6] = [
    Duration::ZERO,
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// Resets of the machine's guest.
#[derive(Debug)]
pub(crate) struct Resets {
    /// Whether the machine may begin anew.
    may_restart: bool,
    /// Whether the VMM was told that the machine does not go on.
    is_over: bool,
    /// Control socket of the broker that serves the VM, and its name there.
    served: Option<(PathBuf, String)>,
    recent: Recent,
    /// `None`: no reset is under way.
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    /// Says how the end of the flows went.
    said: UnixStream,
    /// The VMM's report of a triple fault. A machine that does not go on has it in its end.
    report: Option<String>,
}

/// Times of resets, the oldest first.
#[derive(Debug, Default)]
struct Recent(VecDeque<Instant>);

impl Recent {
    /// Counts a reset. Returns how long the next life is delayed.
    ///
    /// # Errors
    /// It is one too many: so many there were.
    fn add(&mut self, now: Instant) -> Result<Duration, usize> {
        let counts = |at: &Instant| now.saturating_duration_since(*at) < COUNTS_FOR;
        while self.0.front().is_some_and(|at| !counts(at)) {
            self.0.pop_front();
        }
        self.0.push_back(now);
        let number = self.0.len();
        BACK_OFF.get(number - 1).copied().ok_or(number)
    }
}

impl Resets {
    pub(crate) fn new(may_restart: bool) -> Self {
        Self {
            may_restart,
            is_over: false,
            served: None,
            recent: Recent::default(),
            under_way: None,
        }
    }

    /// The VM is served by the broker behind this control socket.
    pub(crate) fn served_by(&mut self, socket: &Path, name: &str) {
        self.served = Some((socket.to_owned(), name.to_owned()));
    }

    /// Readable when [`Resets::done`] has something to say.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.under_way.as_ref()?.said.as_fd())
    }

    /// The guest has reset itself, with this report if by a triple fault. Returns whether its flows
    /// are being ended; else it is not to go on.
    ///
    /// # Errors
    /// The VMM makes no sense: its machine may not begin anew, was told not to, or rests for the last
    /// reset. Or no thread can be made.
    pub(crate) fn begin(&mut self, report: Option<String>) -> anyhow::Result<bool> {
        if !self.may_restart {
            anyhow::bail!("says that the guest was reset, and is not to begin it anew");
        }
        if self.is_over {
            anyhow::bail!("says that the guest was reset after its end");
        }
        if self.under_way.is_some() {
            anyhow::bail!("says that the guest was reset while it rests");
        }
        let Some((socket, name)) = self.served.clone() else {
            self.is_over = true;
            return Ok(false);
        };
        let delay = match self.recent.add(Instant::now()) {
            Ok(delay) => delay,
            Err(times) => {
                self.is_over = true;
                tracing::warn!(
                    "{name} has reset itself {times} times within a minute, and does not begin anew"
                );
                return Ok(false);
            }
        };
        let (ours, mut theirs) = UnixStream::pair().context("making a pair of sockets")?;
        ours.set_nonblocking(true)?;
        let end = move || {
            thread::sleep(delay);
            if end_flows(&socket, &name) {
                // Nobody listens where the machine has ended meanwhile.
                let _ = theirs.write_all(b"1");
            }
        };
        let spawned = thread::Builder::new().name("reset".into()).spawn(end);
        spawned.context("starting a thread that ends the VM's flows")?;
        self.under_way = Some(UnderWay { said: ours, report });
        Ok(true)
    }

    /// Returns whether the guest is to go on, once the flows have ended or can't be.
    pub(crate) fn done(&mut self) -> Option<bool> {
        let said = self.under_way.as_mut()?.said.read(&mut [0]);
        let goes_on = match said {
            Ok(bytes) => bytes > 0,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return None,
            Err(_) => false,
        };
        let report = self.under_way.take()?.report;
        self.is_over = !goes_on;
        if let Some(report) = report.filter(|_| goes_on) {
            tracing::warn!("a triple fault: {}", printable(&report));
        }
        Some(goes_on)
    }
}

/// Ends a VM's flows. Returns whether they have ended.
fn end_flows(socket: &Path, name: &str) -> bool {
    end_flows_within(socket, name, ENDED_WITHIN)
}

fn end_flows_within(socket: &Path, name: &str, within: Duration) -> bool {
    match former_flows::end_flows(socket, name, within, Patience::ForAnything) {
        Ok(flows) => {
            let ended = counted(flows, "flow");
            tracing::info!("{name} has reset itself; ended {ended} of its former life");
            true
        }
        Err(why) => {
            tracing::error!("{name} has reset itself, and its flows can't be ended: {why}");
            false
        }
    }
}

#[cfg(test)]
#[path = "resets_test.rs"]
mod tests;
