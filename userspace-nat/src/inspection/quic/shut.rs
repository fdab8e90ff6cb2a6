//! Connection ids of a flow whose packets are dropped, or that may begin no connection.
use std::{
    collections::{HashSet, hash_map::RandomState},
    hash::BuildHasher,
};

use crate::inspection::Refused;

/// Connections of a flow in all, but those that are known.
pub(super) const MAX_PAST: usize = 4_096;
/// Most ids of either kind. A connection has two.
const MOST: usize = 2 * MAX_PAST;

/// Hashes of ids. Two that are alike by chance cost a client its connection.
#[derive(Debug, Default)]
pub(super) struct ShutIds {
    hasher: RandomState,
    /// Of connections that have made room for others: nothing goes there.
    past: HashSet<u64>,
    /// That a server gave itself, of connections that are not known: nothing begins by them. Its
    /// answer may come late, or be about a connection that was begun by the same id of the client's
    /// as others, or by another one than was looked at.
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
