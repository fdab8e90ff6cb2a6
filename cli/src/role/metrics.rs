//! The metrics process: answers Prometheus, with `--metrics`.
//!
//! HTTP requests may come from anyone, so the broker does not read them. This process maps the
//! shared tables for reading, gives up their descriptors, and keeps that memory, the listening
//! socket and the channel to the broker, which asks the engine for data that only the engine has:
//! the counts of DNS refusals ([`crate::sandbox::servers`]). One thread does all the work and never
//! blocks on a client ([`server`]): a page is made at most once per second, however many clients
//! ask.
//!
//! It dies with the broker. If it dies alone, no packet is affected, and the broker starts another
//! one.
mod http;
pub(super) mod page;
mod server;

use std::net::TcpListener;

use anyhow::bail;
use slipgate_control::{layout::MAPS, maps::ReadOnlyMaps};
use slipgate_ipc::metrics::ToMetrics;

use super::inherited_channel;
use crate::{
    args::ChildArgs,
    log,
    sandbox::servers::{self, Server},
};

/// Runs until the broker is gone.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = inherited_channel("metrics", args.fd)?;
    let Some(ToMetrics::Start(start)) = channel.receive()? else {
        bail!("the broker ended before it sent the page's settings");
    };
    log::to_stderr(&start.log)?;
    if start.maps.len() != MAPS {
        bail!("the broker sent {} maps of {MAPS}", start.maps.len());
    }
    let maps = ReadOnlyMaps::from_fds(start.maps)?;
    let listener = TcpListener::from(start.listener);
    listener.set_nonblocking(true)?;
    servers::enter(Server::Metrics, broker, args.user)?;
    tracing::debug!("metrics are served");
    let shown = page::Shown {
        owner_rows: start.owner_rows,
        label_keys: start.label_keys,
    };
    server::Server::new(maps, shown, channel, listener).run()
}
