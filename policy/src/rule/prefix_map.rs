//! Map from prefixes of both families to values: the only longest-prefix structure of this crate.
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::prefix_tree::PrefixTree;

/// An immutable map from prefixes to values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefixMap<T> {
    v4: PrefixTree<u32, T>,
    v6: PrefixTree<u128, T>,
}

impl<T> Default for PrefixMap<T> {
    fn default() -> Self {
        Self {
            v4: PrefixTree::default(),
            v6: PrefixTree::default(),
        }
    }
}

impl<T> PrefixMap<T> {
    /// Builds the map. Host bits are ignored; of equal prefixes the last entry is kept.
    pub fn new<P: Into<IpNet>>(entries: impl IntoIterator<Item = (P, T)>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for (prefix, value) in entries {
            let prefix = prefix.into();
            match prefix.network() {
                IpAddr::V4(first) => v4.push((first.to_bits(), prefix.prefix_len(), value)),
                IpAddr::V6(first) => v6.push((first.to_bits(), prefix.prefix_len(), value)),
            }
        }
        Self {
            v4: PrefixTree::new(v4),
            v6: PrefixTree::new(v6),
        }
    }

    /// Returns the number of prefixes.
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// Whether the map has no prefix.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns every prefix, IPv4 first, in the order of addresses, a parent before its children.
    pub fn iter(&self) -> impl Iterator<Item = (IpNet, &T)> {
        self.v4.iter().chain(self.v6.iter())
    }

    /// Returns the longest prefix that contains `addr`, if any does.
    pub fn longest(&self, addr: impl Into<IpAddr>) -> Option<(IpNet, &T)> {
        self.covering(addr).next()
    }

    /// Returns all prefixes that contain `addr`, the longest first.
    pub fn covering(&self, addr: impl Into<IpAddr>) -> impl Iterator<Item = (IpNet, &T)> {
        let addr = addr.into();
        let mut at = match addr {
            IpAddr::V4(addr) => self.v4.innermost(addr.to_bits()),
            IpAddr::V6(addr) => self.v6.innermost(addr.to_bits()),
        };
        std::iter::from_fn(move || match addr {
            IpAddr::V4(_) => self.v4.outwards(&mut at),
            IpAddr::V6(_) => self.v6.outwards(&mut at),
        })
    }

    /// Whether any prefix of the map shares an address with `prefix`.
    pub fn overlaps(&self, prefix: impl Into<IpNet>) -> bool {
        let prefix = prefix.into();
        match prefix.network() {
            IpAddr::V4(first) => self.v4.overlaps(first.to_bits(), prefix.prefix_len()),
            IpAddr::V6(first) => self.v6.overlaps(first.to_bits(), prefix.prefix_len()),
        }
    }
}

#[cfg(test)]
#[path = "prefix_map_test.rs"]
mod tests;
