//! Read-only access to the pinned maps, for `slipgate flows` and `stats`. The memory can't be
//! written, and no descriptor is kept, so nothing here can disturb a flow.

use std::{
    mem::offset_of,
    ops::Range,
    os::fd::OwnedFd,
    path::Path,
    sync::atomic::{AtomicU32, Ordering::Acquire},
};

use slipgate_abi::{
    Addresses6, Direction, DropCounters, NextHop, Protocol, RuleIndex, Slot, SlotIndex, SlotRef,
    Verdict, Vm, Vm6, VmCounters, VmRates, VmRow,
    maps::{self, Chunk, RuleElement, SLOTS_PER_CHUNK},
    rate::RateRef,
};

use super::{
    Memory, Protection, check_descriptors, check_pinned, memory_files, open_pins, text_of,
};
use crate::{Result, layout::Sizes};

/// The arrays, mapped read-only. Contents are returned as copies.
#[derive(Debug)]
pub struct ReadOnlyMaps {
    memory: Memory,
    /// Whether they are files of memory, of user-mode engines.
    in_files: bool,
}

impl ReadOnlyMaps {
    /// Opens the maps pinned in `pin_dir`.
    ///
    /// # Errors
    /// A map is missing or cannot be opened, has another ABI version or shape, or cannot be mapped.
    pub fn open_pinned(pin_dir: &Path) -> Result<Self> {
        // The kernel refuses a shared mapping of a descriptor opened for reading only. The mapping
        // is read-only for good, and the descriptors are closed here.
        let in_files = memory_files::are_in(pin_dir);
        let (fds, sizes) = match in_files {
            true => {
                let fds = memory_files::open(pin_dir)?;
                let sizes = memory_files::check(&fds)?;
                (fds, sizes)
            }
            false => {
                let fds = open_pins(pin_dir)?;
                let sizes = check_pinned(&fds, pin_dir)?;
                (fds, sizes)
            }
        };
        Ok(Self {
            memory: Memory::new(&fds, sizes, Protection::Read)?,
            in_files,
        })
    }

    /// Whether user-mode engines carry the flows, not the kernel.
    pub fn are_of_userspace(&self) -> bool {
        self.in_files
    }

    /// Returns the number of this instance of the maps, drawn whenever they are made: slots and
    /// generations are unique within it.
    pub fn instance(&self) -> u32 {
        let instance = offset_of!(maps::Meta, instance);
        self.memory.meta_word(instance).load(Acquire)
    }

    /// Opens the maps by descriptors in the order of [`MapName::ALL`](crate::layout::MapName::ALL),
    /// which are closed here.
    ///
    /// # Errors
    /// A descriptor is not the expected map, or a map cannot be mapped.
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self> {
        let in_files = memory_files::are_files(&fds);
        let sizes = match in_files {
            true => memory_files::check(&fds)?,
            false => check_descriptors(&fds)?,
        };
        Ok(Self {
            memory: Memory::new(&fds, sizes, Protection::Read)?,
            in_files,
        })
    }

    /// Returns the sizes with which the maps were made.
    pub fn sizes(&self) -> Sizes {
        self.memory.sizes()
    }

    /// Returns the number of elements of `RULES` that hold a rule, whether it is in force or not.
    pub fn rules_held(&self) -> usize {
        let all = (0..self.sizes().rules).map(RuleIndex::new);
        let held = all.filter(|index| self.memory.rule_whole(*index) != RuleElement::FREE.whole);
        held.count()
    }

