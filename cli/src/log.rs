//! Messages for people, on stderr. Nobody has to read them: one that can't be written is dropped,
//! and what is being done goes on.
use std::io::{self, IsTerminal as _, Write};

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

use crate::show::plain::plain;

/// Starts writing messages of `level` ("info", or a filter like "slipgate=debug,info") and worse.
pub(crate) fn to_stderr(level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level)
        .with_context(|| format!("--log {level}: give error, warn, info, debug or trace"))?;
    let plain = std::env::var_os("NO_COLOR").is_some() || !std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Unheard(io::stderr()))
        // It would say so on stderr.
        .log_internal_errors(false)
        .with_ansi(!plain)
        .with_target(false)
        .try_init()
        .map_err(|e| anyhow::anyhow!("setting up messages: {e}"))
}

/// Says something on stderr, whatever the level of messages: a line, without its end.
pub(crate) fn say(text: std::fmt::Arguments<'_>) {
    // In one write: another process's message does not come between.
    let text = format!("slipgate: {text}\n");
    let _ = io::stderr().write_all(plain(&text).as_bytes());
}

/// A writer whose reader may be gone.
struct Unheard<W>(W);

impl<W: Write> Write for Unheard<W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let _ = self.0.write_all(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}
