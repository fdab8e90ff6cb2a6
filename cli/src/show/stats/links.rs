//! Losses of the TAPs: packets that were translated and counted, and then dropped by the device.
use std::{collections::HashMap, fs};

use slipgate_abi::IfIndex;

/// `/proc/net/dev` of this network namespace.
pub(super) struct Links {
    dropped: HashMap<String, u64>,
}

impl Links {
    /// Reads the counters; unreadable ones are unknown for every link.
    pub(super) fn read() -> Self {
        let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        Self {
            dropped: parse(&text),
        }
    }

    /// Packets that a device dropped instead of sending them; `None` when there is no such device.
    pub(super) fn tx_dropped(&self, ifindex: IfIndex) -> Option<u64> {
        let name = nix::net::if_::if_indextoname(ifindex.get()).ok()?;
        self.dropped.get(name.to_str().ok()?).copied()
    }
}

/// Parses /proc/net/dev: after a device's name eight counts of receiving and eight of sending, the
/// fourth of each being the drops.
fn parse(text: &str) -> HashMap<String, u64> {
    const TX_DROPPED: usize = 8 + 3;
    let line = |line: &str| {
        let (name, counts) = line.split_once(':')?;
        let dropped = counts.split_whitespace().nth(TX_DROPPED)?.parse().ok()?;
        Some((name.trim().to_owned(), dropped))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
#[path = "links_test.rs"]
mod tests;
