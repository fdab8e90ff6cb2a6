//! The shared maps, for a process that holds their descriptors. It needs no capability.
//!
//! Arrays are mapped into memory: META, SLOTS, CHUNKS, OWNERS, VMS, DROPS, COUNTERS, NEXT_HOPS,
//! RULES, RATES, SEQUENCES, ADDRESSES6 and VMS6; and FIRST_PACKETS, EARLY_FRAGMENTS and EARLY_TAGS,
//! which have packets, by engines alone ([`SharedMaps::map_packets`]). The other maps are reached by system calls: FLOWS,
//! FLOWS6, FORWARDS, FORWARDS6, TAPS, DENY, DENY6 and NAMES. Without a kernel's part (`--mode userspace`) the arrays are files of memory, and
//! each process has the other maps for itself ([`crate::in_memory`]).
//!
//! The references handed out ([`SlotRef`], [`VmRef`], [`NextHopRef`], counter rows) stay valid as
//! long as the process lives: the mappings of a [`SharedMaps`] are never removed, even when it is
//! dropped. A process makes one.

mod claim;
pub(crate) use self::claim::neighbour_of;
mod forwards;
mod mapped;
pub(crate) mod memory_files;
mod pinned;
mod read_only;
mod software;
mod table;

use std::{
    mem::offset_of,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        OnceLock,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
};

use aya::Pod;
use slipgate_abi::{
    ABI_VERSION, Addresses6, Addresses6Ref, Direction, DropCounters, EarlyFragment,
    EarlyFragmentRef, EarlyTag, EarlyTagRef, FirstPacket, FirstPacketRef, FlowRef, ForwardKey,
    ForwardKey6, ForwardTarget, IfIndex, NameKey, NameValue, NextHop, NextHopRef, OwnerRef,
    RateLimits, RuleIndex, RuleRefusals, Sequences, SequencesRef, Slot, SlotIndex, SlotRef,
    TapEntry, Tuple, Tuple6, Vm, Vm6, Vm6Ref, VmCounters, VmRates, VmRef, VmRow,
    count::COUNTED_RULES,
    forward::{DenyKey, DenyKey6},
    maps,
    maps::RuleElement,
    rate::RateRef,
    vm::VmFlags,
};

pub(crate) use self::pinned::{abi_version_of, check_pinned, open_pins};
use self::{
    mapped::{Mapped, Protection},
    pinned::check_descriptors,
};
pub use self::{
    read_only::ReadOnlyMaps,
    table::{Insert, InsertError, Listing, Table},
};
use crate::{
    Error, Result,
    layout::{MapName, Sizes},
};

/// Key of `DENY` in the layout of an LPM trie.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DenyPrefix {
    /// Number of bits of `key` that are compared: 32 for the policy, and those of the destination.
    pub prefix_len: u32,
    /// Policy number and destination address.
    pub key: DenyKey,
}

// SAFETY: `repr(C)`, three words, no padding.
unsafe impl Pod for DenyPrefix {}

/// Key of `DENY6`, likewise.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DenyPrefix6 {
    /// As in [`DenyPrefix`].
    pub prefix_len: u32,
    /// Policy number and destination address.
    pub key: DenyKey6,
}

// SAFETY: `repr(C)`; a word, and octets without alignment: no padding.
unsafe impl Pod for DenyPrefix6 {}

/// All maps, readable and writable.
#[derive(Debug)]
pub struct SharedMaps {
    /// Descriptors of the mapped arrays; those of the other maps are in their tables.
    arrays: Vec<(MapName, OwnedFd)>,
    memory: Memory,
    /// The maps with packets, in an engine.
    packets: OnceLock<Packets>,
    /// Flow table of IPv4: tuples to slots.
    pub flows: Table<Tuple, FlowRef>,
    /// Flow table of IPv6.
    pub flows6: Table<Tuple6, FlowRef>,
    /// Forwards: ports of the host to guests.
    pub forwards: Table<ForwardKey, ForwardTarget>,
    /// Forwards that listen on IPv6 addresses.
    pub forwards6: Table<ForwardKey6, ForwardTarget>,
    /// TAPs: ifindexes to VMs.
    pub taps: Table<u32, TapEntry>,
    /// Denied destinations, each with the rule that denies it.
    pub deny: Table<DenyPrefix, u32>,
    /// The same of IPv6.
    pub deny6: Table<DenyPrefix6, u32>,
    /// Addresses that DNS answers opened.
    pub names: Table<NameKey, NameValue>,
}

