//! The pinned maps for looking only: `slipgate flows` and `stats`. The memory can't be written, and
//! no descriptor is kept, so nothing here can disturb a flow.

use std::{
    mem::offset_of, net::Ipv4Addr, os::fd::OwnedFd, path::Path, sync::atomic::Ordering::Acquire,
};

use slipgate_abi::{
    DropCounters, NextHop, Protocol, SlotRef, Verdict, Vm, VmCounters, VmRates, maps,
    rate::RateRef, tcp::TcpBits,
};

use super::{Memory, Protection, check_descriptors, check_pinned, open_pins, text_of};
use crate::Result;

/// The mapped arrays, read-only, as copies.
#[derive(Debug)]
pub struct ReadOnlyMaps {
    memory: Memory,
}

/// A flow at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are those of slipgate_abi::Slot")]
pub struct SlotSnapshot {
    /// Its index in `SLOTS`.
    pub index: u32,
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
    pub vm: u32,
    pub vm_row: u32,
    pub guest: Ipv4Addr,
    pub guest_port: u16,
    pub remote: Ipv4Addr,
    pub remote_port: u16,
    pub nat: Ipv4Addr,
    pub nat_port: u16,
    pub flags: u8,
    pub isn: u32,
    pub created_ns: u64,
    pub rule: u32,
    pub uplink_ifindex: u32,
    pub owner: u32,
    pub epoch: u32,
    pub connect_us: u32,
}

impl ReadOnlyMaps {
    /// Opens what is pinned in `pin_dir`.
    pub fn open_pinned(pin_dir: &Path) -> Result<Self> {
        // Descriptors opened for reading only can't be mapped shared, which the kernel asks for.
        // The mapping is read-only for good, and the descriptors end here.
        let fds = open_pins(pin_dir)?;
        let slots = check_pinned(&fds, pin_dir, None)?;
        Ok(Self {
            memory: Memory::new(&fds, slots, Protection::Read)?,
        })
    }

    /// What slots and generations are unique within: another number whenever the maps are made.
    pub fn instance(&self) -> u32 {
        let instance = offset_of!(maps::Meta, instance);
        self.memory.meta_word(instance).load(Acquire)
    }

    /// From descriptors in the order of [`MapName::ALL`](crate::layout::MapName::ALL), which end
    /// here.
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self> {
        let slots = check_descriptors(&fds)?;
        Ok(Self {
            memory: Memory::new(&fds, slots, Protection::Read)?,
        })
    }

    /// The flows that there are, in the order of their slots.
    pub fn flows(&self) -> impl Iterator<Item = SlotSnapshot> + '_ {
        (0..self.memory.slots.elements()).filter_map(|index| self.flow(index))
    }

    /// A slot's flow; `None` when it is free, or changes hands just now.
    pub fn flow(&self, index: u32) -> Option<SlotSnapshot> {
        let address = self.memory.slots.at(index)?;
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
            vm: slot.vm(),
            vm_row: slot.vm_row(),
            guest: slot.guest().into(),
            guest_port: slot.guest_port(),
            remote: slot.remote().into(),
            remote_port: slot.remote_port(),
            nat: slot.nat().into(),
            nat_port: slot.nat_port(),
            flags: slot.flags(),
            isn: slot.isn(),
            created_ns: slot.created_ns(),
            rule: slot.rule(),
            uplink_ifindex: slot.uplink_ifindex(),
            owner: slot.owner(),
            epoch: slot.epoch(),
            connect_us: slot.connect_us().load(Acquire),
        };
        // A slot rests a second between two flows, so this catches whoever read across a change.
        let unchanged = slot.generation().load(Acquire) == generation;
        (unchanged && verdict != Verdict::Free).then_some(flow)
    }

    /// The VMs that there are, with their rows.
    pub fn vms(&self) -> impl Iterator<Item = (u32, Vm)> + '_ {
        (1..self.memory.vms.elements())
            .filter_map(|row| Some((row, self.vm(row)?)))
            .filter(|(_, vm)| vm.id != 0)
    }

    /// A VM's row as it is.
    pub fn vm(&self, row: u32) -> Option<Vm> {
        // SAFETY: an element of VMS; integers and bytes have no invalid values.
        Some(unsafe { self.memory.vms.at(row)?.read_volatile() })
    }

    /// A VM's drops.
    pub fn drops(&self, row: u32) -> Option<DropCounters> {
        // SAFETY: an element of DROPS, all integers.
        Some(unsafe { self.memory.drops.at(row)?.read_volatile() })
    }

    /// What userspace counted for a VM.
    pub fn counters(&self, row: u32) -> Option<VmCounters> {
        // SAFETY: an element of COUNTERS, all integers.
        Some(unsafe { self.memory.counters.at(row)?.read_volatile() })
    }

    /// How a VM is limited.
    pub fn rates(&self, row: u32) -> Option<VmRates> {
        // SAFETY: an element of RATES, used only while `self` keeps it mapped; `get` only reads.
        Some(unsafe { RateRef::new(self.memory.rates.at(row)?) }.get())
    }

    /// A next hop.
    pub fn next_hop(&self, index: u32) -> Option<NextHop> {
        // SAFETY: an element of NEXT_HOPS, all integers.
        Some(unsafe { self.memory.next_hops.at(index)?.read_volatile() })
    }

    /// A row of OWNERS.
    pub fn owner(&self, row: u32) -> Option<maps::Owner> {
        // SAFETY: an element of OWNERS, all integers.
        Some(unsafe { self.memory.owners.at(row)?.read_volatile() })
    }

    /// A rule's text.
    pub fn rule(&self, index: u32) -> Option<String> {
        self.memory.rule(index)
    }

    /// A VM's name.
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
