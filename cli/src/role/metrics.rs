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

use std::{net::TcpListener, os::fd::OwnedFd};

use anyhow::{Context as _, bail};
use slipgate_control::{layout::MAPS, maps::ReadOnlyMaps};

use super::inherited;
use crate::{args::ChildArgs, channel::ToMetrics, log, sandbox::metrics as sandbox};

/// Runs until the broker is gone.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = inherited::channel("metrics", args.fd)?;
    let Some((ToMetrics::Start(start), mut fds)) = channel.receive()? else {
        bail!("the broker is gone before it said what to show");
    };
    log::to_stderr(&start.log)?;
    let listener: OwnedFd = fds.pop().context("the broker sent no socket")?;
    if fds.len() != MAPS {
        bail!("the broker sent {} maps of {MAPS}", fds.len());
    }
    let maps = ReadOnlyMaps::from_fds(fds)?;
    let listener = TcpListener::from(listener);
    listener.set_nonblocking(true)?;
    sandbox::enter(broker, args.user)?;
    tracing::debug!("metrics are served");
    server::Server::new(maps, start.owner_row, channel, listener).run()
}
