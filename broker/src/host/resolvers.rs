//! The host's resolvers, which are asked for VMs whose policy has none of its own: as its file has
//! them, now.
use std::{
    fs,
    net::SocketAddrV4,
    path::{Path, PathBuf},
};

use super::resolvers;

/// Where the host says who its resolvers are: resolv.conf(5).
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Who they were when they were last looked for.
#[derive(Debug)]
pub(crate) struct HostResolvers {
    file: PathBuf,
    now: Vec<SocketAddrV4>,
}

impl HostResolvers {
    /// As they are now.
    pub(crate) fn find() -> Self {
        Self::of(Path::new(RESOLV_CONF))
    }

    fn of(file: &Path) -> Self {
        Self {
            now: read(file),
            file: file.to_owned(),
        }
    }

    pub(crate) fn now(&self) -> &[SocketAddrV4] {
        &self.now
    }

    /// Looks for them again: they, if they are others. A file without any is one that is just being
    /// written: those of before stay.
    pub(crate) fn changed(&mut self) -> Option<Vec<SocketAddrV4>> {
        let found = read(&self.file);
        if found.is_empty() || found == self.now {
            return None;
        }
        self.now.clone_from(&found);
        Some(found)
    }
}

fn read(file: &Path) -> Vec<SocketAddrV4> {
    resolvers(&fs::read_to_string(file).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_followed_and_an_empty_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        let write = |text: &str| fs::write(&file, text).unwrap();
        let at = |text: &str| vec![text.parse::<SocketAddrV4>().unwrap()];
        write("nameserver 192.0.2.1\n");
        let mut resolvers = HostResolvers::of(&file);
        assert_eq!(resolvers.now(), at("192.0.2.1:53"));
        assert_eq!(resolvers.changed(), None);
        write("nameserver 192.0.2.2\nnameserver 2001:db8::1\n");
        assert_eq!(resolvers.changed(), Some(at("192.0.2.2:53")));
        assert_eq!(resolvers.changed(), None);
        write("");
        assert_eq!(resolvers.changed(), None);
        fs::remove_file(&file).unwrap();
        assert_eq!(resolvers.changed(), None);
        assert_eq!(resolvers.now(), at("192.0.2.2:53"));
        write("nameserver 192.0.2.1\n");
        assert_eq!(resolvers.changed(), Some(at("192.0.2.1:53")));
    }
}
