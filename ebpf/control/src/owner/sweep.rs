//! Removal of incomplete state that dead processes left.
//!
//! An admission fills a slot that is `Free`, inserts both tuples, and sets the verdict last. An end
//! sets `Closing` first, deletes the tuples, and sets `Free` last. So a tuple whose slot is free,
//! has another generation or another tuple is a part of something incomplete, unless a living
//! process is just changing it. A slot in `Closing` is left to its adopter, which knows whether its
//! record was written; and so are the tuples of the chunks that these owners took over: their
//! engines look for those while new flows are admitted.

use std::{
    collections::HashSet,
    sync::atomic::Ordering::{AcqRel, Acquire},
    time::Duration,
};

use slipgate_abi::{
    FlowRef, SlotIndex, SlotRef, Tuple, Tuple6, Verdict, VmId, VmRow, maps::MAX_OWNERS,
};

use super::{Field, Owner};
use crate::{
    Paths, Result, lock::FileLock, maps::SharedMaps, pacing::PacingDevice, pins::is_alive,
    tap::EnginePort, vm_rows,
};

/// Numbers of objects that a sweep removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Swept {
    /// Tuples without a flow, of dead processes.
    pub tuples: usize,
    /// Chunks of free slots that a dead process held.
    pub chunks: usize,
    /// Next hops of dead processes that have neither VMs nor slots.
    pub next_hops: usize,
    /// Entries of `TAPS`, `FORWARDS` and `NAMES` of VMs that are gone.
    pub entries: usize,
    /// Engine ports of dead processes that have neither VMs nor slots.
    pub ports: usize,
}

/// Removes the incomplete state of dead processes whose rows none of these owners has taken over.
/// `patience`: time-out of the lock.
///
/// # Errors
/// The lock is not obtained, or a map cannot be read or changed.
pub fn sweep<'o>(
    maps: &SharedMaps,
    paths: &Paths,
    owners: impl IntoIterator<Item = &'o Owner>,
    patience: Duration,
) -> Result<Swept> {
    let _all = FileLock::wait(&paths.run_dir.join("lock"), patience)?;
    let owners: Vec<&Owner> = owners.into_iter().collect();
    let is_ours = |row: u32| owners.iter().any(|owner| owner.rows.contains(&row));
    let mut busy = [false; MAX_OWNERS as usize];
    for (row, busy) in (0..).zip(&mut busy) {
        *busy = !is_ours(row) && is_alive(paths, row)?;
    }
    let is_busy = |row: u32| busy.get(row as usize).copied().unwrap_or(false);

    let is_in_use = |row: u32| is_busy(row) || is_ours(row);
    let mut chunk_owners = (0..maps.chunks()).filter_map(|chunk| maps.chunk_owner(chunk));
    // It takes a second where there are a million flows.
    let tuples = match chunk_owners.all(is_in_use) {
        true => 0,
        false => {
            let is_dead = |flow: &FlowRef| !chunk_owner(maps, flow.index()).is_some_and(is_in_use);
            let of_ipv4 = maps
                .flows
                .remove_if(|tuple, flow| !is_whole(maps, tuple, *flow) && is_dead(flow))?;
            let of_ipv6 = maps
                .flows6
                .remove_if(|tuple, flow| !is_whole6(maps, tuple, *flow) && is_dead(flow))?;
            of_ipv4 + of_ipv6
        }
    };
    let gone =
        |id: VmId, row: Option<VmRow>| row.and_then(|row| vm_rows::id_of(maps, row)) != Some(id);
    let taps = maps.taps.remove_if(|_, tap| gone(tap.id(), tap.row()))?;
    let forwards = maps
        .forwards
        .remove_if(|_, forward| gone(forward.id(), forward.row()))?;
    let forwards6 = {
        let _entries = FileLock::of_routed(&paths.run_dir, patience)?;
        maps.forwards6
            .remove_if(|_, forward| gone(forward.id(), forward.row()))?
    };
    let open: HashSet<VmId> = maps
        .vm_rows()
        .filter_map(|row| vm_rows::id_of(maps, row))
        .collect();
    let names = maps.names.remove_if(|key, _| !open.contains(&key.id()))?;
    let mut swept = Swept {
        tuples,
        entries: taps + forwards + forwards6 + names,
        ..Swept::default()
    };
    for row in (0..MAX_OWNERS).filter(|row| !is_in_use(*row)) {
        swept.chunks += free_chunks(maps, row);
        if !super::has_anything(maps, row) {
            swept.next_hops += free_next_hops(maps, row);
            if super::word(maps, row, Field::Port).swap(0, AcqRel) != 0 {
                swept.ports += usize::from(EnginePort::remove(row)?);
                PacingDevice::remove(row)?;
            }
        }
    }
    Ok(swept)
}

/// Whether the entry's slot holds the flow of the tuple.
fn is_whole(maps: &SharedMaps, tuple: &Tuple, flow: FlowRef) -> bool {
    let Some(slot) = slot_of(maps, flow).filter(|slot| !slot.is_ipv6()) else {
        return false;
    };
    let named = match tuple.scope {
        Tuple::WORLD => slot.world_tuple(),
        _ => slot.guest_tuple(),
    };
    named == *tuple
}

/// As [`is_whole`], of IPv6.
fn is_whole6(maps: &SharedMaps, tuple: &Tuple6, flow: FlowRef) -> bool {
    let slot = slot_of(maps, flow).filter(SlotRef::is_ipv6);
    let Some((slot, addresses)) = slot.zip(maps.addresses6(flow.index())) else {
        return false;
    };
    let named = match tuple.scope {
        Tuple::WORLD => addresses.world_tuple(slot),
        _ => addresses.guest_tuple(slot),
    };
    named == *tuple
}

/// Returns the slot of an entry, if it is in use in the entry's generation.
fn slot_of(maps: &SharedMaps, flow: FlowRef) -> Option<SlotRef> {
    maps.slot(flow.index()).filter(|slot| {
        slot.verdict().load(Acquire) != Verdict::Free as u32
            && slot.generation().load(Acquire) == flow.generation
    })
}

/// Returns the row that owns the slot's chunk.
fn chunk_owner(maps: &SharedMaps, slot: SlotIndex) -> Option<u32> {
    maps.chunk_owner(slot.chunk())
}

/// Releases the row's chunks that have free slots only. Returns how many.
pub(super) fn free_chunks(maps: &SharedMaps, row: u32) -> usize {
    let is_free = |slot: u32| {
        maps.slot(SlotIndex::new(slot))
            .is_some_and(|slot| slot.verdict().load(Acquire) == Verdict::Free as u32)
    };
    // Some slots may have been freed just now: a process that claims the chunk lets them rest.
    let now_ns = monotonic_ns();
    maps.chunks_of(row)
        .into_iter()
        .filter(|chunk| chunk.clone().all(is_free))
        .filter(|chunk| maps.release_chunk(row, SlotIndex::new(chunk.start), now_ns))
        .count()
}

/// Returns the time of `CLOCK_MONOTONIC`, ns.
fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a place for the time. With this clock the call does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Releases the row's next hops, which no slot names any more. Returns how many.
pub(super) fn free_next_hops(maps: &SharedMaps, row: u32) -> usize {
    let hops: Vec<_> = maps.next_hops_of(row).collect();
    for hop in &hops {
        maps.free_next_hop(*hop);
    }
    hops.len()
}
