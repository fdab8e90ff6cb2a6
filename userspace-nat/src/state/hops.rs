//! Next hops: the elements of `NEXT_HOPS` that this process owns, what they are for, and when they
//! are released.
//!
//! A router's element stays: it will be needed again. An element for a neighbour on the link was
//! claimed because a guest sent to it, and each costs the host a neighbour entry that it keeps
//! fresh. So there are at most [`MAX_ON_LINK`] of these, and one that nothing has used for a whole
//! interval between two scans is released. After that time no frame in flight refers to it.
//! Elements that a predecessor claimed are found by their owner's row.
//!
//! A scan examines all flows, some slots at a time, so that one VM's many flows do not delay the
//! others. An element that is requested during a scan is in use, whatever the scan's position.
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
/// Interval between two scans, ns.
const INTERVAL_NS: u64 = 10 * SECOND_NS;
/// Slots examined in one call.
pub(crate) const LOOK_BUDGET: u32 = 8 * SLOTS_PER_CHUNK;

/// Next hops of this process and their elements.
#[derive(Debug, Default)]
pub(crate) struct Hops {
    known: hashbrown::HashMap<Hop, u32, foldhash::fast::RandomState>,
    /// Elements that were claimed because a guest sent to the neighbour, not because it is a
    /// router.
    on_link: HashMap<Hop, u32>,
    /// Elements that no slot referred to at the last scan and that were not requested since.
    idle: HashSet<u32>,
    look: Option<Look>,
    next_look_ns: u64,
}

/// Position and findings of a scan.
#[derive(Debug)]
struct Look {
    /// Elements to which no examined slot refers.
    unnamed: HashSet<u32>,
    /// Index of the next chunk of slots.
    chunk: usize,
}

impl Hops {
    /// Forgets which elements belong to which next hop: the links have changed.
    pub(crate) fn forget_known(&mut self) {
        self.known.clear();
    }

    /// Notes that an element was requested.
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
    /// Returns the index of the element of `NEXT_HOPS` for a next hop toward `destination`, or 0
    /// when there is none.
    pub(crate) fn next_hop(&mut self, mut hop: Hop, destination: Ip4) -> u32 {
        // A link without L2 has one next hop for all neighbours.
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
        // A later attempt may succeed: do not remember the failure.
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

    /// Continues a scan, or begins one when it is due. At its end releases the elements that have
    /// been idle since the previous scan.
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
