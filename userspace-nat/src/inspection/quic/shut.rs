//! Connection ids of a flow that are shut: packets to them are dropped, or they may not begin a
//! connection.
use std::{
    collections::{HashSet, hash_map::RandomState},
    hash::BuildHasher,
};

use crate::inspection::Refused;

/// Maximum number of connections of a flow, besides the known ones.
pub(super) const MAX_PAST: usize = 4_096;
/// Maximum number of ids of either kind. A connection has two.
const MOST: usize = 2 * MAX_PAST;

/// Hashes of connection ids. A collision, which is unlikely, causes one client's connection to be
/// dropped.
#[derive(Debug, Default)]
pub(super) struct ShutIds {
    hasher: RandomState,
    /// Ids of connections that made room for others: packets to them are dropped.
    past: HashSet<u64>,
    /// Ids that a server chose for itself in connections that are not known: they may not begin a
    /// connection. Such an answer may be late, or belong to one of several connections with the
    /// same client id, or to one that was not examined.
    servers: HashSet<u64>,
}

impl ShutIds {
    pub(super) fn has_past(&self, id: &[u8]) -> bool {
        !self.past.is_empty() && self.past.contains(&self.hasher.hash_one(id))
    }

    pub(super) fn has_servers(&self, id: &[u8]) -> bool {
        !self.servers.is_empty() && self.servers.contains(&self.hasher.hash_one(id))
    }

    /// Takes a connection's ids in, if there is room.
    pub(super) fn take_past(&mut self, ids: [Option<&[u8]>; 2]) -> Result<(), Refused> {
        if self.past.len() >= MOST {
            return Err(Refused::Limit);
        }
        let hashes = ids.into_iter().flatten().map(|id| self.hasher.hash_one(id));
        self.past.extend(hashes);
        Ok(())
    }

    pub(super) fn take_servers(&mut self, id: &[u8]) {
        if self.servers.len() < MOST {
            self.servers.insert(self.hasher.hash_one(id));
        }
    }

    /// Whether there is no room for more that a server gives itself: then nothing more may begin.
    pub(super) fn is_full_of_servers(&self) -> bool {
        self.servers.len() >= MOST
    }

    /// Memory in use, bytes.
    pub(super) fn held(&self) -> usize {
        (self.past.capacity() + self.servers.capacity()) * (size_of::<u64>() + 1)
    }
}
