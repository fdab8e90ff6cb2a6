//! Read-only access to the pinned maps, for `slipgate flows` and `stats`. The memory can't be
//! written, and no descriptor is kept, so nothing here can disturb a flow.

use std::{
    mem::offset_of, net::Ipv4Addr, os::fd::OwnedFd, path::Path, sync::atomic::Ordering::Acquire,
};

use slipgate_abi::{
    DropCounters, IfIndex, NextHop, Protocol, RuleIndex, SlotIndex, SlotRef, Verdict, Vm,
    VmCounters, VmId, VmRates, VmRow, maps, rate::RateRef, tcp::TcpBits,
};

use super::{Memory, Protection, check_descriptors, check_pinned, open_pins, text_of};
use crate::Result;

/// The arrays, mapped read-only. Contents are returned as copies.
#[derive(Debug)]
pub struct ReadOnlyMaps {
    memory: Memory,
}

/// Copy of a flow's slot at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are those of slipgate_abi::Slot")]
pub struct SlotSnapshot {
    /// Index of the slot in `SLOTS`.
    pub index: SlotIndex,
    pub generation: u32,
    pub verdict: Verdict,
    pub protocol: Protocol,
    pub tcp: TcpBits,
    pub next_hop: u32,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub rx_packets: u64,
    pub rx_bytes: u64,
    pub tx_last_ns: u64,
    pub rx_last_ns: u64,
    pub vm: VmId,
    pub vm_row: VmRow,
    pub guest: Ipv4Addr,
    pub guest_port: u16,
    pub remote: Ipv4Addr,
    pub remote_port: u16,
    pub nat: Ipv4Addr,
    pub nat_port: u16,
    pub flags: u8,
    pub isn: u32,
    pub created_ns: u64,
    pub rule: RuleIndex,
    pub uplink_ifindex: IfIndex,
    pub owner: u32,
    pub epoch: u32,
    pub connect_us: u32,
}

impl ReadOnlyMaps {
    /// Opens the maps pinned in `pin_dir`.
    ///
    /// # Errors
    /// A map is missing or cannot be opened, has another ABI version or shape, or cannot be mapped.
    pub fn open_pinned(pin_dir: &Path) -> Result<Self> {
        // The kernel refuses a shared mapping of a descriptor opened for reading only. The mapping
        // is read-only for good, and the descriptors are closed here.
        let fds = open_pins(pin_dir)?;
        let slots = check_pinned(&fds, pin_dir, None)?;
        Ok(Self {
            memory: Memory::new(&fds, slots, Protection::Read)?,
        })
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
        let slots = check_descriptors(&fds)?;
        Ok(Self {
            memory: Memory::new(&fds, slots, Protection::Read)?,
        })
    }

    /// Returns all flows, in the order of their slots.
    pub fn flows(&self) -> impl Iterator<Item = SlotSnapshot> + '_ {
        (0..self.memory.slots.elements()).filter_map(|index| self.flow(SlotIndex::new(index)))
    }

    /// Returns a slot's flow; `None` if the slot is free, or was reused during the call.
    pub fn flow(&self, index: SlotIndex) -> Option<SlotSnapshot> {
        let address = self.memory.slots.at(index.get())?;
        // SAFETY: an element of SLOTS, used only while `self` keeps it mapped; nothing below
        // writes.
        let slot = unsafe { SlotRef::new(address) };
        let verdict = Verdict::from_u32(slot.verdict().load(Acquire))?;
        let generation = slot.generation().load(Acquire);
        let flow = SlotSnapshot {
            index,
            generation,
            verdict,
            protocol: Protocol::from_ip(slot.protocol())?,
            tcp: TcpBits(slot.tcp().load(Acquire)),
            next_hop: slot.next_hop().load(Acquire),
            tx_packets: slot.tx_packets().load(Acquire),
            tx_bytes: slot.tx_bytes().load(Acquire),
            rx_packets: slot.rx_packets().load(Acquire),
            rx_bytes: slot.rx_bytes().load(Acquire),
            tx_last_ns: slot.tx_last_ns().load(Acquire),
            rx_last_ns: slot.rx_last_ns().load(Acquire),
            vm: slot.id(),
            vm_row: slot.row(),
            guest: slot.guest().into(),
            guest_port: slot.guest_port(),
            remote: slot.remote().into(),
            remote_port: slot.remote_port(),
            nat: slot.nat().into(),
            nat_port: slot.nat_port(),
            flags: slot.flags(),
            isn: slot.isn(),
            created_ns: slot.created_ns(),
            rule: slot.rule_index(),
            uplink_ifindex: slot.uplink(),
            owner: slot.owner(),
            epoch: slot.epoch(),
            connect_us: slot.connect_us().load(Acquire),
        };
        // A slot rests for a second between two flows, so this detects a read across a change.
        let unchanged = slot.generation().load(Acquire) == generation;
        (unchanged && verdict != Verdict::Free).then_some(flow)
    }

    /// Returns all VMs with their rows.
    pub fn vms(&self) -> impl Iterator<Item = (VmRow, Vm)> + '_ {
        VmRow::all()
            .filter_map(|row| Some((row, self.vm(row)?)))
            .filter(|(_, vm)| vm.id != 0)
    }

    /// Returns a copy of a VM's row; `None` beyond the last.
    pub fn vm(&self, row: VmRow) -> Option<Vm> {
        // SAFETY: an element of VMS; integers and bytes have no invalid values.
        Some(unsafe { self.memory.vms.at(row.word())?.read_volatile() })
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
        }
    }
}
