//! Resolvers of the host, from its resolv.conf(5). They serve VMs whose policy names none.
use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use slipgate_policy::parse_resolv_conf;

/// File that names the host's resolvers: resolv.conf(5).
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";

/// The host's resolvers as last read.
#[derive(Debug)]
pub(crate) struct HostResolvers {
    file: PathBuf,
    now: Vec<SocketAddr>,
}

impl HostResolvers {
    /// Reads the present resolvers of the host.
    pub(crate) fn find() -> Self {
        Self::of(Path::new(RESOLV_CONF))
    }

    fn of(file: &Path) -> Self {
        Self {
            now: read(file),
            file: file.to_owned(),
        }
    }

    pub(crate) fn now(&self) -> &[SocketAddr] {
        &self.now
    }

    /// Reads the resolvers again. Returns them if they changed. A file without resolvers is assumed
    /// to be incomplete, so the former ones remain.
    pub(crate) fn changed(&mut self) -> Option<Vec<SocketAddr>> {
        let found = read(&self.file);
        if found.is_empty() || found == self.now {
            return None;
        }
        self.now.clone_from(&found);
        Some(found)
    }
}

/// systemd-resolved's stub is usable: the engine's sockets on this host send the questions.
fn read(file: &Path) -> Vec<SocketAddr> {
    parse_resolv_conf(&fs::read_to_string(file).unwrap_or_default())
}

#[cfg(test)]
#[path = "resolvers_test.rs"]
mod tests;