/// Mapped arrays with packets.
#[derive(Debug)]
struct Packets {
    first: Mapped<FirstPacket>,
    early: Mapped<EarlyFragment>,
    early_tags: Mapped<EarlyTag>,
}

/// The arrays that are mapped into memory.
#[derive(Debug)]
struct Memory {
    meta: Mapped<maps::Meta>,
    slots: Mapped<Slot>,
    sequences: Mapped<Sequences>,
    chunks: Mapped<u32>,
    owners: Mapped<maps::Owner>,
    vms: Mapped<Vm>,
    drops: Mapped<DropCounters>,
    counters: Mapped<VmCounters>,
    next_hops: Mapped<NextHop>,
    rules: Mapped<maps::RuleElement>,
    rates: Mapped<RateLimits>,
    addresses6: Mapped<Addresses6>,
    vms6: Mapped<Vm6>,
}

impl SharedMaps {
    /// Opens the maps pinned in `pin_dir`. Requires root.
    ///
    /// # Errors
    /// A map is missing or cannot be opened, has another ABI version or shape, or cannot be mapped.
    pub fn open_pinned(pin_dir: &Path) -> Result<Self> {
        let fds = open_pins(pin_dir)?;
        check_pinned(&fds, pin_dir)?;
        Self::from_fds(fds)
    }

    /// Opens the maps by descriptors in the order of [`MapName::ALL`], as [`SharedMaps::fds`]
    /// returns them.
    ///
    /// # Errors
    /// A descriptor is not the expected map, a map cannot be mapped, or the ABI version differs.
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self> {
        let maps = Self::assemble(fds)?;
        let theirs = maps.meta_abi_version().load(Acquire);
        if theirs != ABI_VERSION {
            return Err(Error::AbiVersion {
                pin_dir: "the descriptors handed over".into(),
                theirs,
                ours: ABI_VERSION,
            });
        }
        Ok(maps)
    }

    /// Opens maps as [`SharedMaps::from_fds`] does, but accepts maps without a version, which were
    /// just made.
    pub(crate) fn assemble(fds: Vec<OwnedFd>) -> Result<Self> {
        let in_files = memory_files::are_files(&fds);
        let sizes = match in_files {
            true => memory_files::check(&fds)?,
            false => check_descriptors(&fds)?,
        };
        let memory = Memory::new(&fds, sizes, Protection::ReadWrite)?;
        let most = |map: MapName| in_files.then(|| map.shape(sizes).entries as usize);
        let mut rest: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
        let mut take = |map: MapName| {
            rest[map as usize]
                .take()
                .map(|fd| (map.name(), fd))
                .expect("each map is taken once")
        };
        let (flows, forwards) = (take(MapName::Flows), take(MapName::Forwards));
        let (taps, deny) = (take(MapName::Taps), take(MapName::Deny));
        let (names, flows6) = (take(MapName::Names), take(MapName::Flows6));
        let (forwards6, deny6) = (take(MapName::Forwards6), take(MapName::Deny6));
        let arrays = MapName::ALL
            .into_iter()
            .zip(rest)
            .filter_map(|(map, fd)| Some((map, fd?)))
            .collect();
        Ok(Self {
            arrays,
            memory,
            packets: OnceLock::new(),
            flows: Table::new(flows.0, flows.1, most(MapName::Flows)),
            flows6: Table::new(flows6.0, flows6.1, most(MapName::Flows6)),
            forwards: Table::new(forwards.0, forwards.1, most(MapName::Forwards)),
            forwards6: Table::new(forwards6.0, forwards6.1, most(MapName::Forwards6)),
            taps: Table::new(taps.0, taps.1, most(MapName::Taps)),
            deny: Table::new(deny.0, deny.1, most(MapName::Deny)),
            deny6: Table::new(deny6.0, deny6.1, most(MapName::Deny6)),
            names: Table::new(names.0, names.1, most(MapName::Names)),
        })
    }

