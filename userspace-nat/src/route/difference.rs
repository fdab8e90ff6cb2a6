//! Which destinations and which translated addresses a change of the host's network may concern, so
//! that not every change is a walk over all flows.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use super::RouteTable;

/// More prefixes than these are as good as all: each is compared with each flow's destination.
const MOST_PREFIXES: usize = 64;

/// What may be other than it was.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// The way to any destination.
    everything: bool,
    /// The way to destinations in these.
    prefixes: Vec<Ipv4Net>,
    /// Addresses that were the host's, and are not.
    lost: Vec<Ipv4Addr>,
}

impl Difference {
    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        !self.everything && self.prefixes.is_empty() && self.lost.is_empty()
    }

    /// All of it.
    pub fn everything() -> Self {
        Self {
            everything: true,
            ..Self::default()
        }
    }

    /// Whether it concerns a flow to this destination, translated to this address of the host's.
    pub fn concerns(&self, remote: Ipv4Addr, nat: Ipv4Addr) -> bool {
        self.everything
            || self.lost.contains(&nat)
            || self.prefixes.iter().any(|prefix| prefix.contains(&remote))
    }

    /// Takes another one in.
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
    /// What is other than in a table before.
    pub fn difference_from(&self, before: &Self) -> Difference {
        let mut difference = Difference::default();
        if self.uplink != before.uplink || self.own_sources() != before.own_sources() {
            return Difference::everything();
        }
        let in_one = |one: &[Ipv4Addr], other: &[Ipv4Addr]| -> Vec<Ipv4Addr> {
            let is_new = |address: &&Ipv4Addr| other.binary_search(address).is_err();
            one.iter().filter(is_new).copied().collect()
        };
        let lost = in_one(&before.host, &self.host);
        let host = in_one(&self.host, &before.host)
            .into_iter()
            .chain(lost.clone());
        let prefixes = host.map(Ipv4Net::from).chain(self.other_routes(before));
        difference.add(Difference {
            everything: false,
            prefixes: prefixes.collect(),
            lost,
        });
        difference
    }

    /// The addresses that a source is picked from. On an uplink without one any of the host's may be
    /// the source.
    fn own_sources(&self) -> Vec<&(u32, Ipv4Net)> {
        let by_uplink = |source: &&(u32, Ipv4Net)| self.uplink.is_none_or(|link| source.0 == link);
        let own: Vec<_> = self.sources.iter().filter(by_uplink).collect();
        match own.is_empty() {
            true => self.sources.iter().collect(),
            false => own,
        }
    }

    /// Prefixes whose best routes differ.
    fn other_routes(&self, before: &Self) -> Vec<Ipv4Net> {
        let only_in = |one: &Self, other: &Self| {
            let others = one.best.iter().filter(|(prefix, route)| {
                let mut covering = other.best.covering(prefix.network());
                let same = covering.find(|(found, _)| found == prefix);
                same.is_none_or(|(_, found)| found != *route)
            });
            // One more than counts is enough.
            let others = others.map(|(prefix, _)| prefix).take(MOST_PREFIXES + 1);
            others.collect::<Vec<_>>()
        };
        let mut prefixes = only_in(self, before);
        prefixes.extend(only_in(before, self));
        prefixes
    }
}

#[cfg(test)]
#[path = "difference_test.rs"]
mod tests;
