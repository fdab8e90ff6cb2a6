//! Messages for people, on stderr.
use std::io::IsTerminal as _;

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

/// Starts writing messages of `level` ("info", or a filter like "slipgate=debug,info") and worse.
pub(crate) fn to_stderr(level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level)
        .with_context(|| format!("--log {level}: give error, warn, info, debug or trace"))?;
    let plain = std::env::var_os("NO_COLOR").is_some() || !std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(!plain)
        .with_target(false)
        .try_init()
        .map_err(|e| anyhow::anyhow!("setting up messages: {e}"))
}
