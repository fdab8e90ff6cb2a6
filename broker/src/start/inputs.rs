//! The files that the NAT's flags name, opened before anything is made: what is wrong with one is
//! the command line's fault.
use std::{
    fs::File,
    net::{SocketAddr, TcpListener},
};

use slipgate_control::Users;
use slipgate_policy::{
    PolicySet,
    document::{ConfigError, LoadedPolicies},
};

use crate::{
    config::Config,
    output_files::{open_flow_log, open_pcap},
};

/// All of them.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) loaded: LoadedPolicies,
    pub(crate) policies: PolicySet,
    pub(crate) flow_log: Option<File>,
    pub(crate) pcap: Option<File>,
    /// The socket of `--metrics`.
    pub(crate) metrics: Option<TcpListener>,
    /// Whom our processes are.
    pub(crate) users: Users,
}

impl Inputs {
    /// Reads the deny files, and opens the flow log.
    pub(crate) fn open(config: &Config) -> Result<Self, ConfigError> {
        let loaded = config.load_policies()?;
        let policies = loaded.compile()?;
        Ok(Self {
            loaded,
            policies,
            flow_log: config.flow_log.as_deref().map(open_flow_log).transpose()?,
            pcap: config.pcap.as_deref().map(open_pcap).transpose()?,
            metrics: config.metrics.map(listen).transpose()?,
            users: Users::claim(),
        })
    }

    /// Those that stay open, by flag.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let flow_log = self.flow_log.iter().map(|file| ("--flow-log", file));
        flow_log.chain(self.pcap.iter().map(|file| ("--pcap", file)))
    }
}

/// Listens where `--metrics` says.
fn listen(address: SocketAddr) -> Result<TcpListener, ConfigError> {
    TcpListener::bind(address).map_err(|e| {
        let problem = format!("it can't be listened at ({e})");
        let remedy = "give an address of this host and a free port, like 127.0.0.1:9600";
        ConfigError::new("--metrics", address, problem, remedy)
    })
}
