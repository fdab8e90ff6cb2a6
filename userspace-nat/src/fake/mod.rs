//! The kernel's tables, its programs and the engine port, in memory.
//!
//! [`Kernel`] is shared by a [`FakeDatapath`] and a [`FakePort`], and by the test, which sends
//! packets as a guest or as the world: what happens to them is what the BPF programs do, by the
//! same functions ([`slipgate_abi::datapath`]). Faults can be set: insertions that fail, a port
//! that takes nothing.
#![expect(
    unsafe_code,
    reason = "its tables are memory that is changed through several references, as mapped tables are"
)]
use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet, VecDeque},
    fs::File,
    io,
    os::fd::{AsFd as _, BorrowedFd},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, SystemTime},
};

use nix::sys::epoll::{Epoll, EpollFlags};
use slipgate_abi::{
    Addresses6, Addresses6Ref, Command, DropCounters, EarlyFragment, EarlyFragmentRef, EarlyTag,
    EarlyTagRef, FirstPacket, FirstPacketRef, FlowRef, Ip4, Ip6, NameKey, NameValue, NextHop,
    NextHopRef, OwnerRef, RateLimits, RuleIndex, Sequences, SequencesRef, Slot, SlotIndex, SlotRef,
    TapEntry, Tuple, Tuple6, Vm, Vm6, Vm6Ref, VmCounters, VmId, VmRates, VmRef, VmRow,
    datapath::fragment_table::{Fragment, Fragment6, PLACES},
    early_fragment,
    first_packet::RING_LEN,
    maps::{self, Chunk, MAX_NEXT_HOPS, MAX_OWNERS, SLOTS_PER_CHUNK},
    rate::RateRef,
    vm::VmFlags,
};

use crate::{
    clock::Clock,
    port::{Batch, Frame, FrameIo},
    stats::VmStats,
};
use slipgate_model::{FlowTuple, TupleKey};
use slipgate_policy::Described;

mod datapath;
pub mod hellos;
pub mod initials;
pub mod packets;
mod programs;
pub(crate) mod segmentation;
mod skb;

pub use datapath::FakeDatapath;
pub use programs::Handling;
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

/// Faults that the in-memory kernel injects.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Number of further look-ups that fail with EIO.
    pub get_fails: u32,
    /// Number of further insertions that find the tuple in use.
    pub insert_exists: u32,
    /// Number of further insertions that fail with EIO.
    pub insert_fails: u32,
    /// Number of further ports that find `FORWARDS` full.
    pub open_port_full: u32,
    /// Number of further deletions that fail with EIO.
    pub remove_fails: u32,
    /// Number of further insertions by the program, on an order, that fail.
    pub order_fails: Cell<u32>,
    /// Number of further orders for which the program does not run, though they are written.
    pub orders_lost: u32,
    /// Most entries of `FLOWS`; 0 for no limit.
    pub map_capacity: usize,
    /// Most entries of `NAMES`; 0 for as many as the kernel's map has.
    pub names_capacity: usize,
    /// Number of further writes to the port that fail with EAGAIN.
    pub port_refuses: u32,
    /// Whether writes to the port are discarded, so that only the engine's own work is measured.
    pub port_ignores: bool,
    /// Whether the engine of row 0 goes to sleep while the next program runs.
    pub sleeps_meanwhile: Cell<bool>,
    /// Number of further looks at the places of a ring that find a program which has not published its
    /// packet yet.
    pub unpublished_looks: Cell<u32>,
    /// Number of further looks at the tables of fragments that find nothing: the first fragment comes
    /// behind them.
    pub unseen_fragments: Cell<u32>,
    /// Whether an engine takes all copies of early fragments before the next look at those tables that
    /// finds something.
    pub takes_early: Cell<bool>,
    /// Whether a program claims the place of the next copy that an engine takes, before it is read.
    pub claims_early: Cell<bool>,
    /// Length of the port's queue, beyond which frames are lost; 0 for no limit.
    pub queue_len: usize,
}

