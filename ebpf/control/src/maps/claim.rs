//! Claims of shared objects by compare-and-swap in mapped arrays: chunks of slots, and next hops.

use std::{
    net::IpAddr,
    ops::Range,
    sync::atomic::{
        AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use slipgate_abi::{
    IfIndex, Ip4, Ip6, NextHop, SlotIndex,
    link::NextHopFlags,
    maps::{self, Chunk, MAX_NEXT_HOPS, SLOTS_PER_CHUNK},
};

use super::SharedMaps;

impl SharedMaps {
    /// Claims a free chunk of slots for an owner, and returns it with whether its slots have
    /// rested. `None` if all are claimed, or the free ones are reserved for others
    /// ([`maps::may_claim_chunk`]).
    pub fn claim_chunk(&self, owner_row: u32, now_ns: u64) -> Option<(Range<u32>, bool)> {
        if !self.may_claim_chunk(owner_row, 0) {
            return None;
        }
        let free = |index: u32| {
            let was = Chunk(self.chunk(index)?.load(Acquire));
            was.owner().is_none().then_some((index, was))
        };
        let (rested, others): (Vec<_>, Vec<_>) = (0..self.chunks())
            .filter_map(free)
            .partition(|(_, was)| was.has_rested(now_ns));
        let (index, was) = rested
            .into_iter()
            .chain(others)
            .find(|(index, was)| self.exchange_chunk(*index, *was, Chunk::of(owner_row)))?;
        // Several processes may have found room at once for one chunk.
        if !self.may_claim_chunk(owner_row, 1) {
            self.exchange_chunk(index, Chunk::of(owner_row), was);
            return None;
        }
        Some((self.chunk_slots(index), was.has_rested(now_ns)))
    }

    /// Releases a chunk of an owner's, by its first slot. None of its slots holds a flow, and all
    /// have rested. Returns whether the chunk was the owner's.
    pub fn release_chunk(&self, owner_row: u32, first_slot: SlotIndex, now_ns: u64) -> bool {
        let index = first_slot.chunk();
        self.exchange_chunk(index, Chunk::of(owner_row), Chunk::free_since(now_ns))
    }

    /// Whether an owner may have another chunk; or, with `just_claimed`, whether it was right to
    /// claim so many of those it holds.
    fn may_claim_chunk(&self, owner_row: u32, just_claimed: u32) -> bool {
        // A bit for each row that a chunk can name, whether or not it is in `OWNERS`.
        let mut owners = u128::from(self.owners()) | 1 << owner_row;
        let (mut free, mut held) = (0, 0);
        for index in 0..self.chunks() {
            match self.chunk_owner(index) {
                Some(row) => {
                    owners |= 1 << row;
                    held += u32::from(row == owner_row);
                }
                None => free += 1,
            }
        }
        let (free, held) = (free + just_claimed, held - just_claimed.min(held));
        maps::may_claim_chunk(self.chunks(), free, held, owners.count_ones())
    }

    fn exchange_chunk(&self, index: u32, from: Chunk, to: Chunk) -> bool {
        let chunk = self.chunk(index);
        chunk.is_some_and(|word| word.compare_exchange(from.0, to.0, AcqRel, Relaxed).is_ok())
    }

    /// Returns the chunks of an owner, as ranges of slots.
    pub fn chunks_of(&self, owner_row: u32) -> Vec<Range<u32>> {
        (0..self.chunks())
            .filter(|index| self.chunk_owner(*index) == Some(owner_row))
            .map(|index| self.chunk_slots(index))
            .collect()
    }

    /// Moves a chunk from one owner to another. Returns whether it was the first one's.
    pub(crate) fn move_chunk(&self, index: u32, from: u32, to: u32) -> bool {
        self.exchange_chunk(index, Chunk::of(from), Chunk::of(to))
    }

    /// Returns the owner of a chunk; `None` if it is free.
    pub fn chunk_owner(&self, index: u32) -> Option<u32> {
        Chunk(self.chunk(index)?.load(Acquire)).owner()
    }

    /// Returns the number of chunks of slots.
    pub(crate) fn chunks(&self) -> u32 {
        self.slots()
            .div_ceil(SLOTS_PER_CHUNK)
            .min(self.memory.chunks.elements())
    }

    pub(crate) fn chunk(&self, index: u32) -> Option<&AtomicU32> {
        // SAFETY: an element of CHUNKS, which all sides reach by atomics.
        Some(unsafe { AtomicU32::from_ptr(self.memory.chunks.at(index)?) })
    }

    fn chunk_slots(&self, index: u32) -> Range<u32> {
        let start = index * SLOTS_PER_CHUNK;
        start..(start + SLOTS_PER_CHUNK).min(self.slots())
    }

    /// Claims a next hop of an owner for this interface and neighbour (the unspecified address of its
    /// family if the link has no neighbours) and routes of this MTU (0: none). Returns the index of one that
    /// the owner has, or of a free one, not valid yet, which [`crate::netlink::NextHops::refresh`]
    /// completes. `None` if all are claimed: use 0.
    pub fn claim_next_hop(
        &self,
        owner_row: u32,
        ifindex: IfIndex,
        neighbour: impl Into<IpAddr>,
        route_mtu: u32,
    ) -> Option<u32> {
        let ours = owner_row + 1;
        let neighbour = fields_of(neighbour.into());
        let same = |index: &u32| {
            self.next_hop(*index).is_some_and(|hop| {
                hop.owner().load(Acquire) == ours
                    && self.hop_ifindex(*index).load(Acquire) == ifindex.get()
                    // SAFETY: written before `ifindex`, and only by its owner.
                    && unsafe {
                        neighbour_in(hop.as_ptr()) == neighbour
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
        // A broker that still completes the previous claim does not put it into use.
        self.next_hop(index)?.withdraw();
        // SAFETY: ours since the exchange; programs look at `sequence` (even) first, the broker at
        // `ifindex` first.
        unsafe {
            let (family, neighbour, neighbour6) = neighbour;
            (&raw mut (*hop).flags).write_volatile(family);
            (&raw mut (*hop).neighbour).write_volatile(neighbour);
            (&raw mut (*hop).neighbour6).write_volatile(neighbour6);
            (&raw mut (*hop).route_mtu).write_volatile(route_mtu);
        }
        self.hop_ifindex(index).store(ifindex.get(), Release);
        Some(index)
    }

    /// Returns the indices of an owner's next hops.
    pub fn next_hops_of(&self, owner_row: u32) -> impl Iterator<Item = u32> + '_ {
        (1..MAX_NEXT_HOPS).filter(move |index| {
            self.next_hop(*index)
                .is_some_and(|hop| hop.owner().load(Acquire) == owner_row + 1)
        })
    }

    /// Releases a next hop. No slot may name it any more.
    pub fn free_next_hop(&self, index: u32) {
        let Some(hop) = self.next_hop(index) else {
            return;
        };
        hop.withdraw();
        self.hop_ifindex(index).store(0, Release);
        hop.owner().store(0, Release);
    }

    /// Returns the `ifindex` word of an existing next hop.
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

/// Fields of a next hop that name its neighbour: [`NextHopFlags::IPV6`] or 0, and both addresses.
type NeighbourFields = (u32, Ip4, Ip6);

fn fields_of(neighbour: IpAddr) -> NeighbourFields {
    match neighbour {
        IpAddr::V4(address) => (0, address.into(), Ip6::UNSPECIFIED),
        IpAddr::V6(address) => (NextHopFlags::IPV6, Ip4::UNSPECIFIED, address.into()),
    }
}

/// Reads the same from an element.
///
/// # Safety
/// The element is mapped.
unsafe fn neighbour_in(hop: *const NextHop) -> NeighbourFields {
    // SAFETY: the caller's promise; words that do not tear.
    unsafe {
        (
            (&raw const (*hop).flags).read_volatile() & NextHopFlags::IPV6,
            (&raw const (*hop).neighbour).read_volatile(),
            (&raw const (*hop).neighbour6).read_volatile(),
        )
    }
}

/// Reads the address of an element's neighbour.
///
/// # Safety
/// The element is mapped.
pub(crate) unsafe fn neighbour_of(hop: *const NextHop) -> IpAddr {
    // SAFETY: the caller's promise.
    match unsafe { neighbour_in(hop) } {
        (0, address, _) => address.into(),
        (_, _, address) => address.into(),
    }
}
