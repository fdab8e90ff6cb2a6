//! The kernel's tables, its programs and the engine port, in memory.
//!
//! [`Kernel`] is shared by a [`FakeDatapath`] and a [`FakePort`], and by the test, which sends
//! packets as a guest or as the world: what happens to them is what the BPF programs do, by the same
//! functions ([`slipgate_abi::datapath`]). Faults can be set: insertions that fail, a port that takes nothing.
#![expect(
    unsafe_code,
    reason = "its tables are memory that is changed through several references, as mapped tables are"
)]
use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet, VecDeque},
    io,
    os::fd::BorrowedFd,
    rc::Rc,
    time::{Duration, SystemTime},
};

use slipgate_abi::{
    DropCounters, FlowRef, Ip4, NameKey, NameValue, NextHop, NextHopRef, RateLimits, Sequences,
    SequencesRef, Slot, SlotRef, TapEntry, Tuple, Vm, VmCounters, VmRates, VmRef,
    datapath::fragment_table::{Fragment, PLACES},
    maps::{Chunk, MAX_NEXT_HOPS, MAX_VMS, SLOTS_PER_CHUNK},
    rate::RateRef,
    vm::VmFlags,
};

use crate::{
    clock::Clock,
    port::{Batch, FrameIo},
    stats::VmStats,
};
use slipgate_policy::Described;

mod datapath;
pub mod hellos;
pub mod initials;
pub mod packets;
mod programs;
mod segmentation;
mod skb;

pub use datapath::FakeDatapath;
pub use programs::Way;
pub use segmentation::segments;

/// An array that everybody changes through pointers, like a mapped one.
#[derive(Debug)]
struct Shared<T>(*mut [T]);

