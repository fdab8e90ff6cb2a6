//! Map from IPv4 prefixes to values: the only longest-prefix structure of this crate.
//!
//! CIDR prefixes nest or are disjoint. They cut the address space into segments that each have one
//! innermost prefix, and every prefix has at most one parent. A look-up is a binary search for the
//! segment, then a walk outwards of at most 33 steps. From `TOP_INDEX_FROM` segments on, a table
//! over the upper 16 bits narrows the search to the segments that begin under the same 16 bits: a
//! hundred thousand prefixes that are spread out take no more steps than ten. No list takes more
//! than 17 steps, because 65,536 segments can begin under the same 16 bits. The map is built whole
//! and replaced whole.
use std::{net::Ipv4Addr, ops::RangeInclusive};

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// From this many segments on, the search starts from a table of the upper 16 bits (256 KiB).
const TOP_INDEX_FROM: usize = 512;
/// No node: the address is in no prefix, or the prefix has no parent.
const NONE: u32 = u32::MAX;

/// An immutable map from prefixes to values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefixMap<T> {
    nodes: Vec<Node<T>>,
    /// First address of each segment, ascending; the first segment begins at 0.0.0.0.
    starts: Vec<u32>,
    /// Innermost node of each segment, or [`NONE`].
    innermost: Vec<u32>,
    /// For each value of the upper 16 bits, the segment that contains its first address. `None`:
    /// there are too few segments.
    top: Option<Vec<u32>>,
}

/// A prefix with its value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Node<T> {
    prefix: Ipv4Net,
    parent: u32,
    value: T,
}

impl<T> Default for PrefixMap<T> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            starts: vec![0],
            innermost: vec![NONE],
            top: None,
        }
    }
}

impl<T> PrefixMap<T> {
    /// Builds the map. Host bits are ignored; of equal prefixes the last entry is kept.
    pub fn new(entries: impl IntoIterator<Item = (Ipv4Net, T)>) -> Self {
        let mut entries: Vec<(Ipv4Net, T)> = entries
            .into_iter()
            .map(|(prefix, value)| (prefix.trunc(), value))
            .collect();
        entries.sort_by_key(|(prefix, _)| (first(*prefix), prefix.prefix_len()));

        let mut map = Self::default();
        map.nodes.reserve(entries.len());
        // The prefixes that contain the current position, outermost first.
        let mut open: Vec<u32> = Vec::new();
        for (prefix, value) in entries {
            if let Some(node) = map.nodes.last_mut()
                && node.prefix == prefix
            {
                node.value = value;
                continue;
            }
            map.close(&mut open, first(prefix));
            let index = map.nodes.len() as u32;
            map.cut(first(prefix), index);
            map.nodes.push(Node {
                prefix,
                parent: open.last().copied().unwrap_or(NONE),
                value,
            });
            open.push(index);
        }
        while let Some(index) = open.pop() {
            map.end(index, open.last().copied());
        }
        map.index_top();
        map
    }

    /// Returns the number of prefixes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the map has no prefix.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns every prefix, in the order of addresses, a parent before its children.
    pub fn iter(&self) -> impl Iterator<Item = (Ipv4Net, &T)> {
        self.nodes.iter().map(|node| (node.prefix, &node.value))
    }

    /// Returns the longest prefix that contains `addr`, if any does.
    pub fn longest(&self, addr: Ipv4Addr) -> Option<(Ipv4Net, &T)> {
        self.covering(addr).next()
    }

    /// Returns all prefixes that contain `addr`, the longest first.
    pub fn covering(&self, addr: Ipv4Addr) -> impl Iterator<Item = (Ipv4Net, &T)> {
        let mut at = self.innermost[self.segment(addr.to_bits())];
        std::iter::from_fn(move || {
            let node = self.nodes.get(at as usize)?;
            at = node.parent;
            Some((node.prefix, &node.value))
        })
    }

    /// Whether any prefix of the map shares an address with `prefix`.
    pub fn overlaps(&self, prefix: Ipv4Net) -> bool {
        let prefix = prefix.trunc();
        if self.longest(prefix.network()).is_some() {
            return true;
        }
        // No prefix contains its first address, so a prefix that overlaps begins inside it.
        let next = self
            .nodes
            .partition_point(|node| first(node.prefix) < first(prefix));
        self.nodes
            .get(next)
            .is_some_and(|node| first(node.prefix) <= last(prefix))
    }

    /// Returns the segment that contains an address.
    fn segment(&self, addr: u32) -> usize {
        let among = self.segments_to_search(addr);
        let low = *among.start();
        // `starts[low] <= addr` always holds: the first segment starts at 0.
        low + self.starts[among].partition_point(|start| *start <= addr) - 1
    }

    /// Returns the segments among which the segment of an address is searched for.
    fn segments_to_search(&self, addr: u32) -> RangeInclusive<usize> {
        let last = self.starts.len() - 1;
        match &self.top {
            Some(top) => {
                let upper = (addr >> 16) as usize;
                let end = top.get(upper + 1).map_or(last, |s| *s as usize);
                top[upper] as usize..=end
            }
            None => 0..=last,
        }
    }

    /// Begins a segment at `at`, of which `node` is the innermost prefix.
    fn cut(&mut self, at: u32, node: u32) {
        if self.starts.last() == Some(&at) {
            self.innermost.pop();
        } else {
            self.starts.push(at);
        }
        self.innermost.push(node);
    }

    /// Ends all open prefixes that end before `position`.
    fn close(&mut self, open: &mut Vec<u32>, position: u32) {
        while let Some(&index) = open.last() {
            if last(self.nodes[index as usize].prefix) >= position {
                return;
            }
            open.pop();
            self.end(index, open.last().copied());
        }
    }

    /// Ends the prefix at `index`: `parent` is the innermost prefix after it.
    fn end(&mut self, index: u32, parent: Option<u32>) {
        if let Some(after) = last(self.nodes[index as usize].prefix).checked_add(1) {
            self.cut(after, parent.unwrap_or(NONE));
        }
    }

    fn index_top(&mut self) {
        if self.starts.len() < TOP_INDEX_FROM {
            return;
        }
        let mut top = Vec::with_capacity(1 << 16);
        let mut segment = 0;
        for upper in 0..1_u32 << 16 {
            while self
                .starts
                .get(segment + 1)
                .is_some_and(|start| *start <= upper << 16)
            {
                segment += 1;
            }
            top.push(segment as u32);
        }
        self.top = Some(top);
    }
}

fn first(prefix: Ipv4Net) -> u32 {
    prefix.network().to_bits()
}

fn last(prefix: Ipv4Net) -> u32 {
    prefix.broadcast().to_bits()
}

#[cfg(test)]
#[path = "prefix_map_test.rs"]
mod tests;