    /// Returns the descriptors in the order of [`MapName::ALL`], to be passed to another process.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        MapName::ALL
            .into_iter()
            .filter_map(|map| match map {
                MapName::Flows => Some(self.flows.as_fd()),
                MapName::Flows6 => Some(self.flows6.as_fd()),
                MapName::Forwards => Some(self.forwards.as_fd()),
                MapName::Forwards6 => Some(self.forwards6.as_fd()),
                MapName::Taps => Some(self.taps.as_fd()),
                MapName::Deny => Some(self.deny.as_fd()),
                MapName::Deny6 => Some(self.deny6.as_fd()),
                MapName::Names => Some(self.names.as_fd()),
                array => self
                    .arrays
                    .iter()
                    .find(|(name, _)| *name == array)
                    .map(|(_, fd)| fd.as_fd()),
            })
            .collect()
    }

    /// Returns the sizes with which the maps were made.
    pub fn sizes(&self) -> Sizes {
        self.memory.sizes()
    }

    /// Returns all rows that a VM can have.
    pub fn vm_rows(
        &self,
    ) -> impl DoubleEndedIterator<Item = VmRow> + ExactSizeIterator + Clone + use<> {
        VmRow::of(self.sizes().vms)
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        self.memory.slots.elements()
    }

    /// Returns the indexes of all slots.
    pub fn slot_indexes(&self) -> impl Iterator<Item = SlotIndex> + use<> {
        (0..self.slots()).map(SlotIndex::new)
    }

    /// Returns a slot; `None` beyond the last.
    pub fn slot(&self, index: SlotIndex) -> Option<SlotRef> {
        // SAFETY: an element of SLOTS; the mapping is never taken down.
        Some(unsafe { SlotRef::new(self.memory.slots.at(index.get())?) })
    }

    /// Returns the TCP sequence state of a slot's connection; `None` beyond the last.
    pub fn sequences(&self, index: SlotIndex) -> Option<SequencesRef> {
        // SAFETY: an element of SEQUENCES; the mapping is never taken down.
        Some(unsafe { SequencesRef::new(self.memory.sequences.at(index.get())?) })
    }

    /// Returns the addresses of the IPv6 flow in a slot; `None` beyond the last.
    pub fn addresses6(&self, index: SlotIndex) -> Option<Addresses6Ref> {
        // SAFETY: an element of ADDRESSES6; the mapping is never taken down.
        Some(unsafe { Addresses6Ref::new(self.memory.addresses6.at(index.get())?) })
    }

    /// Maps the rings of first packets and the store of early fragments into memory: for an engine,
    /// since they have packets.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn map_packets(&self) -> Result<()> {
        let packets = Packets {
            first: self.map_array(MapName::FirstPackets)?,
            early: self.map_array(MapName::EarlyFragments)?,
            early_tags: self.map_array(MapName::EarlyTags)?,
        };
        // A second mapping would be as good, and is left where it is.
        let _ = self.packets.set(packets);
        Ok(())
    }

    fn map_array<T>(&self, name: MapName) -> Result<Mapped<T>> {
        let failed = || Error::os(format!("map {} into memory", name.name()));
        let fd = self.arrays.iter().find(|(map, _)| *map == name);
        let fd = fd.ok_or_else(|| failed()(std::io::ErrorKind::NotFound.into()))?;
        let entries = name.shape(self.sizes()).entries;
        Mapped::new(fd.1.as_fd(), entries, Protection::ReadWrite).map_err(failed())
    }

    /// Returns a place of a ring of first packets; `None` beyond the last, and unless
    /// [`SharedMaps::map_packets`] was called.
    pub fn first_packet(&self, index: u32) -> Option<FirstPacketRef> {
        // SAFETY: an element of FIRST_PACKETS; the mapping is never taken down.
        Some(unsafe { FirstPacketRef::new(self.packets.get()?.first.at(index)?) })
    }

    /// Returns a copy of an early fragment by its place; `None` as for [`SharedMaps::first_packet`].
    pub fn early_fragment(&self, place: u32) -> Option<EarlyFragmentRef> {
        // SAFETY: an element of EARLY_FRAGMENTS; the mapping is never taken down.
        Some(unsafe { EarlyFragmentRef::new(self.packets.get()?.early.at(place)?) })
    }

    /// Returns the tag of a copy by its place; `None` as for [`SharedMaps::first_packet`].
    pub fn early_tag(&self, place: u32) -> Option<EarlyTagRef> {
        // SAFETY: an element of EARLY_TAGS; the mapping is never taken down.
        Some(unsafe { EarlyTagRef::new(self.packets.get()?.early_tags.at(place)?) })
    }

    /// Returns a VM's row of `VMS6`; `None` beyond the last.
    pub fn vm6(&self, row: VmRow) -> Option<Vm6Ref> {
        // SAFETY: an element of VMS6; the mapping is never taken down.
        Some(unsafe { Vm6Ref::new(self.memory.vms6.at(row.word())?) })
    }

    /// Returns a VM's row; `None` beyond the last. Row 0 belongs to no VM.
    pub fn vm(&self, row: VmRow) -> Option<VmRef> {
        // SAFETY: an element of VMS; the mapping is never taken down.
        Some(unsafe { VmRef::new(self.memory.vms.at(row.word())?) })
    }

    /// Freezes or thaws a VM. The programs drop all packets of a frozen VM, in both directions and
    /// from the engine. Returns whether the row exists.
    pub fn set_frozen(&self, row: VmRow, frozen: bool) -> bool {
        self.set_flag(row, VmFlags::FROZEN, frozen)
    }

    /// Whether a VM is frozen.
    pub fn is_frozen(&self, row: VmRow) -> bool {
        let vm = self.vm(row);
        vm.is_some_and(|vm| vm.flags().load(Acquire) & VmFlags::FROZEN != 0)
    }

    /// Whether a VM sleeps.
    pub fn is_asleep(&self, row: VmRow) -> bool {
        let vm = self.vm(row);
        vm.is_some_and(|vm| vm.flags().load(Acquire) & VmFlags::ASLEEP != 0)
    }

    /// Sets the rate limits of a VM; `None` removes every limit. Returns whether the row exists.
    pub fn set_rates(&self, row: VmRow, rates: Option<VmRates>) -> bool {
        let rates = rates.unwrap_or_default();
        let Some(limits) = self.rate_limits(row) else {
            return false;
        };
        limits.set(rates);
        self.set_flag(row, VmFlags::LIMITED, rates.is_limited())
    }

    /// Has the bytes of a direction shaped by this device's queue, or policed if `None`. Returns
    /// whether the row exists.
    pub fn set_pacer(&self, row: VmRow, direction: Direction, device: Option<IfIndex>) -> bool {
        let ifindex = device.map_or(0, IfIndex::get);
        let limits = self.rate_limits(row);
        limits
            .map(|limits| limits.set_pacer(direction, ifindex))
            .is_some()
    }

    /// Returns the rate limits of a VM; `None` beyond the last row.
    pub fn rates(&self, row: VmRow) -> Option<VmRates> {
        self.rate_limits(row).map(RateRef::get)
    }

    /// Returns the token buckets of a VM, to be charged; `None` beyond the last row.
    pub fn rate_limits(&self, row: VmRow) -> Option<RateRef> {
        // SAFETY: an element of RATES; the mapping is never taken down.
        Some(unsafe { RateRef::new(self.memory.rates.at(row.word())?) })
    }

    /// Sets or clears a flag of a VM's row. Returns whether the row exists.
    fn set_flag(&self, row: VmRow, flag: u32, on: bool) -> bool {
        let Some(vm) = self.vm(row) else {
            return false;
        };
        if on {
            vm.flags().fetch_or(flag, Release);
        } else {
            vm.flags().fetch_and(!flag, Release);
        }
        true
    }

    /// Returns a next hop; `None` beyond the last. Element 0 is never claimed.
    pub fn next_hop(&self, index: u32) -> Option<NextHopRef> {
        // SAFETY: an element of NEXT_HOPS; the mapping is never taken down.
        Some(unsafe { NextHopRef::new(self.memory.next_hops.at(index)?) })
    }

    /// Returns a VM's drop counters, to be changed by [`slipgate_abi::count::drop_packet`]. The
    /// address stays valid as long as the process lives.
    pub fn drops(&self, row: VmRow) -> Option<*mut DropCounters> {
        self.memory.drops.at(row.word())
    }

    /// Returns a VM's counters, to be changed by atomics. The address stays valid as long as the
    /// process lives.
    pub fn counters(&self, row: VmRow) -> Option<*mut VmCounters> {
        self.memory.counters.at(row.word())
    }

    /// Writes a rule. Its text is truncated to the field on a character boundary. Returns whether
    /// the element exists.
    pub fn set_rule(&self, index: RuleIndex, rule: RuleElement, text: &str) -> bool {
        let Some(at) = self.memory.rules.at(index.get()) else {
            return false;
        };
        let mut rule = rule;
        fill_text(&mut rule.text, text);
        // SAFETY: an element of RULES. Readers copy it; one that comes in between has a mix of two,
        // of which no flow names either.
        unsafe { at.write_volatile(rule) };
        true
    }

    /// Moves the refusals counted for some elements of `RULES` to those by other rules: the elements
    /// may come to hold other rules.
    pub fn forget_refusals_by(&self, are_concerned: impl Fn(u32) -> bool) {
        let rows = 0..self.memory.counters.elements();
        for counters in rows.filter_map(|row| self.memory.counters.at(row)) {
            // SAFETY: an element of COUNTERS, whose words all sides change by atomics. A refusal
            // counted in between is another rule's in the end.
            unsafe {
                let other = AtomicU64::from_ptr(&raw mut (*counters).refused_by_other_rules);
                let first = (&raw mut (*counters).refused_by_rule).cast::<RuleRefusals>();
                for place in (0..COUNTED_RULES).map(|place| first.add(place)) {
                    let rule = AtomicU32::from_ptr(&raw mut (*place).rule);
                    let flows = AtomicU64::from_ptr(&raw mut (*place).flows);
                    let named = rule.load(Acquire).checked_sub(1);
                    if named.is_some_and(&are_concerned) {
                        other.fetch_add(flows.swap(0, AcqRel), AcqRel);
                        rule.store(0, Release);
                    }
                }
            }
        }
    }

    /// Returns the digest that identifies the rule in an element; that of a free element beyond the
    /// last.
    pub fn rule_whole(&self, index: RuleIndex) -> [u8; 16] {
        self.memory.rule_whole(index)
    }

    /// Returns a rule: its identity and its text, which [`text_of`] decodes. `None` beyond the
    /// last.
    pub fn rule_element(&self, index: RuleIndex) -> Option<RuleElement> {
        self.memory.rule_element(index)
    }

    pub(crate) fn meta_abi_version(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, abi_version))
    }

    pub(crate) fn meta_slots(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, slots))
    }

    /// Returns the number of this instance of the maps, drawn whenever they are made: slots and
    /// generations are unique within it.
    pub fn instance(&self) -> u32 {
        self.meta_instance().load(Acquire)
    }

    pub(crate) fn meta_instance(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, instance))
    }

    pub(crate) fn next_vm_id(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, next_vm_id))
    }

    /// Returns the pid in a row of OWNERS; 0: none.
    pub(crate) fn owner_pid(&self, row: u32) -> u32 {
        // SAFETY: a word of a mapped element.
        self.owner(row).map_or(0, |owner| unsafe {
            (&raw const (*owner).pid).read_volatile()
        })
    }

    /// Returns a bit mask of the rows of OWNERS that have a process, or had one that was killed.
    pub fn owners(&self) -> u64 {
        let taken = (0..maps::MAX_OWNERS).filter(|row| self.owner_pid(*row) != 0);
        taken.fold(0, |owners, row| owners | 1 << row)
    }

    /// Returns the handle to a row of OWNERS; `None` beyond the last.
    pub fn owner_ref(&self, row: u32) -> Option<OwnerRef> {
        // SAFETY: an element of OWNERS; the mapping is never taken down.
        Some(unsafe { OwnerRef::new(self.memory.owners.at(row)?) })
    }

    /// Returns a row of OWNERS; `None` beyond the last.
    pub(crate) fn owner(&self, row: u32) -> Option<*mut maps::Owner> {
        self.memory.owners.at(row)
    }
}

