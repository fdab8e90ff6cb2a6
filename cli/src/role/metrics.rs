//! The metrics process: answers Prometheus, with `--metrics`.
//!
//! What comes over HTTP is anybody's, so it is not the broker that reads it. This process maps the
//! shared tables for reading, gives their descriptors up, and is left with that memory, the
//! listening socket and the channel to the broker, which asks the engine for what only that knows:
//! what was refused in DNS ([`crate::sandbox::metrics`]). One thread does it all and waits for
//! nobody ([`server`]): a page is made at most once per second, whoever asks.
//!
//! It dies with the broker. When it dies alone, no packet is the worse for it, and the broker starts
//! another one.
mod http;
mod page;
mod server;

use std::net::TcpListener;

use anyhow::bail;
use slipgate_control::{layout::MAPS, maps::ReadOnlyMaps};
use slipgate_ipc::metrics::{MetricsStart, ToMetrics};

use super::inherited;
use crate::{args::ChildArgs, log, sandbox::metrics as sandbox};

/// Runs until the broker is gone.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = inherited::channel("metrics", args.fd)?;
    let Some(ToMetrics::Start(start)) = channel.receive()? else {
        bail!("the broker is gone before it said what to show");
    };
    let MetricsStart {
        maps,
        listener,
        owner_row,
        log,
    } = start;
    log::to_stderr(&log)?;
    if maps.len() != MAPS {
        bail!("the broker sent {} maps of {MAPS}", maps.len());
    }
    let maps = ReadOnlyMaps::from_fds(maps)?;
    let listener = TcpListener::from(listener);
    listener.set_nonblocking(true)?;
    sandbox::enter(broker, args.user)?;
    tracing::debug!("metrics are served");
    server::Server::new(maps, owner_row, channel, listener).run()
}
