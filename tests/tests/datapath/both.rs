//! The BPF programs and the in-memory kernel side by side, with equal tables.
use std::{
    cell::RefMut,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::BorrowedFd,
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use slipgate_abi::{
    Addresses6, DropCounters, FlowRef, ForwardKey, ForwardKey6, ForwardTarget, NextHop, Protocol,
    Sequences, Slot, SlotIndex, SlotRef, TapEntry, Tuple, Verdict, Vm, Vm6, VmRates, VmRow,
    first_packet::place,
    maps::{Owner, SLOTS_PER_CHUNK},
    segment::Segments,
    vm6::GUEST_ADDRESSES,
};
use slipgate_control::{
    Datapath, LoadOptions, Paths, Program, Sizes,
    maps::{Insert, SharedMaps},
};
use slipgate_testbed::{PinDir, test_run::test_run};
use userspace_nat::{
    datapath::Tables,
    fake::{FakeDatapath, Handling, Kernel, KernelHandle},
    port::VirtioNetHdr,
};

pub(crate) const ROW: u16 = 3;
pub(crate) const VM: u32 = 77;
pub(crate) const HOP: u32 = 5;
/// Loopback: the device that a test run's frames come in by, and all that they are sent to.
pub(crate) const DEVICE: u32 = 1;
/// MTU of the loopback device.
const DEVICE_MTU: u32 = 65_536;
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
pub(crate) const NAT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Begins with the octets of IPv4's EtherType: a test run takes a bare packet's type from there.
pub(crate) const REMOTE: Ipv4Addr = Ipv4Addr::new(8, 0, 8, 8);
pub(crate) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
pub(crate) const GATEWAY_MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];
pub(crate) const FORWARDED_PORT: u16 = 8_080;
/// The flows' slots: one for each protocol.
pub(crate) const FLOWS: [(SlotIndex, Protocol); 3] = [
    (SlotIndex::new(1), Protocol::Tcp),
    (SlotIndex::new(2), Protocol::Udp),
    (SlotIndex::new(3), Protocol::Icmp),
];
/// The slots of the flows of IPv6.
pub(crate) const FLOWS6: [(SlotIndex, Protocol); 3] = [
    (SlotIndex::new(4), Protocol::Tcp),
    (SlotIndex::new(5), Protocol::Udp),
    (SlotIndex::new(6), Protocol::Icmpv6),
];
pub(crate) const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0);
pub(crate) const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1);
pub(crate) const GATEWAY_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5055, 0xff, 0xfe00, 2);
pub(crate) const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0x5054, 0xff, 0xfe01, 3);
pub(crate) const GUEST_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe01, 3);
pub(crate) const NAT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 9);
/// Has IPv6's EtherType where a test run takes a bare packet's type from.
pub(crate) const REMOTE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 0x53);
const ADDRESSES6: Addresses6 = Addresses6 {
    guest: slipgate_abi::Ip6 {
        octets: GUEST6.octets(),
    },
    remote: slipgate_abi::Ip6 {
        octets: REMOTE6.octets(),
    },
    nat: slipgate_abi::Ip6 {
        octets: NAT6.octets(),
    },
    pad: [0; 16],
};
pub(crate) const GUEST_PORT: u16 = 40_000;
pub(crate) const NAT_PORT: u16 = 61_001;
pub(crate) const GENERATION: u32 = 4;

const SHOT: i32 = 2;
const REDIRECT: i32 = 7;
const UNSPEC: i32 = -1;

/// The remote port of a flow.
pub(crate) fn remote_port(protocol: Protocol) -> u16 {
    match protocol {
        Protocol::Icmp | Protocol::Icmpv6 => 0,
        Protocol::Tcp | Protocol::Udp => 443,
    }
}

/// Program that a frame is given to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum At {
    Guest,
    Uplink,
    UplinkWithoutL2,
    EnginePort,
}

impl At {
    fn program(self) -> Program {
        match self {
            Self::Guest => Program::GuestEgress,
            Self::Uplink => Program::UplinkIngress,
            Self::UplinkWithoutL2 => Program::UplinkIngressL3,
            Self::EnginePort => Program::EnginePort,
        }
    }
}

/// Where a frame went, and as what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Went {
    Dropped,
    LeftToTheHost,
    /// On, or to the engine.
    Sent(Vec<u8>),
    /// To the engine by its ring of first packets, as a frame of the port.
    Queued(Vec<u8>),
}

