//! Next hops: which elements of `NEXT_HOPS` are ours, for whom, and when they are given back.
//!
//! A router's element stays: it is wanted again. One toward a neighbour on the link was claimed
//! because a guest spoke to it; each costs the host a neighbour entry that it keeps fresh, so there
//! are [`MAX_ON_LINK`] at most, and one that no flow has named for a whole interval between two
//! looks is given back. That long, so that nothing under way by it is left. What a predecessor
//! claimed is found by its owner's row.
use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::Ip4;

use super::core::Core;
use crate::{clock::SECOND_NS, datapath::Datapath};

/// Most next hops remembered: on-link neighbours of a /20.
const MAX_KNOWN: usize = 4_096;
/// Most on-link destinations that have a next hop of their own; the kernel resolves the rest by
/// packet.
pub(super) const MAX_ON_LINK: usize = 256;
/// Between two looks, ns.
const INTERVAL_NS: u64 = 10 * SECOND_NS;

/// An uplink's ifindex and a neighbour there.
type Hop = (u32, Ip4);

/// What is known of our elements.
#[derive(Debug, Default)]
pub(super) struct Hops {
    known: hashbrown::HashMap<Hop, u32, foldhash::fast::RandomState>,
    /// Those that were claimed because a guest spoke to them, not because they route.
    on_link: HashMap<Hop, u32>,
    /// Elements that nothing named at the last look.
    idle: HashSet<u32>,
    next_look_ns: u64,
}

impl Hops {
    /// The links are others now.
    pub(super) fn forget_known(&mut self) {
        self.known.clear();
    }

    fn forget(&mut self, index: u32) {
        self.known.retain(|_, known| *known != index);
        self.on_link.retain(|_, known| *known != index);
    }
}

impl<D: Datapath> Core<D> {
    /// The element of `NEXT_HOPS` for a neighbour on the way to `destination`, or 0.
    pub(crate) fn next_hop(&mut self, ifindex: u32, neighbour: Ip4, destination: Ip4) -> u32 {
        let has_l2 = self.has_l2(ifindex);
        // A link without L2 has one next hop, whoever is behind it.
        let neighbour = Some(neighbour).filter(|_| has_l2);
        let neighbour = neighbour.unwrap_or(Ip4::UNSPECIFIED);
        let hop = (ifindex, neighbour);
        if let Some(index) = self.hops.known.get(&hop) {
            return *index;
        }
        let on_link = neighbour == destination && !self.hops.on_link.contains_key(&hop);
        if on_link && self.hops.on_link.len() >= MAX_ON_LINK {
            return 0;
        }
        let index = self.datapath.next_hop_for(ifindex, neighbour);
        // None to be had now may be one to be had later.
        if index == 0 {
            return 0;
        }
        if self.hops.known.len() >= MAX_KNOWN {
            self.hops.forget_known();
        }
        self.hops.known.insert(hop, index);
        if on_link {
            self.hops.on_link.insert(hop, index);
        }
        index
    }

    /// Gives back what has been idle since the last look; looks at most once an interval.
    pub(super) fn release_idle_hops(&mut self, now_ns: u64) {
        if now_ns < self.hops.next_look_ns {
            return;
        }
        self.hops.next_look_ns = now_ns + INTERVAL_NS;
        let mut idle: HashSet<u32> = self.datapath.own_next_hops().into_iter().collect();
        for (hop, index) in &self.hops.known {
            if !self.hops.on_link.contains_key(hop) {
                idle.remove(index);
            }
        }
        if idle.is_empty() {
            self.hops.idle = idle;
            return;
        }
        for (slot, _) in self.flows.entries() {
            idle.remove(&self.datapath.slot(slot).next_hop().load(Relaxed));
        }
        let before = std::mem::take(&mut self.hops.idle);
        for index in idle.extract_if(|index| before.contains(index)) {
            self.datapath.release_next_hop(index);
            self.hops.forget(index);
        }
        // Named anew since, it is not idle at the next look.
        self.hops.idle = idle;
    }
}