/// In-memory kernel: maps, devices and clock.
#[derive(Debug)]
pub struct Kernel {
    slots: Shared<Slot>,
    sequences: Shared<Sequences>,
    vms: Shared<Vm>,
    owner_rows: Shared<maps::Owner>,
    first_packets: Shared<FirstPacket>,
    early_fragments: Shared<EarlyFragment>,
    early_tags: Shared<EarlyTag>,
    early_claims: Shared<EarlyTag>,
    counters: Shared<VmCounters>,
    drops: Shared<DropCounters>,
    next_hops: Shared<NextHop>,
    rates: Shared<RateLimits>,
    fragments: Shared<Fragment>,
    fragments6: Shared<Fragment6>,
    addresses6: Shared<Addresses6>,
    vms6: Shared<Vm6>,
    /// Contents of the map `CHUNKS`.
    pub(crate) chunks: Vec<Chunk>,
    /// Rows of `OWNERS` that have a process, as a bit set.
    pub owners: u64,
    /// Contents of the map `FLOWS`.
    pub flows: HashMap<Tuple, FlowRef>,
    /// Entries that a running program has inserted into `FLOWS`.
    ordered: RefCell<Vec<(Tuple, FlowRef)>>,
    /// Contents of the map `FLOWS6`.
    pub flows6: HashMap<Tuple6, FlowRef>,
    /// Entries that a running program has inserted into `FLOWS6`.
    ordered6: RefCell<Vec<(Tuple6, FlowRef)>>,
    /// Contents of the map `NAMES`.
    pub names: HashMap<NameKey, NameValue>,
    /// Contents of the map `RULES`.
    pub rules: HashMap<RuleIndex, Described>,
    /// Contents of `FORWARDS`: from the host's address and port and the protocol to the VM's row
    /// and id.
    pub forwards: HashMap<(Ip4, u16, u8), (u16, u32)>,
    /// Contents of `FORWARDS6`, in the same form.
    pub forwards6: HashMap<(Ip6, u16, u8), (u16, u32)>,
    /// Contents of the map `TAPS`.
    pub taps: HashMap<u32, TapEntry>,
    /// Addresses to which the host routes and which it does not have.
    pub routed_on: HashSet<Ip4>,
    /// Such addresses of IPv6.
    pub routed_on6: HashSet<Ip6>,
    /// Device by which frames from the world arrive.
    pub uplink: u32,
    /// MTU of every device, bytes.
    pub device_mtu: u32,
    /// Queue of the port toward the engine.
    pub queue: VecDeque<Vec<u8>>,
    /// Packets that reached a guest: its id and the L3 packet or ARP message.
    pub at_guest: Vec<(u32, Vec<u8>)>,
    /// L3 packets that reached the world.
    pub at_world: Vec<Vec<u8>>,
    /// Faults to inject, set by the test.
    pub faults: Faults,
    /// Present time, ns, set by the test.
    pub now_ns: u64,
    /// Number of frames that the programs handed over.
    pub handed_over: u64,
    /// Number of those that went by the ring of first packets.
    pub in_ring: u64,
    /// Number of frames lost from the port's queue.
    pub lost: u64,
    /// Number of packets that the programs dropped.
    pub dropped: u64,
    /// Value of `instance` in `META`.
    pub instance: u32,
    /// Whether a deletion failed, so that a flow may have one entry only.
    pub remove_failed: bool,
    /// Frame that a program last sent to a device, from its L2 header on.
    pub last_sent: Vec<u8>,
    /// Frame that was last written to the port.
    pub last_written: Vec<u8>,
    /// The last frame with an order for which no program ran.
    pub lost_order: Vec<u8>,
    /// Number of times that engines examined a slot.
    pub slots_looked_at: Cell<u64>,
    /// What another process does to a slot each time before the engine looks at it.
    pub at_look: Option<fn(SlotRef)>,
}

/// Number of VMs that the tables have rows for.
pub const VMS: u32 = maps::DEFAULT_VMS;