    /// Returns copies of all flows, in the order of their slots. Slots of chunks that no process has
    /// are not read: none of them holds a flow.
    pub fn flows(&self) -> impl Iterator<Item = (SlotIndex, Slot)> + '_ {
        self.flows_in(0..self.slots())
    }

    /// Returns copies of the flows in these slots, as [`Self::flows`] does.
    pub fn flows_in(&self, slots: Range<u32>) -> impl Iterator<Item = (SlotIndex, Slot)> + '_ {
        let end = slots.end.min(self.slots());
        let chunks = slots.start / SLOTS_PER_CHUNK..end.div_ceil(SLOTS_PER_CHUNK);
        let chunks = chunks.filter(|chunk| self.has_owner(*chunk));
        let slots = chunks.flat_map(move |chunk| {
            let first = chunk * SLOTS_PER_CHUNK;
            first.max(slots.start)..(first + SLOTS_PER_CHUNK).min(end)
        });
        let slots = slots.map(SlotIndex::new);
        slots.filter_map(|index| Some((index, self.flow(index)?)))
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        self.memory.slots.elements()
    }

    /// Whether a process has a chunk of slots, or a dead one had it when it ended.
    fn has_owner(&self, chunk: u32) -> bool {
        let word = self.memory.chunks.at(chunk);
        // SAFETY: an element of CHUNKS, which is mapped while `self` lives and reached by atomics.
        let word = word.map(|word| unsafe { AtomicU32::from_ptr(word) }.load(Acquire));
        word.is_some_and(|word| Chunk(word).owner().is_some())
    }

    /// Returns a copy of a slot's flow; `None` if the slot is free, or was reused during the call.
    pub fn flow(&self, index: SlotIndex) -> Option<Slot> {
        let address = self.memory.slots.at(index.get())?;
        // SAFETY: an element of SLOTS, used only while `self` keeps it mapped; nothing below
        // writes.
        let slot = unsafe { SlotRef::new(address) };
        let verdict = Verdict::from_u32(slot.verdict().load(Acquire))?;
        let flow = slot.copy_as(verdict, Protocol::from_number(slot.protocol())?);
        // A slot rests for a second between two flows, so this detects a read across a change.
        let unchanged = slot.generation().load(Acquire) == flow.generation;
        (unchanged && verdict != Verdict::Free).then_some(flow)
    }

    /// Returns all VMs with their rows.
    pub fn vms(&self) -> impl Iterator<Item = (VmRow, Vm)> + '_ {
        VmRow::of(self.sizes().vms)
            .filter_map(|row| Some((row, self.vm(row)?)))
            .filter(|(_, vm)| vm.id != 0)
    }

    /// Returns a copy of a VM's row; `None` beyond the last.
    pub fn vm(&self, row: VmRow) -> Option<Vm> {
        // SAFETY: an element of VMS; integers and bytes have no invalid values.
        Some(unsafe { self.memory.vms.at(row.word())?.read_volatile() })
    }

    /// Returns the addresses of the IPv6 flow in a slot; `None` beyond the last. They are the flow's
    /// that [`ReadOnlyMaps::flows`] has returned, as long as that has not ended.
    pub fn addresses6(&self, index: SlotIndex) -> Option<Addresses6> {
        // SAFETY: an element of ADDRESSES6, all octets.
        Some(unsafe { self.memory.addresses6.at(index.get())?.read_volatile() })
    }

    /// Returns a copy of a VM's row of `VMS6`; `None` beyond the last.
    pub fn vm6(&self, row: VmRow) -> Option<Vm6> {
        // SAFETY: an element of VMS6; integers and octets have no invalid values.
        Some(unsafe { self.memory.vms6.at(row.word())?.read_volatile() })
    }

    /// Returns a VM's drop counters; `None` beyond the last row.
    pub fn drops(&self, row: VmRow) -> Option<DropCounters> {
        // SAFETY: an element of DROPS, all integers.
        Some(unsafe { self.memory.drops.at(row.word())?.read_volatile() })
    }

    /// Returns a VM's counters of userspace; `None` beyond the last row.
    pub fn counters(&self, row: VmRow) -> Option<VmCounters> {
        // SAFETY: an element of COUNTERS, all integers.
        Some(unsafe { self.memory.counters.at(row.word())?.read_volatile() })
    }

    /// Returns a VM's rate limits; `None` beyond the last row.
    pub fn rates(&self, row: VmRow) -> Option<VmRates> {
        // SAFETY: an element of RATES, used only while `self` keeps it mapped; `get` only reads.
        Some(unsafe { RateRef::new(self.memory.rates.at(row.word())?) }.get())
    }

    /// Returns a direction's budget of bytes and what was used of it; `None` if there is none.
    pub fn budget(&self, row: VmRow, direction: Direction) -> Option<(u64, u64)> {
        // SAFETY: as above; `budget` only reads.
        unsafe { RateRef::new(self.memory.rates.at(row.word())?) }.budget(direction)
    }

    /// Whether the bytes of a direction are shaped; if not, their rate is policed.
    pub fn is_shaped(&self, row: VmRow, direction: Direction) -> bool {
        let limits = self.memory.rates.at(row.word());
        // SAFETY: as above; `pacer` only reads.
        limits.is_some_and(|limits| unsafe { RateRef::new(limits) }.pacer(direction) != 0)
    }

    /// Returns a next hop; `None` beyond the last.
    pub fn next_hop(&self, index: u32) -> Option<NextHop> {
        // SAFETY: an element of NEXT_HOPS, all integers.
        Some(unsafe { self.memory.next_hops.at(index)?.read_volatile() })
    }

    /// Returns a row of OWNERS; `None` beyond the last.
    pub fn owner(&self, row: u32) -> Option<maps::Owner> {
        // SAFETY: an element of OWNERS, all integers.
        Some(unsafe { self.memory.owners.at(row)?.read_volatile() })
    }

    /// Returns a rule's text; `None` beyond the last.
    pub fn rule(&self, index: RuleIndex) -> Option<String> {
        self.memory.rule(index)
    }

    /// Returns the name in a VM's row.
    pub fn name(vm: &Vm) -> String {
        text_of(&vm.name)
    }
}

impl Drop for ReadOnlyMaps {
    fn drop(&mut self) {
        // SAFETY: only copies were handed out.
        unsafe { self.memory.unmap() };
    }
}

impl Memory {
    /// # Safety
    /// No address in any of the mappings is used any more.
    unsafe fn unmap(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.meta.unmap();
            self.slots.unmap();
            self.sequences.unmap();
            self.chunks.unmap();
            self.owners.unmap();
            self.vms.unmap();
            self.drops.unmap();
            self.counters.unmap();
            self.next_hops.unmap();
            self.rules.unmap();
            self.rates.unmap();
            self.addresses6.unmap();
            self.vms6.unmap();
        }
    }
}

#[cfg(test)]
#[path = "read_only_test.rs"]
mod tests;
