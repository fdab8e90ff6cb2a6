//! The files that the NAT's flags name, opened before anything is made: what is wrong with one is
//! the command line's fault.
use std::{
    fs::{File, OpenOptions},
    io,
    net::TcpListener,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use slipgate_control::Users;
use slipgate_policy::PolicySet;

use super::metrics;
use crate::config::Config;
use slipgate_policy::document::{ConfigError, LoadedPolicies};

/// All of them.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) loaded: LoadedPolicies,
    pub(super) policies: PolicySet,
    pub(super) flow_log: Option<File>,
    pub(super) pcap: Option<File>,
    /// The socket of `--metrics`.
    pub(super) metrics: Option<TcpListener>,
    /// Whom our processes are.
    pub(super) users: Users,
}

impl Inputs {
    /// Reads the deny files, and opens the flow log.
    pub(super) fn open(config: &Config) -> Result<Self, ConfigError> {
        let loaded = config.load_policies()?;
        let policies = loaded.compile()?;
        Ok(Self {
            loaded,
            policies,
            flow_log: config.flow_log.as_deref().map(open_flow_log).transpose()?,
            pcap: config.pcap.as_deref().map(open_pcap).transpose()?,
            metrics: config.metrics.map(metrics::listen).transpose()?,
            users: Users::claim(),
        })
    }

    /// Those that stay open, by flag.
    pub(super) fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let flow_log = self.flow_log.iter().map(|file| ("--flow-log", file));
        flow_log.chain(self.pcap.iter().map(|file| ("--pcap", file)))
    }
}

/// Readable too: an adopting engine looks for what its predecessor recorded last.
pub(super) fn open_flow_log(path: &Path) -> Result<File, ConfigError> {
    open_to_append("--flow-log", path)
}

/// Appended to: a further section of a pcapng file is as good as the first.
pub(super) fn open_pcap(path: &Path) -> Result<File, ConfigError> {
    open_to_append("--pcap", path)
}

fn open_to_append(flag: &'static str, path: &Path) -> Result<File, ConfigError> {
    let refused =
        |problem: String, remedy: &str| ConfigError::new(flag, path.display(), problem, remedy);
    let unusable = |e: io::Error| {
        let remedy = "give a file in a directory that is there";
        refused(format!("can't append to it ({e})"), remedy)
    };
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o640)
        // A FIFO without a reader is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(unusable)?;
    // Writing to anything else may block, and every VM waits with it.
    if !file.metadata().map_err(unusable)?.is_file() {
        let remedy = "give one, and read it with `tail -F`";
        return Err(refused("it is no regular file".into(), remedy));
    }
    Ok(file)
}