/// State of the tables that packets change. Of times, only whether there is one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Counted {
    drops: [DropCounters; 2],
    flows: Vec<FlowCounted>,
    /// Handed over from the guest and the world, gateway ARP answered, the guest's MAC.
    vm: (u64, u64, u64, [u8; 6]),
    /// Handed over of all VMs from the guests and the world, and first packets by the port.
    of_all_vms: [u64; 3],
    /// Solicitations answered, and which addresses were noted as used.
    of_ipv6: (u64, [bool; GUEST_ADDRESSES]),
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct FlowCounted {
    tcp: u32,
    tx: Segments,
    rx: Segments,
    has_times: [bool; 3],
    order: u32,
    fin_ends: [u32; 2],
    sequences: Sequences,
}

/// State of a flow before a packet comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowState {
    pub(crate) verdict: u32,
    pub(crate) generation_is_the_entrys: bool,
    pub(crate) tcp: u32,
    pub(crate) flags: u8,
    pub(crate) next_hop: u32,
    pub(crate) isn: u32,
    pub(crate) fin_ends: [u32; 2],
    /// Admitted now; else long ago.
    pub(crate) is_young: bool,
    /// State of an order to open the flow.
    pub(crate) order: u32,
    pub(crate) held: Option<Sequences>,
    /// Goes out by another uplink than the one that frames come in by.
    pub(crate) is_by_another_uplink: bool,
}

pub(crate) struct Both {
    real: Datapath,
    memory: KernelHandle,
    tables: FakeDatapath,
    /// A device that no frame comes in by.
    other_uplink: u32,
    _pins: PinDir,
}

impl Both {
    /// Loads both in this thread's network namespace.
    pub(crate) fn new(other_uplink: u32) -> Self {
        let pins = PinDir::new().expect("a directory for pins");
        let paths = Paths::with_pin_dir(pins.path().to_owned()).expect("paths");
        let options = LoadOptions {
            paths,
            sizes: Sizes::of_slots(SLOTS_PER_CHUNK),
            bpf_log: false,
            ipv6: true,
        };
        let real = Datapath::open(&options).expect("the programs are loaded");
        let mapped = real.maps().map_packets();
        mapped.expect("the rings of first packets");
        let memory = Kernel::new(SLOTS_PER_CHUNK);
        let tables = FakeDatapath::new(&memory, 0, 1);
        let mut both = Self {
            real,
            memory,
            tables,
            other_uplink,
            _pins: pins,
        };
        both.fill();
        both
    }

