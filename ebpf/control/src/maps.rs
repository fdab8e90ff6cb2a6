//! The shared maps, for whoever holds their descriptors: no capability is needed.
//!
//! Arrays are mapped into memory. The references handed out ([`SlotRef`], [`VmRef`],
//! [`NextHopRef`], counter rows) stay good as long as the process lives: the mappings of a
//! [`SharedMaps`] are never taken down, also not when it is dropped. A process makes one.
//!
//! | reached by | maps |
//! | --- | --- |
//! | memory | META, SLOTS, CHUNKS, OWNERS, VMS, DROPS, COUNTERS, NEXT_HOPS, RULES, RATES, SEQUENCES |
//! | system call | FLOWS, FORWARDS, TAPS, DENY, NAMES |

mod claim;
mod mapped;
mod pinned;
mod read_only;
mod table;

use std::{
    mem::offset_of,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{AcqRel, Acquire, Release},
    },
};

use aya::Pod;
use slipgate_abi::{
    ABI_VERSION, DropCounters, FlowRef, ForwardKey, ForwardTarget, NameKey, NameValue, NextHop,
    NextHopRef, RateLimits, RuleRefusals, Sequences, SequencesRef, Slot, SlotRef, TapEntry, Tuple,
    Vm, VmCounters, VmRates, VmRef, count::COUNTED_RULES, forward::DenyKey, maps,
    maps::RuleElement, rate::RateRef, vm::VmFlags,
};

pub(crate) use self::pinned::{abi_version_of, check_pinned, open_pins};
use self::{
    mapped::{Mapped, Protection},
    pinned::check_descriptors,
};
pub use self::{
    read_only::{ReadOnlyMaps, SlotSnapshot},
    table::{Insert, InsertError, Table},
};
use crate::{Error, Result, layout::MapName};

/// Key of `DENY` as the kernel wants it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DenyPrefix {
    /// How many bits of `key` count: 32 for the policy, and those of the destination.
    pub prefix_len: u32,
    /// Policy and destination.
    pub key: DenyKey,
}

// SAFETY: `repr(C)`, three words, no padding.
unsafe impl Pod for DenyPrefix {}

/// All maps, for reading and writing.
#[derive(Debug)]
pub struct SharedMaps {
    /// Descriptors of the mapped ones; the others are in their tables.
    arrays: Vec<(MapName, OwnedFd)>,
    memory: Memory,
    /// Tuples to slots.
    pub flows: Table<Tuple, FlowRef>,
    /// Ports of the host to guests.
    pub forwards: Table<ForwardKey, ForwardTarget>,
    /// Ifindexes of TAPs to VMs.
    pub taps: Table<u32, TapEntry>,
    /// Denied destinations to rules.
    pub deny: Table<DenyPrefix, u32>,
    /// What DNS opened.
    pub names: Table<NameKey, NameValue>,
}

/// The mapped arrays.
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
}

impl SharedMaps {
    /// Opens what is pinned in `pin_dir`. Needs to be root.
    pub fn open_pinned(pin_dir: &Path) -> Result<Self> {
        let fds = open_pins(pin_dir)?;
        check_pinned(&fds, pin_dir, None)?;
        Self::from_fds(fds)
    }

    /// From descriptors in the order of [`MapName::ALL`], as [`SharedMaps::fds`] gives them.
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

    /// As [`SharedMaps::from_fds`], of maps that may just have been made.
    pub(crate) fn assemble(fds: Vec<OwnedFd>) -> Result<Self> {
        let slots = check_descriptors(&fds)?;
        let memory = Memory::new(&fds, slots, Protection::ReadWrite)?;
        let mut rest: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
        let mut take = |map: MapName| {
            rest[map as usize]
                .take()
                .map(|fd| (map.name(), fd))
                .expect("each map is taken once")
        };
        let (flows, forwards) = (take(MapName::Flows), take(MapName::Forwards));
        let (taps, deny) = (take(MapName::Taps), take(MapName::Deny));
        let names = take(MapName::Names);
        let arrays = MapName::ALL
            .into_iter()
            .zip(rest)
            .filter_map(|(map, fd)| Some((map, fd?)))
            .collect();
        Ok(Self {
            arrays,
            memory,
            flows: Table::new(flows.0, flows.1),
            forwards: Table::new(forwards.0, forwards.1),
            taps: Table::new(taps.0, taps.1),
            deny: Table::new(deny.0, deny.1),
            names: Table::new(names.0, names.1),
        })
    }

