//! Destinations and translated addresses that a change of the host's network may concern, so that
//! not every change causes a walk over all flows.
use std::net::IpAddr;

use ipnet::IpNet;

use super::{HostAddress, RouteTable, table::Routes};

/// Number of prefixes above which a difference concerns everything: each prefix is compared with
/// each flow's destination.
const MOST_PREFIXES: usize = 64;

/// Set of flows that a change of routes and addresses may concern.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// The route to any destination may have changed.
    everything: bool,
    /// Prefixes to whose destinations the route may have changed.
    prefixes: Vec<IpNet>,
    /// Addresses that the host no longer has, and prefixes that may not be delivered to it any more.
    lost: Vec<IpNet>,
}

impl Difference {
    /// Whether the change concerns no flow.
    pub fn is_empty(&self) -> bool {
        !self.everything && self.prefixes.is_empty() && self.lost.is_empty()
    }

    /// A difference that concerns all flows.
    pub fn everything() -> Self {
        Self {
            everything: true,
            ..Self::default()
        }
    }

    /// Whether the difference concerns a flow to `remote` that is translated to the host's address
    /// `nat`.
    pub fn concerns(&self, remote: impl Into<IpAddr>, nat: impl Into<IpAddr>) -> bool {
        let (remote, nat) = (remote.into(), nat.into());
        self.everything
            || self.lost.iter().any(|lost| lost.contains(&nat))
            || self.prefixes.iter().any(|prefix| prefix.contains(&remote))
    }

    /// Merges another difference into this one.
    pub fn add(&mut self, other: Self) {
        self.everything |= other.everything;
        self.prefixes.extend(other.prefixes);
        self.prefixes.sort_unstable();
        self.prefixes.dedup();
        self.lost.extend(other.lost);
        self.lost.sort_unstable();
        self.lost.dedup();
        self.everything |= self.prefixes.len().max(self.lost.len()) > MOST_PREFIXES;
        if self.everything {
            self.prefixes.clear();
            self.lost.clear();
        }
    }
}

impl RouteTable {
    /// Difference between an earlier table and this one.
    pub fn difference_from(&self, before: &Self) -> Difference {
        let mut difference = Difference::default();
        let has_new_uplink = (self.vm_uplinks.iter()).any(|link| !before.vm_uplinks.contains(link));
        if self.uplink != before.uplink
            || has_new_uplink
            || self.own_sources() != before.own_sources()
        {
            return Difference::everything();
        }
        let in_one = |one: &[IpAddr], other: &[IpAddr]| -> Vec<IpAddr> {
            let is_new = |address: &&IpAddr| other.binary_search(address).is_err();
            one.iter().filter(is_new).copied().collect()
        };
        let lost = in_one(&before.host, &self.host);
        let host = in_one(&self.host, &before.host)
            .into_iter()
            .chain(lost.clone());
        if self.domains.differ_in_steps(&before.domains) {
            return Difference::everything();
        }
        let mut other = other_routes(&self.routes, &before.routes);
        for (now, before) in self.domains.tables_of_both(&before.domains) {
            other.extend(other_routes(now, before));
        }
        let was_local = |prefix: &&IpNet| before.is_in_local_prefix(prefix.network());
        let lost = lost.iter().copied().map(IpNet::from);
        let lost = lost
            .chain(other.iter().filter(was_local).copied())
            .collect();
        difference.add(Difference {
            everything: false,
            prefixes: host.map(IpNet::from).chain(other).collect(),
            lost,
        });
        difference
    }

    /// Addresses from which a source is selected. On an uplink without an address of a family, any
    /// of the host's of that family may be the source.
    fn own_sources(&self) -> Vec<&HostAddress> {
        let Some(uplink) = self.uplink else {
            return self.sources.iter().collect();
        };
        let uplinks = || self.vm_uplinks.iter().chain([&uplink]);
        let are_uplinks_enough = |is_ipv6: bool| {
            let of_family = |source: &&HostAddress| source.addr.addr().is_ipv6() == is_ipv6;
            uplinks().all(|link| {
                let mut sources = self.sources.iter().filter(of_family);
                sources.any(|source| source.ifindex == *link)
            })
        };
        let enough = [false, true].map(are_uplinks_enough);
        let counts = |source: &&HostAddress| {
            !enough[usize::from(source.addr.addr().is_ipv6())]
                || uplinks().any(|link| *link == source.ifindex)
        };
        self.sources.iter().filter(counts).collect()
    }
}

/// Prefixes whose useful routes differ between two states of a table.
fn other_routes(now: &Routes, before: &Routes) -> Vec<IpNet> {
    let only_in = |one: &Routes, other: &Routes| {
        let others = one.iter().filter(|(prefix, routes)| {
            let mut covering = other.covering(prefix.network());
            let same = covering.find(|(found, _)| found == prefix);
            same.is_none_or(|(_, found)| found != *routes)
        });
        // One more than counts is enough.
        let others = others.map(|(prefix, _)| prefix);
        others.take(MOST_PREFIXES + 1).collect::<Vec<_>>()
    };
    let mut prefixes = only_in(now, before);
    prefixes.extend(only_in(before, now));
    prefixes
}

#[cfg(test)]
#[path = "difference_test.rs"]
mod tests;