/// Shared handle to the kernel.
pub type KernelHandle = Rc<RefCell<Kernel>>;

impl Kernel {
    /// A kernel with empty tables and this many slots.
    pub fn new(slots: u32) -> KernelHandle {
        Rc::new(RefCell::new(Self {
            slots: Shared::zeroed(slots as usize),
            sequences: Shared::zeroed(slots as usize),
            vms: Shared::zeroed(VMS as usize + 1),
            owner_rows: Shared::zeroed(MAX_OWNERS as usize),
            first_packets: Shared::zeroed((MAX_OWNERS * RING_LEN) as usize),
            early_fragments: Shared::zeroed(early_fragment::PLACES as usize),
            early_tags: Shared::zeroed(early_fragment::PLACES as usize),
            early_claims: Shared::zeroed(early_fragment::CLAIMS as usize),
            counters: Shared::zeroed(VMS as usize + 1),
            drops: Shared::zeroed(VMS as usize + 1),
            next_hops: Shared::zeroed(MAX_NEXT_HOPS as usize),
            rates: Shared::zeroed(VMS as usize + 1),
            fragments: Shared::zeroed(PLACES),
            fragments6: Shared::zeroed(PLACES),
            addresses6: Shared::zeroed(slots as usize),
            vms6: Shared::zeroed(VMS as usize + 1),
            chunks: vec![Chunk(0); (slots / SLOTS_PER_CHUNK) as usize],
            owners: 0,
            flows: HashMap::new(),
            ordered: RefCell::default(),
            flows6: HashMap::new(),
            ordered6: RefCell::default(),
            names: HashMap::new(),
            rules: HashMap::new(),
            forwards: HashMap::new(),
            forwards6: HashMap::new(),
            taps: HashMap::new(),
            routed_on: HashSet::new(),
            routed_on6: HashSet::new(),
            uplink: programs::UPLINK,
            device_mtu: 65_536,
            queue: VecDeque::new(),
            at_guest: Vec::new(),
            at_world: Vec::new(),
            faults: Faults::default(),
            now_ns: 1_000_000_000_000,
            handed_over: 0,
            in_ring: 0,
            lost: 0,
            dropped: 0,
            instance: 0x51_1b_6a_7e,
            remove_failed: false,
            last_sent: Vec::new(),
            last_written: Vec::new(),
            lost_order: Vec::new(),
            slots_looked_at: Cell::new(0),
            at_look: None,
        }))
    }

    /// Adds a VM's row and its TAP.
    pub fn add_vm(&mut self, row: u16, id: u32, guest: Ip4, gateway: Ip4, mtu: u32) {
        let vm = self.vms.at(usize::from(row));
        let tap = programs::FIRST_TAP + u32::from(row);
        let entry = TapEntry::new(VmId::new(id), VmRow::new(row));
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
        for owner in 0..MAX_OWNERS {
            self.owner_row(owner).common().store(u32::MAX, Relaxed);
        }
    }

