//! Map from the prefixes of one address family to values.
//!
//! CIDR prefixes nest or are disjoint. They cut the address space into segments that each have one
//! innermost prefix, and every prefix has at most one parent. A look-up is a binary search for the
//! segment, then a walk outwards of at most 33 steps (129 with IPv6). From `TOP_INDEX_FROM`
//! segments on, a table over the upper 16 bits narrows the search to the segments that begin under
//! the same 16 bits. So a hundred thousand IPv4 prefixes that are spread out take no more steps
//! than ten, and no IPv4 list takes more than 17, because 65,536 segments can begin under the same
//! 16 bits. IPv6 prefixes share their upper bits more often; their search takes one step for each
//! doubling of the list. The map is built whole and replaced whole.
use std::ops::RangeInclusive;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// From this many segments on, the search starts from a table of the upper 16 bits (256 KiB).
const TOP_INDEX_FROM: usize = 512;
/// No node: the address is in no prefix, or the prefix has no parent.
const NONE: u32 = u32::MAX;

/// An address of one family as a number: `u32` for IPv4, `u128` for IPv6.
pub(super) trait AddressBits: Copy + Ord {
    /// The first address of the family.
    const FIRST: Self;

    /// Returns the first address with these upper 16 bits.
    fn with_upper(upper: u16) -> Self;

    /// Returns the upper 16 bits.
    fn upper(self) -> u16;

    /// Returns the last address of the prefix that begins here and has `len` bits.
    fn last(self, len: u8) -> Self;

    /// Returns the next address; `None` after the last.
    fn next(self) -> Option<Self>;

    /// Returns the prefix that begins here and has `len` bits.
    fn net(self, len: u8) -> IpNet;
}

macro_rules! address_bits {
    ($bits:ty, $net:ty) => {
        impl AddressBits for $bits {
            const FIRST: Self = 0;

            fn with_upper(upper: u16) -> Self {
                Self::from(upper) << (Self::BITS - 16)
            }

            fn upper(self) -> u16 {
                (self >> (Self::BITS - 16)) as u16
            }

            fn last(self, len: u8) -> Self {
                self | Self::MAX.checked_shr(len.into()).unwrap_or(0)
            }

            fn next(self) -> Option<Self> {
                self.checked_add(1)
            }

            fn net(self, len: u8) -> IpNet {
                <$net>::new_assert(self.into(), len).into()
            }
        }
    };
}

address_bits!(u32, Ipv4Net);
address_bits!(u128, Ipv6Net);

/// An immutable map from prefixes, given by their first address and their length, to values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PrefixTree<A, T> {
    nodes: Vec<Node<A, T>>,
    /// First address of each segment, ascending; the first segment begins at the first address.
    starts: Vec<A>,
    /// Innermost node of each segment, or [`NONE`].
    innermost: Vec<u32>,
    /// For each value of the upper 16 bits, the segment that contains its first address. `None`:
    /// there are too few segments.
    top: Option<Vec<u32>>,
}

/// A prefix with its value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Node<A, T> {
    first: A,
    len: u8,
    parent: u32,
    value: T,
}

impl<A: AddressBits, T> Node<A, T> {
    fn last(&self) -> A {
        self.first.last(self.len)
    }

    fn entry(&self) -> (IpNet, &T) {
        (self.first.net(self.len), &self.value)
    }
}

impl<A: AddressBits, T> Default for PrefixTree<A, T> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            starts: vec![A::FIRST],
            innermost: vec![NONE],
            top: None,
        }
    }
}

impl<A: AddressBits, T> PrefixTree<A, T> {
    /// Builds the map of prefixes without host bits. Of equal prefixes the last entry is kept.
    pub(super) fn new(mut entries: Vec<(A, u8, T)>) -> Self {
        entries.sort_by_key(|(first, len, _)| (*first, *len));

        let mut map = Self::default();
        map.nodes.reserve(entries.len());
        // The prefixes that contain the current position, outermost first.
        let mut open: Vec<u32> = Vec::new();
        for (first, len, value) in entries {
            if let Some(node) = map.nodes.last_mut()
                && (node.first, node.len) == (first, len)
            {
                node.value = value;
                continue;
            }
            map.close(&mut open, first);
            let index = map.nodes.len() as u32;
            map.cut(first, index);
            map.nodes.push(Node {
                first,
                len,
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
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns every prefix, in the order of addresses, a parent before its children.
    pub(super) fn iter(&self) -> impl Iterator<Item = (IpNet, &T)> {
        self.nodes.iter().map(Node::entry)
    }

    /// Returns the innermost node that contains `addr`, for [`PrefixTree::outwards`].
    pub(super) fn innermost(&self, addr: A) -> u32 {
        self.innermost[self.segment(addr)]
    }

    /// Returns the prefix of a node, and moves `node` to the one around it; `None` outside of all.
    pub(super) fn outwards(&self, node: &mut u32) -> Option<(IpNet, &T)> {
        let found = self.nodes.get(*node as usize)?;
        *node = found.parent;
        Some(found.entry())
    }

    /// Whether any prefix of the map shares an address with the prefix that begins at `first` and
    /// has `len` bits.
    pub(super) fn overlaps(&self, first: A, len: u8) -> bool {
        if self.innermost(first) != NONE {
            return true;
        }
        // No prefix contains its first address, so a prefix that overlaps begins inside it.
        let next = self.nodes.partition_point(|node| node.first < first);
        let next = self.nodes.get(next);
        next.is_some_and(|node| node.first <= first.last(len))
    }

    /// Returns the segment that contains an address.
    fn segment(&self, addr: A) -> usize {
        let among = self.segments_to_search(addr);
        let low = *among.start();
        // `starts[low] <= addr` always holds: the first segment starts at the first address.
        low + self.starts[among].partition_point(|start| *start <= addr) - 1
    }

    /// Returns the segments among which the segment of an address is searched for.
    fn segments_to_search(&self, addr: A) -> RangeInclusive<usize> {
        let last = self.starts.len() - 1;
        match &self.top {
            Some(top) => {
                let upper = usize::from(addr.upper());
                let end = top.get(upper + 1).map_or(last, |s| *s as usize);
                top[upper] as usize..=end
            }
            None => 0..=last,
        }
    }

    /// Begins a segment at `at`, of which `node` is the innermost prefix.
    fn cut(&mut self, at: A, node: u32) {
        if self.starts.last() == Some(&at) {
            self.innermost.pop();
        } else {
            self.starts.push(at);
        }
        self.innermost.push(node);
    }

    /// Ends all open prefixes that end before `position`.
    fn close(&mut self, open: &mut Vec<u32>, position: A) {
        while let Some(&index) = open.last() {
            if self.nodes[index as usize].last() >= position {
                return;
            }
            open.pop();
            self.end(index, open.last().copied());
        }
    }

    /// Ends the prefix at `index`: `parent` is the innermost prefix after it.
    fn end(&mut self, index: u32, parent: Option<u32>) {
        if let Some(after) = self.nodes[index as usize].last().next() {
            self.cut(after, parent.unwrap_or(NONE));
        }
    }

    fn index_top(&mut self) {
        if self.starts.len() < TOP_INDEX_FROM {
            return;
        }
        let mut top = Vec::with_capacity(1 << 16);
        let mut segment = 0;
        for upper in 0..=u16::MAX {
            while self
                .starts
                .get(segment + 1)
                .is_some_and(|start| *start <= A::with_upper(upper))
            {
                segment += 1;
            }
            top.push(segment as u32);
        }
        self.top = Some(top);
    }
}

#[cfg(test)]
#[path = "prefix_tree_test.rs"]
mod tests;