    /// The descriptors, in the order of [`MapName::ALL`], to hand over to another process.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        MapName::ALL
            .into_iter()
            .filter_map(|map| match map {
                MapName::Flows => Some(self.flows.as_fd()),
                MapName::Forwards => Some(self.forwards.as_fd()),
                MapName::Taps => Some(self.taps.as_fd()),
                MapName::Deny => Some(self.deny.as_fd()),
                MapName::Names => Some(self.names.as_fd()),
                array => self
                    .arrays
                    .iter()
                    .find(|(name, _)| *name == array)
                    .map(|(_, fd)| fd.as_fd()),
            })
            .collect()
    }

    /// How many slots there are.
    pub fn slots(&self) -> u32 {
        self.memory.slots.elements()
    }

    /// A slot; `None` beyond the last.
    pub fn slot(&self, index: u32) -> Option<SlotRef> {
        // SAFETY: an element of SLOTS; the mapping is never taken down.
        Some(unsafe { SlotRef::new(self.memory.slots.at(index)?) })
    }

    /// Where a slot's connection stands in sequence space; `None` beyond the last.
    pub fn sequences(&self, index: u32) -> Option<SequencesRef> {
        // SAFETY: an element of SEQUENCES; the mapping is never taken down.
        Some(unsafe { SequencesRef::new(self.memory.sequences.at(index)?) })
    }

    /// A VM's row; `None` beyond the last. Row 0 is nobody's.
    pub fn vm(&self, row: u32) -> Option<VmRef> {
        // SAFETY: an element of VMS; the mapping is never taken down.
        Some(unsafe { VmRef::new(self.memory.vms.at(row)?) })
    }

    /// Drops everything of a VM in the programs, both ways and from the engine too, or lets it pass
    /// again. Whether there is such a row.
    pub fn set_frozen(&self, row: u32, frozen: bool) -> bool {
        self.set_flag(row, VmFlags::FROZEN, frozen)
    }

    /// Whether a VM is frozen.
    pub fn is_frozen(&self, row: u32) -> bool {
        let vm = self.vm(row);
        vm.is_some_and(|vm| vm.flags().load(Acquire) & VmFlags::FROZEN != 0)
    }

    /// Limits what passes from and to a VM; `None` lifts every limit. Whether there is such a row.
    pub fn set_rates(&self, row: u32, rates: Option<VmRates>) -> bool {
        let rates = rates.unwrap_or_default();
        let Some(limits) = self.rate_limits(row) else {
            return false;
        };
        limits.set(rates);
        self.set_flag(row, VmFlags::LIMITED, rates.is_limited())
    }

    /// How a VM is limited.
    pub fn rates(&self, row: u32) -> Option<VmRates> {
        self.rate_limits(row).map(RateRef::get)
    }

    /// A VM's limits, by which it is charged.
    pub fn rate_limits(&self, row: u32) -> Option<RateRef> {
        // SAFETY: an element of RATES; the mapping is never taken down.
        Some(unsafe { RateRef::new(self.memory.rates.at(row)?) })
    }

    fn set_flag(&self, row: u32, flag: u32, on: bool) -> bool {
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

    /// A next hop; `None` beyond the last. Element 0 is nobody's.
    pub fn next_hop(&self, index: u32) -> Option<NextHopRef> {
        // SAFETY: an element of NEXT_HOPS; the mapping is never taken down.
        Some(unsafe { NextHopRef::new(self.memory.next_hops.at(index)?) })
    }

    /// A VM's drop counters, to be changed by [`slipgate_abi::count::drop_packet`]. The address
    /// stays good as long as the process lives.
    pub fn drops(&self, row: u32) -> Option<*mut DropCounters> {
        self.memory.drops.at(row)
    }

    /// A VM's counters, to be changed by atomics. The address stays good as long as the process
    /// lives.
    pub fn counters(&self, row: u32) -> Option<*mut VmCounters> {
        self.memory.counters.at(row)
    }

    /// Writes a rule, with its text cut at its field's size on a character boundary. Whether there
    /// is such an element.
    pub fn set_rule(&self, index: u32, rule: RuleElement, text: &str) -> bool {
        let Some(at) = self.memory.rules.at(index) else {
            return false;
        };
        let mut rule = rule;
        fill_text(&mut rule.text, text);
        // SAFETY: an element of RULES. Readers copy it; one that comes in between has a mix of two,
        // of which no flow names either.
        unsafe { at.write_volatile(rule) };
        true
    }

    /// What these elements of `RULES` refused so far is counted as other rules' from now on: they
    /// are about to mean something else.
    pub fn forget_refusals_by(&self, rules: std::ops::Range<u32>) {
        for counters in (0..maps::MAX_VMS).filter_map(|row| self.counters(row)) {
            // SAFETY: an element of COUNTERS, whose words all sides change by atomics. A refusal
            // counted in between is another rule's in the end.
            unsafe {
                let other = AtomicU64::from_ptr(&raw mut (*counters).refused_by_other_rules);
                let first = (&raw mut (*counters).refused_by_rule).cast::<RuleRefusals>();
                for place in (0..COUNTED_RULES).map(|place| first.add(place)) {
                    let rule = AtomicU32::from_ptr(&raw mut (*place).rule);
                    let flows = AtomicU64::from_ptr(&raw mut (*place).flows);
                    let named = rule.load(Acquire).checked_sub(1);
                    if named.is_some_and(|rule| rules.contains(&rule)) {
                        other.fetch_add(flows.swap(0, AcqRel), AcqRel);
                        rule.store(0, Release);
                    }
                }
            }
        }
    }

    /// A rule: what it is told by, and its text, which [`text_of`] reads.
    pub fn rule_element(&self, index: u32) -> Option<RuleElement> {
        self.memory.rule_element(index)
    }

    pub(crate) fn meta_abi_version(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, abi_version))
    }

    pub(crate) fn meta_slots(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, slots))
    }

    /// What slots and generations are unique within: another number whenever the maps are made.
    pub fn instance(&self) -> u32 {
        self.meta_instance().load(Acquire)
    }

    pub(crate) fn meta_instance(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, instance))
    }

    pub(crate) fn next_vm_id(&self) -> &AtomicU32 {
        self.memory.meta_word(offset_of!(maps::Meta, next_vm_id))
    }

    /// The process in a row of OWNERS; 0: none.
    pub(crate) fn owner_pid(&self, row: u32) -> u32 {
        // SAFETY: a word of a mapped element.
        self.owner(row).map_or(0, |owner| unsafe {
            (&raw const (*owner).pid).read_volatile()
        })
    }

    /// The rows of OWNERS that a process has, or had when it was killed: a bit each.
    pub fn owners(&self) -> u64 {
        let taken = (0..maps::MAX_OWNERS).filter(|row| self.owner_pid(*row) != 0);
        taken.fold(0, |owners, row| owners | 1 << row)
    }

    /// A row of OWNERS.
    pub(crate) fn owner(&self, row: u32) -> Option<*mut maps::Owner> {
        self.memory.owners.at(row)
    }
}

