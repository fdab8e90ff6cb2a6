//! Files that the NAT's flags name, opened before anything is created: a fault in one is an error
//! of the command line.
use std::{
    fs::File,
    net::{SocketAddr, TcpListener},
    os::unix::net::UnixListener,
};

use nix::sys::socket::SockType;
use slipgate_control::Users;
use slipgate_policy::{
    PolicySet,
    document::{ConfigError, LoadedPolicies},
};

use crate::{
    config::{Config, check_snapshot_dir},
    handover::HandedOver,
    output_files::{open_flow_log, open_pcap},
};

/// All files and settings that are read before the start.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) loaded: LoadedPolicies,
    pub(crate) policies: PolicySet,
    pub(crate) flow_log: Option<File>,
    pub(crate) pcap: Option<File>,
    /// Listening socket of `--metrics`.
    pub(crate) metrics: Option<TcpListener>,
    /// Listening sockets of the API, and whether their clients may change anything.
    pub(crate) api: Vec<(UnixListener, bool)>,
    /// Users that slipgate's processes run as.
    pub(crate) users: Users,
    /// State of a predecessor that is not in use yet.
    pub(crate) handed_over: HandedOver,
}

impl Inputs {
    /// Reads the deny files, and opens the flow log. `users`: those that were claimed already.
    pub(crate) fn open(
        config: &Config,
        mut handed_over: HandedOver,
        users: Option<Users>,
    ) -> Result<Self, ConfigError> {
        let loaded = config.load_policies()?;
        let policies = loaded.compile()?;
        if let Some(dir) = &config.snapshot_dir {
            check_snapshot_dir(dir).map_err(|why| {
                let remedy = "give a directory that is yours alone, as `mkdir -m 700` makes one";
                ConfigError::new("--snapshot-dir", dir.display(), why, remedy)
            })?;
        }
        Ok(Self {
            loaded,
            policies,
            flow_log: config.flow_log.as_deref().map(open_flow_log).transpose()?,
            pcap: config.pcap.as_deref().map(open_pcap).transpose()?,
            metrics: config
                .metrics
                .map(|address| listen(address, &mut handed_over))
                .transpose()?,
            api: config
                .api
                .iter()
                .map(|socket| Ok((socket.listen(&mut handed_over)?, socket.may_change)))
                .collect::<Result<_, ConfigError>>()?,
            users: users.unwrap_or_else(Users::claim),
            handed_over,
        })
    }

    /// Files that stay open, each with its flag.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let flow_log = self.flow_log.iter().map(|file| ("--flow-log", file));
        flow_log.chain(self.pcap.iter().map(|file| ("--pcap", file)))
    }
}

/// Opens the listening socket of `--metrics`, for a process that has no predecessor.
pub(crate) fn listen_for_metrics(address: SocketAddr) -> Result<TcpListener, ConfigError> {
    listen(address, &mut HandedOver::default())
}

/// Opens the listening socket of `--metrics`.
fn listen(address: SocketAddr, handed_over: &mut HandedOver) -> Result<TcpListener, ConfigError> {
    if let Some(socket) = handed_over.socket(SockType::Stream, address) {
        return Ok(socket.into());
    }
    TcpListener::bind(address).map_err(|e| {
        let problem = format!("it can't be listened at ({e})");
        let remedy = "give an address of this host and a free port, like 127.0.0.1:9600";
        ConfigError::new("--metrics", address, problem, remedy)
    })
}

#[cfg(test)]
#[path = "inputs_test.rs"]
mod tests;