impl Memory {
    /// Maps the arrays. The shapes of `fds` have been checked.
    fn new(fds: &[OwnedFd], sizes: Sizes, protection: Protection) -> Result<Self> {
        fn map<T>(
            fds: &[OwnedFd],
            sizes: Sizes,
            protection: Protection,
            name: MapName,
        ) -> Result<Mapped<T>> {
            Mapped::new(
                fds[name as usize].as_fd(),
                name.shape(sizes).entries,
                protection,
            )
            .map_err(Error::os(format!("map {} into memory", name.name())))
        }
        Ok(Self {
            meta: map(fds, sizes, protection, MapName::Meta)?,
            slots: map(fds, sizes, protection, MapName::Slots)?,
            sequences: map(fds, sizes, protection, MapName::Sequences)?,
            chunks: map(fds, sizes, protection, MapName::Chunks)?,
            owners: map(fds, sizes, protection, MapName::Owners)?,
            vms: map(fds, sizes, protection, MapName::Vms)?,
            drops: map(fds, sizes, protection, MapName::Drops)?,
            counters: map(fds, sizes, protection, MapName::Counters)?,
            next_hops: map(fds, sizes, protection, MapName::NextHops)?,
            rules: map(fds, sizes, protection, MapName::Rules)?,
            rates: map(fds, sizes, protection, MapName::Rates)?,
            addresses6: map(fds, sizes, protection, MapName::Addresses6)?,
            vms6: map(fds, sizes, protection, MapName::Vms6)?,
        })
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            slots: self.slots.elements(),
            vms: self.vms.elements() - 1,
            rules: self.rules.elements(),
        }
    }

    /// Identity of a rule's element; that of a free element beyond the last.
    fn rule_whole(&self, index: RuleIndex) -> [u8; 16] {
        let Some(at) = self.rules.at(index.get()) else {
            return RuleElement::FREE.whole;
        };
        // SAFETY: bytes of an element of RULES.
        unsafe { (&raw const (*at).whole).read_volatile() }
    }

    fn meta_word(&self, offset: usize) -> &AtomicU32 {
        let meta = self.meta.at(0).expect("META has one element");
        // SAFETY: a word of the mapped element, which all sides reach by atomics.
        unsafe { AtomicU32::from_ptr(meta.byte_add(offset).cast()) }
    }

    fn rule(&self, index: RuleIndex) -> Option<String> {
        Some(text_of(&self.rule_element(index)?.text))
    }

    fn rule_element(&self, index: RuleIndex) -> Option<RuleElement> {
        // SAFETY: an element of RULES; bytes and integers have no invalid values.
        Some(unsafe { self.rules.at(index.get())?.read_volatile() })
    }
}

/// Writes `text` into `field`, truncated on a character boundary and padded with zeros.
pub(crate) fn fill_text(field: &mut [u8], text: &str) {
    let length = text.floor_char_boundary(field.len());
    field.fill(0);
    field[..length].copy_from_slice(&text.as_bytes()[..length]);
}

/// Returns the text of a zero-padded field.
pub fn text_of(field: &[u8]) -> String {
    let length = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..length]).into_owned()
}

#[cfg(test)]
#[path = "maps_test.rs"]
mod tests;
