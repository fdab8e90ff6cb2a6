//! Look-up of the first matching pattern, without trying the patterns one by one.
//!
//! Patterns are grouped by prefix. For each prefix and protocol, a table sorted by port gives the
//! first pattern that matches from each port on. A look-up visits the prefixes that contain an
//! address (at most 33, and 129 with IPv6, see [`PrefixMap`]) and takes the lowest position among their tables'
//! results.
use std::{collections::BTreeSet, ops::Range};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

use super::{Destination, pattern::Pattern, prefix_map::PrefixMap};

/// Value of [`Step::order`] where no pattern matches.
const NO_MATCH: u32 = u32::MAX;

/// A pattern and its position in the order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) pattern: Pattern,
    pub(crate) order: u32,
}

/// Patterns compiled for look-up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Matcher {
    /// Port tables of each prefix, by protocol as [`index`] numbers them.
    prefixes: PrefixMap<[Table; 3]>,
    /// All port tables, one after the other.
    steps: Vec<Step>,
}

/// Port table: a range of [`Matcher::steps`], empty if nothing matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Table {
    from: u32,
    to: u32,
}

/// From `port` on, the pattern at position `order` is the first that matches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Step {
    port: u16,
    order: u32,
}

impl Matcher {
    pub(crate) fn new(entries: impl IntoIterator<Item = Entry>) -> Self {
        let mut entries: Vec<Entry> = entries.into_iter().collect();
        entries.sort_by_key(|entry| (entry.pattern.prefix(), entry.order));

        let mut steps = Vec::with_capacity(entries.len());
        let prefixes: Vec<(IpNet, [Table; 3])> = entries
            .chunk_by(|a, b| a.pattern.prefix() == b.pattern.prefix())
            .map(|group| (group[0].pattern.prefix(), tables(group, &mut steps)))
            .collect();
        Self {
            prefixes: PrefixMap::new(prefixes),
            steps,
        }
    }

    /// Returns the position of the first matching pattern, among those whose prefix has at least
    /// `shortest` bits; `None` if none matches.
    pub(crate) fn first(&self, to: Destination, shortest: u8) -> Option<u32> {
        self.prefixes
            .covering(to.addr)
            .take_while(|(prefix, _)| prefix.prefix_len() >= shortest)
            .filter_map(|(_, tables)| self.step(tables[index(to.protocol)], to.port))
            .min()
    }

    fn step(&self, table: Table, port: u16) -> Option<u32> {
        let steps = &self.steps[table.from as usize..table.to as usize];
        let after = steps.partition_point(|step| step.port <= port);
        let step = steps[..after].last()?;
        (step.order != NO_MATCH).then_some(step.order)
    }
}

fn index(protocol: Protocol) -> usize {
    match protocol {
        Protocol::Tcp => 0,
        Protocol::Udp => 1,
        Protocol::Icmp | Protocol::Icmpv6 => 2,
    }
}

/// Appends the tables of one prefix. `group` has its entries in order.
fn tables(group: &[Entry], steps: &mut Vec<Step>) -> [Table; 3] {
    let mut previous: Range<usize> = 0..0;
    Protocol::all().map(|protocol| {
        let from = steps.len();
        append_table(group, protocol, steps);
        // The protocols' tables are mostly the same: store it once.
        if steps[from..] == steps[previous.clone()] {
            steps.truncate(from);
        } else {
            previous = from..steps.len();
        }
        Table {
            from: previous.start as u32,
            to: previous.end as u32,
        }
    })
}

fn append_table(group: &[Entry], protocol: Protocol, steps: &mut Vec<Step>) {
    let mut ends: Vec<(u32, bool, u32)> = Vec::new();
    for entry in group {
        if !entry.pattern.covers(protocol) {
            continue;
        }
        let Some((first, last)) = entry.pattern.ports() else {
            // No later entry can match first.
            ends.push((0, true, entry.order));
            break;
        };
        ends.push((u32::from(first), true, entry.order));
        ends.push((u32::from(last) + 1, false, entry.order));
    }
    ends.sort_unstable();

    // Sweep over the ports: of the patterns that cover the current port, the first counts.
    let start = steps.len();
    let mut covering = BTreeSet::new();
    for at_one_port in ends.chunk_by(|a, b| a.0 == b.0) {
        for (_, begins, order) in at_one_port {
            if *begins {
                covering.insert(*order);
            } else {
                covering.remove(order);
            }
        }
        let order = covering.first().copied().unwrap_or(NO_MATCH);
        let Ok(port) = u16::try_from(at_one_port[0].0) else {
            break; // past the last port
        };
        if steps[start..].last().is_none_or(|last| last.order != order) {
            steps.push(Step { port, order });
        }
    }
}

#[cfg(test)]
#[path = "matcher_test.rs"]
pub(crate) mod tests;