    /// Handle to a row of `OWNERS`.
    pub fn owner_row(&self, row: u32) -> OwnerRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { OwnerRef::new(self.owner_rows.at(row as usize)) }
    }

    /// Handle to a place of a ring of first packets.
    pub fn first_packet(&self, index: u32) -> FirstPacketRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { FirstPacketRef::new(self.first_packets.at(index as usize)) }
    }

    /// Handle to the tag of an early fragment's copy.
    pub fn early_tag(&self, place: u32) -> EarlyTagRef {
        // SAFETY: as above.
        unsafe { EarlyTagRef::new(self.early_tags.at(place as usize)) }
    }

    /// Handle to an element of `EARLY_CLAIMS`.
    pub fn early_claim(&self, index: u32) -> EarlyTagRef {
        // SAFETY: as above.
        unsafe { EarlyTagRef::new(self.early_claims.at(index as usize)) }
    }

    /// Handle to the copy of an early fragment.
    pub fn early_fragment(&self, place: u32) -> EarlyFragmentRef {
        // SAFETY: as above.
        unsafe { EarlyFragmentRef::new(self.early_fragments.at(place as usize)) }
    }

    /// Handle to the slot with this index.
    pub fn slot(&self, index: SlotIndex) -> SlotRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { SlotRef::new(self.slots.at(index.get() as usize)) }
    }

    /// Writes a slot as a whole.
    #[cfg(test)]
    pub(crate) fn set_slot(&mut self, index: SlotIndex, slot: Slot) {
        // SAFETY: `at` checks the bounds; nobody else changes it meanwhile.
        unsafe { self.slots.at(index.get() as usize).write(slot) };
    }

    /// Sequence numbers of a slot's connection.
    pub fn sequences(&self, index: SlotIndex) -> SequencesRef {
        // SAFETY: as above.
        unsafe { SequencesRef::new(self.sequences.at(index.get() as usize)) }
    }

    /// Addresses of the IPv6 flow in a slot.
    pub fn addresses6(&self, index: SlotIndex) -> Addresses6Ref {
        // SAFETY: as above.
        unsafe { Addresses6Ref::new(self.addresses6.at(index.get() as usize)) }
    }

    /// Handle to a VM's row of `VMS6`.
    pub fn vm6(&self, row: u16) -> Vm6Ref {
        // SAFETY: as above.
        unsafe { Vm6Ref::new(self.vms6.at(usize::from(row))) }
    }

    /// Handle to a VM's row.
    pub fn vm(&self, row: u16) -> VmRef {
        // SAFETY: as above.
        unsafe { VmRef::new(self.vms.at(usize::from(row))) }
    }

    /// Freezes or thaws a VM.
    pub fn set_frozen(&self, row: u16, frozen: bool) {
        self.set_flag(row, VmFlags::FROZEN, frozen);
    }

    /// Sets the rate limits of a VM.
    pub fn set_rates(&self, row: u16, rates: VmRates) {
        self.rates(row).set(rates);
        self.set_flag(row, VmFlags::LIMITED, rates.is_limited());
    }

    /// Fills in a next hop as the broker does, with its MTU in bytes.
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

    /// Returns a row of `RATES`.
    pub fn rates(&self, row: u16) -> RateRef {
        // SAFETY: `at` checks the bounds; the allocation lives as long as the kernel.
        unsafe { RateRef::new(self.rates.at(usize::from(row))) }
    }

    /// Statistics of a VM.
    pub fn stats(&self, row: u16) -> VmStats {
        let row = usize::from(row);
        // SAFETY: as above.
        unsafe { VmStats::new(self.counters.at(row), self.drops.at(row)) }
    }

    /// Ifindexes of a VM's TAP and engine port.
    pub fn devices_of(&self, row: u16) -> [u32; 2] {
        [programs::FIRST_TAP + u32::from(row), programs::ENGINE_PORT]
    }

    /// Clears the drop counters of a VM's row.
    pub fn forget_drops(&self, row: u16) {
        // SAFETY: in bounds; one thread; zeroes are counts.
        unsafe { self.drops.at(usize::from(row)).write_bytes(0, 1) };
    }

    /// Indexes of the slots that are not free.
    pub fn slots_in_use(&self) -> Vec<SlotIndex> {
        use std::sync::atomic::Ordering::Relaxed;
        (0..self.slots.len() as u32)
            .map(SlotIndex::new)
            .filter(|i| self.slot(*i).verdict().load(Relaxed) != 0)
            .collect()
    }

    /// Entry of a flow, of either family.
    pub fn flow_by(&self, tuple: &FlowTuple) -> Option<FlowRef> {
        match tuple.key()? {
            TupleKey::V4(tuple) => self.flows.get(&tuple).copied(),
            TupleKey::V6(tuple) => self.flows6.get(&tuple).copied(),
        }
    }

    /// Number of entries of flows of both families.
    pub fn flow_entries(&self) -> usize {
        self.flows.len() + self.flows6.len()
    }

    /// Tuple of a slot's flow on the guest's link.
    pub fn guest_tuple(&self, index: SlotIndex) -> FlowTuple {
        let slot = self.slot(index);
        match slot.is_ipv6() {
            false => slot.guest_tuple().into(),
            true => self.addresses6(index).guest_tuple(slot).into(),
        }
    }

    /// Tuple of a slot's flow on the world's link.
    pub fn world_tuple(&self, index: SlotIndex) -> FlowTuple {
        let slot = self.slot(index);
        match slot.is_ipv6() {
            false => slot.world_tuple().into(),
            true => self.addresses6(index).world_tuple(slot).into(),
        }
    }

    /// Whether the flow's entry for the other direction exists.
    fn has_reverse(&self, guest: &FlowTuple, flow: FlowRef) -> bool {
        let slot = flow.index();
        self.guest_tuple(slot) != *guest || self.flow_by(&self.world_tuple(slot)) == Some(flow)
    }

    /// Whether the removal of an entry leaves a live flow with its guest's tuple only.
    fn leaves_forward(&self, removed: &FlowTuple, flow: FlowRef) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        let slot = self.slot(flow.index());
        let live = slot.verdict().load(Relaxed) != 0
            && slot.generation().load(Relaxed) == flow.generation
            && self.world_tuple(flow.index()) == *removed;
        live && self.flow_by(&self.guest_tuple(flow.index())) == Some(flow)
    }

    fn take_fault(fault: &mut u32) -> bool {
        let due = *fault > 0;
        *fault = fault.saturating_sub(1);
        due
    }
}

