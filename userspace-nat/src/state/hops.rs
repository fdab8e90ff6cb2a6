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
    net::IpAddr,
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{IfIndex, maps::SLOTS_PER_CHUNK};

use crate::{
    clock::SECOND_NS,
    datapath::{Hop, Tables},
    flow::{Flows, SlotWalk},
};

/// Most next hops remembered: on-link neighbours of a /20.
const MAX_KNOWN: usize = 4_096;
/// Most on-link destinations that have a next hop of their own; the kernel resolves the rest by
/// packet.
pub(crate) const MAX_ON_LINK: usize = 256;
/// Interval between two scans, ns.
const INTERVAL_NS: u64 = 10 * SECOND_NS;
/// Most slots passed in one call.
pub(crate) const SCAN_BUDGET: u32 = 8 * SLOTS_PER_CHUNK;

/// Next hops of this process and their elements.
#[derive(Debug, Default)]
pub(crate) struct Hops {
    known: hashbrown::HashMap<Hop, u32, foldhash::fast::RandomState>,
    /// One of `known` with its element, the last that was requested: mostly all flows have one router.
    last: Option<(Hop, u32)>,
    /// Elements that were claimed because a guest sent to the neighbour, not because it is a
    /// router.
    on_link: HashMap<Hop, u32>,
    /// Elements that no slot referred to at the last scan and that were not requested since.
    idle: HashSet<u32>,
    scan: Option<Scan>,
    next_scan_ns: u64,
}

/// Position and findings of a scan.
#[derive(Debug)]
struct Scan {
    /// Elements to which no examined slot refers.
    unreferenced: HashSet<u32>,
    walk: SlotWalk,
}

impl Hops {
    /// Clears the assignment of elements to next hops, because the links have changed.
    pub(crate) fn forget_known(&mut self) {
        self.last = None;
        self.known.clear();
    }

    /// Whether a next hop of this link is known.
    pub(super) fn leave_by(&self, ifindex: IfIndex) -> bool {
        self.known.keys().any(|hop| hop.ifindex == ifindex)
    }

    /// Notes that an element was requested.
    fn note_use(&mut self, index: u32) {
        if !self.idle.is_empty() {
            self.idle.remove(&index);
        }
        if let Some(scan) = &mut self.scan {
            scan.unreferenced.remove(&index);
        }
    }

    fn forget(&mut self, index: u32) {
        self.last = None;
        self.known.retain(|_, known| *known != index);
        self.on_link.retain(|_, known| *known != index);
    }

    /// Returns the index of the element of `NEXT_HOPS` for a next hop toward `destination`, or 0
    /// when there is none.
    pub(super) fn index_of(
        &mut self,
        tables: &mut impl Tables,
        hop: Hop,
        destination: IpAddr,
    ) -> u32 {
        let last = self.last.filter(|(last, _)| *last == hop);
        let known = last.map(|(_, index)| index);
        if let Some(index) = known.or_else(|| self.known.get(&hop).copied()) {
            self.last = Some((hop, index));
            self.note_use(index);
            return index;
        }
        let on_link = hop.neighbour == destination && !self.on_link.contains_key(&hop);
        if on_link && self.on_link.len() >= MAX_ON_LINK {
            return 0;
        }
        let index = tables.next_hop_for(hop);
        // A later attempt may succeed: do not remember the failure.
        if index == 0 {
            return 0;
        }
        if self.known.len() >= MAX_KNOWN {
            self.forget_known();
        }
        self.known.insert(hop, index);
        if on_link {
            self.on_link.insert(hop, index);
        }
        self.note_use(index);
        index
    }

    /// Continues a scan, or begins one when it is due. At its end releases the elements that have
    /// been idle since the previous scan.
    pub(crate) fn release_idle(&mut self, flows: &Flows, tables: &mut impl Tables, now_ns: u64) {
        let scan = self.scan.take();
        let Some(mut scan) = scan.or_else(|| self.begin_scan(flows, tables, now_ns)) else {
            return;
        };
        let mut steps = SCAN_BUDGET;
        while !scan.unreferenced.is_empty()
            && let Some(slot) = scan.walk.next(flows, &mut steps)
        {
            let used = tables.slot(slot).next_hop().load(Relaxed);
            scan.unreferenced.remove(&used);
        }
        if !scan.unreferenced.is_empty() && scan.walk.is_under_way() {
            self.scan = Some(scan);
            return;
        }
        let before = std::mem::take(&mut self.idle);
        for index in scan.unreferenced.extract_if(|index| before.contains(index)) {
            tables.release_next_hop(index);
            self.forget(index);
        }
        self.idle = scan.unreferenced;
    }

    fn begin_scan(&mut self, flows: &Flows, tables: &impl Tables, now_ns: u64) -> Option<Scan> {
        if now_ns < self.next_scan_ns {
            return None;
        }
        self.next_scan_ns = now_ns + INTERVAL_NS;
        let mut unreferenced: HashSet<u32> = tables.own_next_hops().into_iter().collect();
        for (hop, index) in &self.known {
            if !self.on_link.contains_key(hop) {
                unreferenced.remove(index);
            }
        }
        let mut walk = SlotWalk::default();
        walk.start(flows);
        Some(Scan { unreferenced, walk })
    }
}