impl Memory {
    /// `fds` were checked.
    fn new(fds: &[OwnedFd], slots: u32, protection: Protection) -> Result<Self> {
        fn map<T>(
            fds: &[OwnedFd],
            slots: u32,
            protection: Protection,
            name: MapName,
        ) -> Result<Mapped<T>> {
            Mapped::new(
                fds[name as usize].as_fd(),
                name.shape(slots).entries,
                protection,
            )
            .map_err(Error::os(format!("map {} into memory", name.name())))
        }
        Ok(Self {
            meta: map(fds, slots, protection, MapName::Meta)?,
            slots: map(fds, slots, protection, MapName::Slots)?,
            sequences: map(fds, slots, protection, MapName::Sequences)?,
            chunks: map(fds, slots, protection, MapName::Chunks)?,
            owners: map(fds, slots, protection, MapName::Owners)?,
            vms: map(fds, slots, protection, MapName::Vms)?,
            drops: map(fds, slots, protection, MapName::Drops)?,
            counters: map(fds, slots, protection, MapName::Counters)?,
            next_hops: map(fds, slots, protection, MapName::NextHops)?,
            rules: map(fds, slots, protection, MapName::Rules)?,
            rates: map(fds, slots, protection, MapName::Rates)?,
        })
    }

    fn meta_word(&self, offset: usize) -> &AtomicU32 {
        let meta = self.meta.at(0).expect("META has one element");
        // SAFETY: a word of the mapped element, which all sides reach by atomics.
        unsafe { AtomicU32::from_ptr(meta.byte_add(offset).cast()) }
    }

    fn rule(&self, index: u32) -> Option<String> {
        Some(text_of(&self.rule_element(index)?.text))
    }

    fn rule_element(&self, index: u32) -> Option<RuleElement> {
        // SAFETY: an element of RULES; bytes and integers have no invalid values.
        Some(unsafe { self.rules.at(index)?.read_volatile() })
    }
}

/// Zero-pads `text` into `field`, cut on a character boundary.
pub(crate) fn fill_text(field: &mut [u8], text: &str) {
    let length = text.floor_char_boundary(field.len());
    field.fill(0);
    field[..length].copy_from_slice(&text.as_bytes()[..length]);
}

/// The text of a zero-padded field.
pub fn text_of(field: &[u8]) -> String {
    let length = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..length]).into_owned()
}

#[cfg(test)]
#[path = "maps_test.rs"]
mod tests;