/// Engine side of the port.
#[derive(Clone, Debug)]
pub struct FakePort {
    kernel: KernelHandle,
    /// A descriptor without events, of a port that has more to do after each reading.
    unready: Option<Rc<File>>,
    readings: u32,
}

impl FakePort {
    /// The port of this kernel.
    pub fn new(kernel: &KernelHandle) -> Self {
        Self {
            kernel: kernel.clone(),
            unready: None,
            readings: 0,
        }
    }

    /// From now on there is more to do after each reading, and the descriptor has no event that says so,
    /// as with a port of user mode.
    pub fn has_more_without_events(&mut self) {
        let unready = File::open("/dev/null").expect("every Linux has it");
        self.unready = Some(Rc::new(unready));
    }

    /// How often it was read.
    pub fn readings(&self) -> u32 {
        self.readings
    }
}

impl FrameIo for FakePort {
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()> {
        self.readings += 1;
        while !batch.is_full() {
            let Some(frame) = self.kernel.borrow_mut().queue.pop_front() else {
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
        let mut kernel = self.kernel.borrow_mut();
        if Kernel::take_fault(&mut kernel.faults.port_refuses) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let is_order =
            Frame::parse(frame).is_some_and(|frame| frame.header.code == Command::Open as u8);
        let is_lost = is_order && Kernel::take_fault(&mut kernel.faults.orders_lost);
        if is_lost {
            frame.clone_into(&mut kernel.lost_order);
        } else if !kernel.faults.port_ignores {
            frame.clone_into(&mut kernel.last_written);
            kernel.engine_port(frame);
        }
        Ok(())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.unready.as_ref().map(|unready| unready.as_fd())
    }

    fn set(&self) -> Option<Rc<Epoll>> {
        None
    }

    fn on_ready(&mut self, _: u32, _: EpollFlags) {}

    fn next_deadline_ns(&self) -> Option<u64> {
        None
    }

    fn rest(&mut self) -> bool {
        false
    }

    fn room(&mut self) -> usize {
        usize::MAX
    }

    fn has_more(&self) -> bool {
        self.unready.is_some()
    }
}

/// Clock that the test sets by [`Kernel::now_ns`], so that both sides have the same time.
#[derive(Clone, Debug)]
pub struct FakeClock {
    kernel: KernelHandle,
    slept_ns: Rc<Cell<u64>>,
}

impl FakeClock {
    /// The clock of this kernel.
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
