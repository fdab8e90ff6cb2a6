//! Messages for people, on stderr. A message that can't be written at once is dropped, and the work
//! continues: a full pipe or a stopped terminal would otherwise stop the engine's loop, and with it
//! all VMs. The number of dropped messages precedes the next one that is written.
use std::{
    io::{self, IsTerminal as _, Write},
    os::fd::AsFd,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing_subscriber::{
    filter::Targets, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

pub(crate) use slipgate_broker::say;

/// Starts writing messages of `level` ("info", or a filter like "slipgate=debug,info") and worse.
pub(crate) fn to_stderr(level: &str) -> anyhow::Result<()> {
    let filter: Targets = level
        .parse()
        .with_context(|| format!("--log {level}: give error, warn, info, debug or trace"))?;
    let plain = std::env::var_os("NO_COLOR").is_some() || !std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| Unheard {
            to: io::stderr(),
            dropped: &DROPPED,
        })
        // It would say so on stderr.
        .log_internal_errors(false)
        .with_ansi(!plain)
        .with_target(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(filter)
        .try_init()
        .map_err(|e| anyhow::anyhow!("setting up messages: {e}"))
}

/// Number of dropped messages that was not reported yet.
static DROPPED: AtomicU64 = AtomicU64::new(0);
/// Bytes that a writable pipe accepts at once: a page.
const AT_ONCE: usize = 4_096;

/// A writer whose reader may have gone or stopped reading.
struct Unheard<'a, W> {
    to: W,
    dropped: &'a AtomicU64,
}

impl<W: Write + AsFd> Unheard<'_, W> {
    /// Whether it would take something without waiting.
    fn takes(&self) -> bool {
        let mut fds = [PollFd::new(self.to.as_fd(), PollFlags::POLLOUT)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Writes as much as can be written without blocking. Returns whether that was everything.
    fn write_at_once(&mut self, text: &[u8]) -> bool {
        text.chunks(AT_ONCE).all(|some| {
            let takes = self.takes();
            if takes {
                let _ = self.to.write_all(some);
            }
            takes
        })
    }
}

impl<W: Write + AsFd> Write for Unheard<'_, W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let dropped = self.dropped.swap(0, Relaxed);
        if dropped > 0 {
            let told = format!("{dropped} messages are lost: nobody read them\n");
            if !self.write_at_once(told.as_bytes()) {
                self.dropped.fetch_add(dropped, Relaxed);
            }
        }
        if !self.write_at_once(text) {
            self.dropped.fetch_add(1, Relaxed);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.to.flush();
        Ok(())
    }
}

#[cfg(test)]
#[path = "log_test.rs"]
mod tests;