impl<T> Shared<T> {
    /// Zeroed elements, as the kernel makes them.
    fn zeroed(len: usize) -> Self {
        // SAFETY: the ABI's types are valid when zero: the kernel hands them out so.
        Self(Box::into_raw(unsafe {
            Box::<[T]>::new_zeroed_slice(len).assume_init()
        }))
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, index: usize) -> *mut T {
        assert!(index < self.len());
        // SAFETY: in bounds of a live allocation.
        unsafe { self.0.cast::<T>().add(index) }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`, dropped once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// What shall go wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// So many insertions from now on find the tuple taken.
    pub insert_exists: u32,
    /// So many insertions from now on fail with EIO.
    pub insert_fails: u32,
    /// So many deletions from now on fail with EIO.
    pub remove_fails: u32,
    /// Most entries of `FLOWS`; 0: no bound.
    pub map_capacity: usize,
    /// Most entries of `NAMES`; 0: as many as the kernel's has.
    pub names_capacity: usize,
    /// So many writes to the port from now on fail with EAGAIN.
    pub port_refuses: u32,
    /// What is written to the port vanishes, so that only the engine's own work is measured.
    pub port_ignores: bool,
    /// Frames beyond this many in the port's queue are lost; 0: no bound.
    pub queue_len: usize,
}

/// The kernel.
#[derive(Debug)]
pub struct Kernel {
    slots: Shared<Slot>,
    sequences: Shared<Sequences>,
    vms: Shared<Vm>,
    counters: Shared<VmCounters>,
    drops: Shared<DropCounters>,
    next_hops: Shared<NextHop>,
    rates: Shared<RateLimits>,
    fragments: Shared<Fragment>,
    /// `CHUNKS`.
    pub(crate) chunks: Vec<Chunk>,
    /// Rows of `OWNERS` that have a process, a bit each.
    pub owners: u64,
    /// `FLOWS`.
    pub flows: HashMap<Tuple, FlowRef>,
    /// `NAMES`.
    pub names: HashMap<NameKey, NameValue>,
    /// `RULES`.
    pub rules: HashMap<u32, Described>,
    /// `FORWARDS`: (host's address and port, protocol) to the VM's row and id.
    pub forwards: HashMap<(Ip4, u16, u8), (u16, u32)>,
    /// `TAPS`.
    pub taps: HashMap<u32, TapEntry>,
    /// Addresses that the host routes to, and does not have.
    pub routed_on: HashSet<Ip4>,
    /// The MTU of every device, bytes.
    pub device_mtu: u32,
    /// The port's queue toward the engine.
    pub queue: VecDeque<Vec<u8>>,
    /// What reached a guest: its id and the L3 packet or ARP message.
    pub at_guest: Vec<(u32, Vec<u8>)>,
    /// What reached the world: L3 packets.
    pub at_world: Vec<Vec<u8>>,
    /// Faults.
    pub faults: Faults,
    /// Now, ns.
    pub now_ns: u64,
    /// Frames that the programs handed over.
    pub handed_over: u64,
    /// Frames lost from the port's queue.
    pub lost: u64,
    /// Packets that the programs themselves dropped.
    pub dropped: u64,
    /// `META`'s `instance`.
    pub instance: u32,
    /// A deletion failed once, so pairs may be torn.
    pub remove_failed: bool,
    /// The frame that a program last sent to some device, from its L2 header on.
    pub last_sent: Vec<u8>,
    /// What was last written to the port.
    pub last_written: Vec<u8>,
    /// How often engines looked at a slot.
    pub slots_looked_at: Cell<u64>,
}

/// A handle on the kernel.
pub type KernelHandle = Rc<RefCell<Kernel>>;

impl Kernel {
    /// Empty tables with this many slots.
    pub fn new(slots: u32) -> KernelHandle {
        Rc::new(RefCell::new(Self {
            slots: Shared::zeroed(slots as usize),
            sequences: Shared::zeroed(slots as usize),
            vms: Shared::zeroed(MAX_VMS as usize),
            counters: Shared::zeroed(MAX_VMS as usize),
            drops: Shared::zeroed(MAX_VMS as usize),
            next_hops: Shared::zeroed(MAX_NEXT_HOPS as usize),
            rates: Shared::zeroed(MAX_VMS as usize),
            fragments: Shared::zeroed(PLACES),
            chunks: vec![Chunk(0); (slots / SLOTS_PER_CHUNK) as usize],
            owners: 0,
            flows: HashMap::new(),
            names: HashMap::new(),
            rules: HashMap::new(),
            forwards: HashMap::new(),
            taps: HashMap::new(),
            routed_on: HashSet::new(),
            device_mtu: 65_536,
            queue: VecDeque::new(),
            at_guest: Vec::new(),
            at_world: Vec::new(),
            faults: Faults::default(),
            now_ns: 1_000_000_000_000,
            handed_over: 0,
            lost: 0,
            dropped: 0,
            instance: 0x51_1b_6a_7e,
            remove_failed: false,
            last_sent: Vec::new(),
            last_written: Vec::new(),
            slots_looked_at: Cell::new(0),
        }))
    }

    /// Adds a VM's row, and its TAP.
    pub fn add_vm(&mut self, row: u16, id: u32, guest: Ip4, gateway: Ip4, mtu: u32) {
        let vm = self.vms.at(usize::from(row));
        let tap = programs::FIRST_TAP + u32::from(row);
        let entry = TapEntry {
            vm: id,
            vm_row: row.into(),
        };
        self.taps.insert(tap, entry);
        // SAFETY: in bounds; one thread.
        unsafe {
            (*vm).id = id;
            (*vm).tap_ifindex = tap;
            (*vm).port_ifindex = programs::ENGINE_PORT;
            (*vm).guest_mac = [0x02, 0, 0, 0, 2, 1];
            (*vm).gateway_mac = [0x02, 0, 0, 0, 2, 2];
            (*vm).guest = guest;
            (*vm).gateway = gateway;
            (*vm).prefix_len = 24;
            (*vm).mtu = mtu;
            (*vm).credits = 64;
            (*vm).world_credits = 64;
        }
    }

    /// A slot.
    pub fn slot(&self, index: u32) -> SlotRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { SlotRef::new(self.slots.at(index as usize)) }
    }

    /// Where a slot's connection stands in sequence space.
    pub fn sequences(&self, index: u32) -> SequencesRef {
        // SAFETY: as above.
        unsafe { SequencesRef::new(self.sequences.at(index as usize)) }
    }

    /// A VM's row.
    pub fn vm(&self, row: u16) -> VmRef {
        // SAFETY: as above.
        unsafe { VmRef::new(self.vms.at(usize::from(row))) }
    }

    /// Drops everything of a VM, or lets it pass again.
    pub fn set_frozen(&self, row: u16, frozen: bool) {
        self.set_flag(row, VmFlags::FROZEN, frozen);
    }

    /// Limits what passes from and to a VM.
    pub fn set_rates(&self, row: u16, rates: VmRates) {
        self.rates(row).set(rates);
        self.set_flag(row, VmFlags::LIMITED, rates.is_limited());
    }

    /// Fills a next hop in as the broker does, with what it carries, bytes.
    pub fn set_next_hop_mtu(&self, index: u32, mtu: u32) {
        let element = self.next_hops.at(index as usize);
        // SAFETY: in bounds; the allocation lives as long as the kernel.
        let hop = unsafe { NextHopRef::new(element) };
        let withdrawn = hop.withdraw();
        // SAFETY: in bounds; one thread.
        unsafe { (*element).mtu = mtu };
        hop.publish(withdrawn);
    }

    fn set_flag(&self, row: u16, flag: u32, on: bool) {
        use std::sync::atomic::Ordering::Relaxed;
        let vm = self.vm(row);
        let flags = vm.flags();
        if on {
            flags.fetch_or(flag, Relaxed);
        } else {
            flags.fetch_and(!flag, Relaxed);
        }
    }

    fn rates(&self, row: u16) -> RateRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { RateRef::new(self.rates.at(usize::from(row))) }
    }

    /// A VM's counters.
    pub fn stats(&self, row: u16) -> VmStats {
        let row = usize::from(row);
        // SAFETY: as above.
        unsafe { VmStats::new(self.counters.at(row), self.drops.at(row)) }
    }

    /// A VM's TAP and engine port, by their indexes.
    pub fn devices_of(&self, row: u16) -> [u32; 2] {
        [programs::FIRST_TAP + u32::from(row), programs::ENGINE_PORT]
    }

    /// Forgets what was dropped in a VM's row.
    pub fn forget_drops(&self, row: u16) {
        // SAFETY: in bounds; one thread; zeroes are counts.
        unsafe { self.drops.at(usize::from(row)).write_bytes(0, 1) };
    }

    /// Slots that are not free.
    pub fn slots_in_use(&self) -> Vec<u32> {
        use std::sync::atomic::Ordering::Relaxed;
        (0..self.slots.len() as u32)
            .filter(|i| self.slot(*i).verdict().load(Relaxed) != 0)
            .collect()
    }

    /// Whether the flow's answers are known.
    fn has_reverse(&self, guest: &Tuple, flow: FlowRef) -> bool {
        let slot = self.slot(flow.slot);
        slot.guest_tuple() != *guest || self.flows.get(&slot.world_tuple()) == Some(&flow)
    }

    /// Whether a live flow whose answers are unknown from now on still has its guest's tuple.
    fn leaves_forward(&self, removed: &Tuple, flow: FlowRef) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        let slot = self.slot(flow.slot);
        let live = slot.verdict().load(Relaxed) != 0
            && slot.generation().load(Relaxed) == flow.generation
            && slot.world_tuple() == *removed;
        live && self.flows.get(&slot.guest_tuple()) == Some(&flow)
    }

    fn take_fault(fault: &mut u32) -> bool {
        let due = *fault > 0;
        *fault = fault.saturating_sub(1);
        due
    }
}

/// The port's engine side.
#[derive(Clone, Debug)]
pub struct FakePort(KernelHandle);

impl FakePort {
    /// The kernel's port.
    pub fn new(kernel: &KernelHandle) -> Self {
        Self(kernel.clone())
    }
}

impl FrameIo for FakePort {
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()> {
        while !batch.is_full() {
            let Some(frame) = self.0.borrow_mut().queue.pop_front() else {
                break;
            };
            batch.push_with(|buffer| {
                buffer[..frame.len()].copy_from_slice(&frame);
                Ok(frame.len())
            })?;
        }
        Ok(())
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        let mut kernel = self.0.borrow_mut();
        if Kernel::take_fault(&mut kernel.faults.port_refuses) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if !kernel.faults.port_ignores {
            frame.clone_into(&mut kernel.last_written);
            kernel.engine_port(frame);
        }
        Ok(())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A clock that the test moves, by [`Kernel::now_ns`] so that both sides agree.
#[derive(Clone, Debug)]
pub struct FakeClock {
    kernel: KernelHandle,
    slept_ns: Rc<Cell<u64>>,
}

impl FakeClock {
    /// The kernel's clock.
    pub fn new(kernel: &KernelHandle) -> Self {
        Self {
            kernel: kernel.clone(),
            slept_ns: Rc::default(),
        }
    }
}

impl Clock for FakeClock {
    fn now_ns(&self) -> u64 {
        self.kernel.borrow().now_ns
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_000 + self.now_ns())
    }

    fn sleep_ns(&self, ns: u64) {
        self.slept_ns.set(self.slept_ns.get() + ns);
        self.kernel.borrow_mut().now_ns += ns;
    }
}
