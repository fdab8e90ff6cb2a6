//! What processes take from each other's reach by compare-and-swap in mapped arrays.

use std::{
    net::Ipv4Addr,
    ops::Range,
    sync::atomic::{
        AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use slipgate_abi::{NextHop, maps::SLOTS_PER_CHUNK};

use super::SharedMaps;

impl SharedMaps {
    /// Takes a free chunk of slots for an owner; `None` when all are taken.
    pub fn claim_chunk(&self, owner_row: u32) -> Option<Range<u32>> {
        (0..self.chunks()).find_map(|index| {
            self.chunk(index)?
                .compare_exchange(0, owner_row + 1, AcqRel, Relaxed)
                .ok()?;
            Some(self.chunk_slots(index))
        })
    }

    /// The chunks that are an owner's, as ranges of slots.
    pub fn chunks_of(&self, owner_row: u32) -> Vec<Range<u32>> {
        (0..self.chunks())
            .filter(|index| {
                self.chunk(*index)
                    .is_some_and(|owner| owner.load(Acquire) == owner_row + 1)
            })
            .map(|index| self.chunk_slots(index))
            .collect()
    }

    /// Moves a chunk from one owner to another; whether it was the first one's.
    pub(crate) fn move_chunk(&self, index: u32, from: u32, to: Option<u32>) -> bool {
        let to = to.map_or(0, |row| row + 1);
        self.chunk(index).is_some_and(|owner| {
            owner
                .compare_exchange(from + 1, to, AcqRel, Relaxed)
                .is_ok()
        })
    }

    /// How many chunks the slots make.
    pub(crate) fn chunks(&self) -> u32 {
        self.slots()
            .div_ceil(SLOTS_PER_CHUNK)
            .min(self.memory.chunks.elements())
    }

    /// Whose a chunk is: row + 1, or 0.
    pub(crate) fn chunk(&self, index: u32) -> Option<&AtomicU32> {
        // SAFETY: an element of CHUNKS, which all sides reach by atomics.
        Some(unsafe { AtomicU32::from_ptr(self.memory.chunks.at(index)?) })
    }

    fn chunk_slots(&self, index: u32) -> Range<u32> {
        let start = index * SLOTS_PER_CHUNK;
        start..(start + SLOTS_PER_CHUNK).min(self.slots())
    }

    /// The owner's next hop by this interface and neighbour ([`Ipv4Addr::UNSPECIFIED`] where the
    /// link has no neighbours) for routes of this MTU (0: of none): one it has, or a free one, not
    /// valid yet, which [`crate::netlink::NextHops::refresh`] completes. `None` when all are taken:
    /// use 0.
    pub fn claim_next_hop(
        &self,
        owner_row: u32,
        ifindex: u32,
        neighbour: Ipv4Addr,
        route_mtu: u32,
    ) -> Option<u32> {
        let ours = owner_row + 1;
        let same = |index: &u32| {
            self.next_hop(*index).is_some_and(|hop| {
                hop.owner().load(Acquire) == ours
                    && self.hop_ifindex(*index).load(Acquire) == ifindex
                    // SAFETY: written before `ifindex`, and only by its owner.
                    && unsafe {
                        (&raw const (*hop.as_ptr()).neighbour).read() == neighbour.into()
                            && (&raw const (*hop.as_ptr()).route_mtu).read() == route_mtu
                    }
            })
        };
        let elements = 1..self.memory.next_hops.elements();
        if let Some(index) = elements.clone().find(same) {
            return Some(index);
        }
        let free = |index: &u32| {
            self.next_hop(*index).is_some_and(|hop| {
                hop.owner()
                    .compare_exchange(0, ours, AcqRel, Relaxed)
                    .is_ok()
            })
        };
        let index = elements.clone().find(free)?;
        let hop = self.next_hop(index)?.as_ptr();
        // A broker that is still at its last owner's does not put it into use.
        self.next_hop(index)?.withdraw();
        // SAFETY: ours since the exchange; programs look at `sequence` (even) first, the broker at
        // `ifindex` first.
        unsafe {
            (&raw mut (*hop).neighbour).write_volatile(neighbour.into());
            (&raw mut (*hop).route_mtu).write_volatile(route_mtu);
        }
        self.hop_ifindex(index).store(ifindex, Release);
        Some(index)
    }

    /// An owner's next hops.
    pub fn next_hops_of(&self, owner_row: u32) -> impl Iterator<Item = u32> + '_ {
        crate::owner::next_hops_of(self, owner_row)
    }

    /// Frees a next hop. No slot may name it any more.
    pub fn free_next_hop(&self, index: u32) {
        let Some(hop) = self.next_hop(index) else {
            return;
        };
        hop.withdraw();
        self.hop_ifindex(index).store(0, Release);
        hop.owner().store(0, Release);
    }

    /// The `ifindex` of a next hop that exists.
    pub(crate) fn hop_ifindex(&self, index: u32) -> &AtomicU32 {
        let hop: *mut NextHop = self
            .memory
            .next_hops
            .at(index)
            .expect("the index was looked up before");
        // SAFETY: a word of the mapped element, which all sides reach by atomics.
        unsafe { AtomicU32::from_ptr(&raw mut (*hop).ifindex) }
    }
}