    fn fill(&mut self) {
        let maps = self.real.maps();
        let mut memory = self.memory.borrow_mut();
        memory.device_mtu = DEVICE_MTU;
        memory.uplink = DEVICE;
        memory.add_vm(ROW, VM, GUEST.into(), GATEWAY.into(), 1_500);
        let tap = TapEntry {
            vm: VM,
            vm_row: ROW.into(),
        };
        maps.taps.insert(&DEVICE, &tap, Insert::Any).expect("TAPS");
        let target = ForwardTarget {
            vm: VM,
            vm_row: ROW.into(),
            guest_port: 80,
            pad: [0; 6],
        };
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for host in [NAT, Ipv4Addr::UNSPECIFIED] {
                // One by its address, one of any address of the host's.
                let port = FORWARDED_PORT + u16::from(host.is_unspecified());
                let key = ForwardKey::new(host.into(), port, protocol as u8);
                let inserted = maps.forwards.insert(&key, &target, Insert::New);
                inserted.expect("FORWARDS");
                let key = (key.host, key.port, key.protocol);
                memory.forwards.insert(key, (ROW, VM));
            }
            for host in [NAT6, Ipv6Addr::UNSPECIFIED] {
                let port = FORWARDED_PORT + u16::from(host.is_unspecified());
                let key = ForwardKey6::new(host.into(), port, protocol as u8);
                let inserted = maps.forwards6.insert(&key, &target, Insert::New);
                inserted.expect("FORWARDS6");
                let key = (key.host, key.port, key.protocol);
                memory.forwards6.insert(key, (ROW, VM));
            }
        }
        // The network routes the guest's prefix to the host.
        let key = ForwardKey6::of_routed(GUEST6.into());
        let inserted = maps.forwards6.insert(&key, &target, Insert::New);
        inserted.expect("FORWARDS6");
        let key = (key.host, key.port, key.protocol);
        memory.forwards6.insert(key, (ROW, VM));
        drop(memory);
        for (index, protocol) in FLOWS {
            let mut slot = slot(protocol);
            // SAFETY: it points to the slot here, which outlives it.
            let live = unsafe { SlotRef::new(&raw mut slot) };
            let entry = FlowRef::new(index, GENERATION);
            for tuple in [live.world_tuple(), live.guest_tuple()] {
                self.insert(&tuple, entry);
            }
        }
        for (index, protocol) in FLOWS6 {
            let mut slot = slot(protocol);
            // SAFETY: as above.
            let live = unsafe { SlotRef::new(&raw mut slot) };
            let real = self.maps().addresses6(index).expect("an element");
            let memory = self.memory.borrow().addresses6(index);
            for addresses in [real, memory] {
                addresses.set(ADDRESSES6);
            }
            let entry = FlowRef::new(index, GENERATION);
            for tuple in [real.world_tuple(live), real.guest_tuple(live)] {
                let flows = &self.real.maps().flows6;
                flows.insert(&tuple, &entry, Insert::New).expect("FLOWS6");
                self.memory.borrow_mut().flows6.insert(tuple, entry);
            }
        }
    }

    fn insert(&self, tuple: &Tuple, entry: FlowRef) {
        let flows = &self.real.maps().flows;
        flows.insert(tuple, &entry, Insert::New).expect("FLOWS");
        self.memory.borrow_mut().flows.insert(*tuple, entry);
    }

    fn maps(&self) -> &SharedMaps {
        self.real.maps()
    }

    fn slots(&self, index: SlotIndex) -> [SlotRef; 2] {
        let real = self.maps().slot(index).expect("a slot");
        [real, self.memory.borrow().slot(index)]
    }

    /// Makes the VM's row this, but for what device it is behind.
    pub(crate) fn set_vm(&self, vm: Vm, has_tap: bool, has_port: bool) {
        let device = |has: bool, index: u32| if has { index } else { 0 };
        let real = self.maps().vm(VmRow::new(ROW)).expect("a row");
        let memory = self.memory.borrow();
        let [tap, port] = memory.devices_of(ROW);
        // SAFETY: rows that nobody else uses.
        unsafe {
            real.as_ptr().write_volatile(Vm {
                tap_ifindex: device(has_tap, DEVICE),
                port_ifindex: device(has_port, DEVICE),
                ..vm
            });
            memory.vm(ROW).as_ptr().write_volatile(Vm {
                tap_ifindex: device(has_tap, tap),
                port_ifindex: device(has_port, port),
                ..vm
            });
        }
    }

    /// Makes the VM's row of `VMS6` this.
    pub(crate) fn set_vm6(&self, vm: Vm6) {
        let real = self.maps().vm6(VmRow::new(ROW)).expect("a row");
        for row in [real, self.memory.borrow().vm6(ROW)] {
            // SAFETY: a row that nobody else uses.
            unsafe { row.as_ptr().write_volatile(vm) };
        }
    }

    /// Sets the row of the process that serves the VM.
    pub(crate) fn set_owner(&self, owner: Owner) {
        let real = self.maps().owner_ref(0).expect("a row");
        let memory = self.memory.borrow().owner_row(0);
        for row in [real, memory] {
            row.share().store(owner.share, Relaxed);
            row.common().store(owner.common, Relaxed);
            for (from_world, counts) in [
                (false, (owner.handed_over, owner.taken_in)),
                (true, (owner.world_handed_over, owner.world_taken_in)),
            ] {
                let (handed_over, taken_in) = row.under_way(from_world);
                handed_over.store(counts.0, Relaxed);
                taken_in.store(counts.1, Relaxed);
            }
            row.ring_open().store(owner.ring_open, Relaxed);
            row.ring_tail().store(owner.ring_tail, Relaxed);
            row.ring_head().store(owner.ring_head, Relaxed);
            row.port_handed().store(owner.port_handed, Relaxed);
            row.port_taken().store(owner.port_taken, Relaxed);
        }
    }

    /// Returns the number of the next packet in each ring.
    fn ring_tails(&self) -> [u64; 2] {
        let real = self.maps().owner_ref(0).expect("a row");
        let memory = self.memory.borrow().owner_row(0);
        [real, memory].map(|row| row.ring_tail().load(Relaxed))
    }

    /// Returns the packet with a number in one of the rings.
    fn queued(&self, which: usize, number: u64) -> Went {
        let index = place(0, number);
        let packet = match which {
            0 => self.maps().first_packet(index).expect("a place"),
            _ => self.memory.borrow().first_packet(index),
        };
        let mut frame = vec![0; 256];
        let (len, _) = packet.read(number, &mut frame).expect("it is published");
        frame.truncate(len);
        Went::Queued(frame)
    }

    /// Limits the VM, with nothing spent yet.
    pub(crate) fn set_rates(&self, rates: VmRates) {
        let limits = self.maps().rate_limits(VmRow::new(ROW)).expect("a row");
        let in_memory = self.tables.rates(VmRow::new(ROW)).expect("a row");
        for limits in [limits, in_memory] {
            limits.set(VmRates::default());
            limits.set(rates);
        }
    }

    /// Makes the next hop this.
    pub(crate) fn set_next_hop(&self, hop: NextHop) {
        let real = self.maps().next_hop(HOP).expect("an element");
        for element in [real, self.tables.next_hop(HOP).expect("an element")] {
            // SAFETY: an element that nobody else uses.
            unsafe { element.as_ptr().write_volatile(hop) };
        }
    }

    /// Makes a flow this, with nothing counted yet.
    pub(crate) fn set_flow(&self, index: SlotIndex, protocol: Protocol, state: &FlowState) {
        let stale = u32::from(!state.generation_is_the_entrys);
        let sequences = self.maps().sequences(index).expect("an element");
        let all = [sequences, self.memory.borrow().sequences(index)];
        for (live, sequences) in self.slots(index).into_iter().zip(all) {
            let slot = Slot {
                generation: GENERATION + stale,
                tcp: state.tcp,
                flags: state.flags,
                next_hop: state.next_hop,
                isn: state.isn,
                created_ns: if state.is_young { monotonic_ns() } else { 1 },
                fin_end_tx: state.fin_ends[0],
                fin_end_rx: state.fin_ends[1],
                connect_us: state.order,
                uplink_ifindex: match state.is_by_another_uplink {
                    true => self.other_uplink,
                    false => DEVICE,
                },
                ..slot(protocol)
            };
            // SAFETY: a slot that nobody else uses. What is no verdict is written as a number.
            unsafe { live.as_ptr().write_volatile(slot) };
            live.verdict()
                .store(state.verdict, std::sync::atomic::Ordering::Relaxed);
            if let Some(held) = state.held {
                sequences.hold(live, held);
            }
        }
    }

    /// Gives a frame to the BPF program and to the in-memory kernel; returns where it went in each,
    /// and the reason according to the latter.
    pub(crate) fn send(&self, at: At, frame: &[u8], gso_size: u32) -> ([Went; 2], Handling) {
        let program: BorrowedFd<'_> = self.real.program(at.program()).expect("a program");
        let vnet = VirtioNetHdr {
            gso_type: match gso_size {
                0 => VirtioNetHdr::GSO_NONE,
                _ => VirtioNetHdr::GSO_TCPV4,
            },
            gso_size: gso_size as u16,
            ..VirtioNetHdr::default()
        };
        let tails = self.ring_tails();
        let mut memory = self.memory.borrow_mut();
        memory.now_ns = monotonic_ns();
        let way = match at {
            At::Guest => memory.guest_sends_frame(ROW, vnet, frame),
            At::Uplink => memory.world_sends_frame(vnet, frame),
            At::UplinkWithoutL2 => {
                let ether_type = u16::from_be_bytes([frame[12], frame[13]]);
                memory.world_sends_bare(vnet, ether_type, frame)
            }
            At::EnginePort => memory.engine_sends_frame(vnet, frame),
        };
        let in_memory = went(&mut memory, way);
        drop(memory);
        let ran = test_run(program, frame, gso_size, 1).expect("a test run");
        let real = match ran.action {
            SHOT => Went::Dropped,
            UNSPEC => {
                assert_eq!(ran.frame, frame, "what is left to the host is as it came");
                Went::LeftToTheHost
            }
            REDIRECT => Went::Sent(ran.frame),
            other => panic!("the program returned {other}"),
        };
        let mut all = [real, in_memory];
        let after = self.ring_tails();
        for which in (0..2).filter(|which| after[*which] != tails[*which]) {
            all[which] = self.queued(which, tails[which]);
        }
        (all, way)
    }

    /// Returns the counters of each.
    pub(crate) fn counted(&self) -> [Counted; 2] {
        let maps = self.maps();
        let memory = self.memory.borrow();
        let real_drops = |row: u16| {
            let drops = maps.drops(VmRow::new(row)).expect("a row");
            // SAFETY: a mapped row; plain words.
            unsafe { drops.read_volatile() }
        };
        let memory_drops = |row: u16| memory.stats(row).snapshot().1;
        let drops = [
            [real_drops(0), real_drops(ROW)],
            [memory_drops(0), memory_drops(ROW)],
        ];
        let vms = [maps.vm(VmRow::new(ROW)).expect("a row"), memory.vm(ROW)];
        let vms6 = [maps.vm6(VmRow::new(ROW)).expect("a row"), memory.vm6(ROW)];
        let owners = [maps.owner_ref(0).expect("a row"), memory.owner_row(0)];
        [0, 1].map(|which| {
            let flow = |(index, _)| {
                let sequences = match which {
                    0 => maps.sequences(index).expect("an element"),
                    _ => memory.sequences(index),
                };
                let slot = match which {
                    0 => maps.slot(index).expect("a slot"),
                    _ => memory.slot(index),
                };
                flow_counted(slot, sequences.read())
            };
            // SAFETY: a live row; plain words.
            let vm = unsafe { vms[which].as_ptr().read_volatile() };
            Counted {
                drops: drops[which],
                flows: FLOWS.into_iter().chain(FLOWS6).map(flow).collect(),
                vm: (
                    vm.handed_over,
                    vm.world_handed_over,
                    vm.arp_answered,
                    vm.guest_mac,
                ),
                of_ipv6: {
                    let row = vms6[which].copy();
                    (row.neighbours_answered, row.used_ns.map(|ns| ns != 0))
                },
                of_all_vms: [
                    owners[which].handed_over(),
                    owners[which].world_handed_over(),
                    owners[which].port_handed(),
                ]
                .map(|count| count.load(Relaxed)),
            }
        })
    }

    /// Clears the drop counters.
    pub(crate) fn forget_drops(&self) {
        let memory = self.memory.borrow();
        for row in [0, ROW] {
            let drops = self.maps().drops(VmRow::new(row)).expect("a row");
            // SAFETY: rows that nobody else uses; zeroes are counts.
            unsafe { drops.write_bytes(0, 1) };
            memory.forget_drops(row);
        }
    }
}

