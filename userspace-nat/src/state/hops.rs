//! Next hops: which elements of `NEXT_HOPS` are ours, for whom, and when they are given back.
//!
//! A router's element stays: it is wanted again. One toward a neighbour on the link was claimed
//! because a guest spoke to it; each costs the host a neighbour entry that it keeps fresh, so there
//! are [`MAX_ON_LINK`] at most, and one that nothing has used for a whole interval between two looks
//! is given back. That long, so that nothing under way by it is left. What a predecessor claimed is
//! found by its owner's row.
//!
//! A look goes through all flows, some slots at a time: one VM's many must not keep the others
//! waiting. What is asked for while it is under way is in use, wherever the look stands.
use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{Ip4, maps::SLOTS_PER_CHUNK};

use crate::{
    clock::SECOND_NS,
    datapath::{Datapath, Hop},
    state::Core,
};

/// Most next hops remembered: on-link neighbours of a /20.
const MAX_KNOWN: usize = 4_096;
/// Most on-link destinations that have a next hop of their own; the kernel resolves the rest by
/// packet.
pub(crate) const MAX_ON_LINK: usize = 256;
/// Between two looks, ns.
const INTERVAL_NS: u64 = 10 * SECOND_NS;
/// Slots looked at in one go.
pub(crate) const LOOK_BUDGET: u32 = 8 * SLOTS_PER_CHUNK;

/// What is known of our elements.
#[derive(Debug, Default)]
pub(crate) struct Hops {
    known: hashbrown::HashMap<Hop, u32, foldhash::fast::RandomState>,
    /// Those that were claimed because a guest spoke to them, not because they route.
    on_link: HashMap<Hop, u32>,
    /// Elements that nothing named at the last look, nor asked for since.
    idle: HashSet<u32>,
    look: Option<Look>,
    next_look_ns: u64,
}

/// A look under way.
#[derive(Debug)]
struct Look {
    /// Elements that nothing has been found to name.
    unnamed: HashSet<u32>,
    /// The chunk of slots that comes next.
    chunk: usize,
}

impl Hops {
    /// The links are others now.
    pub(crate) fn forget_known(&mut self) {
        self.known.clear();
    }

    /// It is asked for.
    fn note_use(&mut self, index: u32) {
        self.idle.remove(&index);
        if let Some(look) = &mut self.look {
            look.unnamed.remove(&index);
        }
    }

    fn forget(&mut self, index: u32) {
        self.known.retain(|_, known| *known != index);
        self.on_link.retain(|_, known| *known != index);
    }
}

impl<D: Datapath> Core<D> {
    /// The element of `NEXT_HOPS` for a next hop on the way to `destination`, or 0.
    pub(crate) fn next_hop(&mut self, mut hop: Hop, destination: Ip4) -> u32 {
        // A link without L2 has one next hop, whoever is behind it.
        if !self.has_l2(hop.ifindex) {
            hop.neighbour = Ip4::UNSPECIFIED;
        }
        if let Some(index) = self.hops.known.get(&hop).copied() {
            self.hops.note_use(index);
            return index;
        }
        let on_link = hop.neighbour == destination && !self.hops.on_link.contains_key(&hop);
        if on_link && self.hops.on_link.len() >= MAX_ON_LINK {
            return 0;
        }
        let index = self.datapath.next_hop_for(hop);
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
        self.hops.note_use(index);
        index
    }

    /// Goes on with a look, or begins one when it is time, and at its end gives back what has been
    /// idle since the one before.
    pub(crate) fn release_idle_hops(&mut self, now_ns: u64) {
        let Some(mut look) = self.hops.look.take().or_else(|| self.begin_look(now_ns)) else {
            return;
        };
        let mut left = LOOK_BUDGET;
        while left > 0 && !look.unnamed.is_empty() && look.chunk < self.flows.chunks() {
            if let Some(slots) = self.flows.in_chunk(look.chunk) {
                for slot in slots {
                    let named = self.datapath.slot(slot).next_hop().load(Relaxed);
                    look.unnamed.remove(&named);
                }
                left = left.saturating_sub(SLOTS_PER_CHUNK);
            }
            look.chunk += 1;
        }
        if !look.unnamed.is_empty() && look.chunk < self.flows.chunks() {
            self.hops.look = Some(look);
            return;
        }
        let before = std::mem::take(&mut self.hops.idle);
        for index in look.unnamed.extract_if(|index| before.contains(index)) {
            self.datapath.release_next_hop(index);
            self.hops.forget(index);
        }
        self.hops.idle = look.unnamed;
    }

    fn begin_look(&mut self, now_ns: u64) -> Option<Look> {
        if now_ns < self.hops.next_look_ns {
            return None;
        }
        self.hops.next_look_ns = now_ns + INTERVAL_NS;
        let mut unnamed: HashSet<u32> = self.datapath.own_next_hops().into_iter().collect();
        for (hop, index) in &self.hops.known {
            if !self.hops.on_link.contains_key(hop) {
                unnamed.remove(index);
            }
        }
        Some(Look { unnamed, chunk: 0 })
    }
}