fn went(memory: &mut RefMut<'_, Kernel>, way: Handling) -> Went {
    memory.queue.clear();
    memory.at_guest.clear();
    memory.at_world.clear();
    match way {
        Handling::Dropped(_) | Handling::Discarded => Went::Dropped,
        Handling::Passed => Went::LeftToTheHost,
        Handling::Fast | Handling::Engine(_) => Went::Sent(memory.last_sent.clone()),
    }
}

fn flow_counted(slot: SlotRef, sequences: Sequences) -> FlowCounted {
    let word =
        |cell: &std::sync::atomic::AtomicU32| cell.load(std::sync::atomic::Ordering::Relaxed);
    let long =
        |cell: &std::sync::atomic::AtomicU64| cell.load(std::sync::atomic::Ordering::Relaxed);
    // In a free slot the word of the time to connect is the state of an order.
    let is_live = word(slot.verdict()) != Verdict::Free as u32;
    FlowCounted {
        tcp: word(slot.tcp()),
        tx: Segments {
            packets: long(slot.tx_packets()),
            bytes: long(slot.tx_bytes()),
        },
        rx: Segments {
            packets: long(slot.rx_packets()),
            bytes: long(slot.rx_bytes()),
        },
        has_times: [
            long(slot.tx_last_ns()) != 0,
            long(slot.rx_last_ns()) != 0,
            is_live && word(slot.connect_us()) != 0,
        ],
        order: if is_live { 0 } else { word(slot.order()) },
        fin_ends: [slipgate_abi::Direction::Tx, slipgate_abi::Direction::Rx]
            .map(|direction| word(slot.fin_end(direction))),
        sequences: Sequences {
            server_seen: 0,
            ..sequences
        },
    }
}

/// A flow of the VM's, open.
fn slot(protocol: Protocol) -> Slot {
    Slot {
        generation: GENERATION,
        verdict: Verdict::Free,
        tcp: 0,
        next_hop: HOP,
        tx_packets: 0,
        tx_bytes: 0,
        rx_packets: 0,
        rx_bytes: 0,
        tx_last_ns: 0,
        rx_last_ns: 0,
        vm: VM,
        vm_row: ROW,
        guest: GUEST.into(),
        remote: REMOTE.into(),
        nat: NAT.into(),
        guest_port: GUEST_PORT,
        remote_port: remote_port(protocol),
        nat_port: NAT_PORT,
        protocol,
        flags: 0,
        isn: 0,
        created_ns: 1,
        rule: 0,
        uplink_ifindex: DEVICE,
        owner: 0,
        epoch: 1,
        fin_end_tx: 0,
        fin_end_rx: 0,
        connect_us: 0,
    }
}

/// The clock of the programs.
pub(crate) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: room for the answer; this clock does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let since_boot = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
    since_boot.as_nanos() as u64
}
