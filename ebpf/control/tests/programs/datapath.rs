//! The loaded object, its maps, and a VM with flows in them.
use std::net::{Ipv4Addr, Ipv6Addr};

use aya::{
    Ebpf, TestRun, TestRunOptions,
    maps::{HashMap, LpmTrie, lpm_trie::Key},
    programs::{SchedClassifier, Xdp},
};
use slipgate_abi::{
    Addresses6, DropCounters, FlowRef, ForwardKey, ForwardKey6, ForwardTarget, NextHop, Protocol,
    RateLimits, Sequences, SequencesRef, Slot, SlotRef, TapEntry, Tuple, Verdict, Vm, Vm6,
    forward::{DenyKey, DenyKey6},
    maps::Owner,
    tcp::TcpBits,
};

use crate::mapped::Mapped;

/// Row of the VM under test.
pub(crate) const ROW: u32 = 3;
/// Row of the process that serves the VM under test.
pub(crate) const OWNER: u32 = 2;
/// Id of the VM under test.
pub(crate) const VM: u32 = 77;
/// Ifindex of loopback, the device on which a test run's frames arrive.
pub(crate) const TAP: u32 = 1;
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
pub(crate) const NAT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Remote address. It begins with the octets of the IPv4 EtherType, because a test run takes an L3
/// packet's type from there.
pub(crate) const REMOTE: Ipv4Addr = Ipv4Addr::new(8, 0, 8, 8);
pub(crate) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
pub(crate) const GATEWAY_MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];
pub(crate) const ROUTER_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 9, 9, 9];
pub(crate) const UPLINK_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 1, 1, 1];
/// MAC address of loopback, so that a test run's frame counts as one for this host.
pub(crate) const HOST_MAC: [u8; 6] = [0; 6];
pub(crate) const HOP: u32 = 5;
pub(crate) const ISN: u32 = 0x1234_5678;
pub(crate) const MTU: u32 = 1500;

/// `TC_ACT_SHOT`: the packet was dropped.
pub(crate) const SHOT: i32 = 2;
/// `TC_ACT_REDIRECT`: the packet was redirected to a device.
pub(crate) const REDIRECT: i32 = 7;
/// `TC_ACT_UNSPEC`: the packet is left to the host.
pub(crate) const UNSPEC: i32 = -1;

/// A flow to be put into the maps.
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    pub(crate) slot: u32,
    pub(crate) protocol: Protocol,
    pub(crate) guest_port: u16,
    pub(crate) nat: Ipv4Addr,
    pub(crate) nat_port: u16,
    pub(crate) remote: Ipv4Addr,
    pub(crate) remote_port: u16,
    pub(crate) verdict: Verdict,
    pub(crate) tcp: u32,
    pub(crate) flags: u8,
    pub(crate) next_hop: u32,
}

impl Flow {
    pub(crate) fn new(protocol: Protocol) -> Self {
        Self {
            slot: 9,
            protocol,
            guest_port: 40_000,
            nat: NAT,
            nat_port: 61_001,
            remote: REMOTE,
            remote_port: if protocol == Protocol::Icmp { 0 } else { 443 },
            verdict: Verdict::Fast,
            tcp: if protocol == Protocol::Tcp {
                TcpBits::SYN_TX | TcpBits::SYN_RX
            } else {
                0
            },
            flags: 0,
            next_hop: HOP,
        }
    }
}

/// Result of a program's run on a frame.
#[derive(Debug, PartialEq, Eq, Clone)]
pub(crate) struct Run {
    pub(crate) action: i32,
    pub(crate) frame: Vec<u8>,
}

/// The loaded object with its maps.
pub(crate) struct Loaded {
    pub(crate) ebpf: Ebpf,
    pub(crate) slots: Mapped<Slot>,
    pub(crate) sequences: Mapped<Sequences>,
    pub(crate) addresses6: Mapped<Addresses6>,
    pub(crate) vms: Mapped<Vm>,
    pub(crate) vms6: Mapped<Vm6>,
    pub(crate) owners: Mapped<Owner>,
    pub(crate) drops: Mapped<DropCounters>,
    pub(crate) hops: Mapped<NextHop>,
    pub(crate) rates: Mapped<RateLimits>,
    /// Uplink of the flows that are admitted.
    pub(crate) uplink: u32,
}

/// A row of `VMS` for the VM under test.
pub(crate) fn vm() -> Vm {
    Vm {
        id: VM,
        owner: OWNER,
        tap_ifindex: TAP,
        port_ifindex: TAP,
        guest: GUEST.into(),
        gateway: GATEWAY.into(),
        guest_mac: GUEST_MAC,
        gateway_mac: GATEWAY_MAC,
        flags: 0,
        mtu: MTU,
        credits: 64,
        policy: 6,
        prefix_len: 24,
        world_credits: 64,
        handed_over: 0,
        taken_in: 0,
        arp_answered: 0,
        guard_window_ns: 0,
        guard_passed: 0,
        world_handed_over: 0,
        world_taken_in: 0,
        foreign_mac: [0; 6],
        pad: [0; 2],
        name: [0; 64],
    }
}

/// A row of `OWNERS` whose VMs have no limit but their own.
pub(crate) fn owner() -> Owner {
    Owner {
        common: u32::MAX,
        ..Owner::default()
    }
}

/// A valid next hop with an L2 header.
pub(crate) fn next_hop() -> NextHop {
    NextHop {
        sequence: 1,
        ifindex: TAP,
        mtu: MTU,
        flags: 0,
        neighbour_mac: ROUTER_MAC,
        uplink_mac: UPLINK_MAC,
        neighbour: Ipv4Addr::new(192, 0, 2, 1).into(),
        owner: 1,
        route_mtu: 0,
        neighbour6: slipgate_abi::Ip6::UNSPECIFIED,
        pad: [0; 8],
    }
}

/// A slot with a flow of the VM.
pub(crate) fn slot_of(flow: &Flow, generation: u32, uplink: u32) -> Slot {
    Slot {
        generation,
        verdict: flow.verdict,
        tcp: flow.tcp,
        next_hop: flow.next_hop,
        tx_packets: 0,
        tx_bytes: 0,
        rx_packets: 0,
        rx_bytes: 0,
        tx_last_ns: 0,
        rx_last_ns: 0,
        vm: VM,
        vm_row: ROW as u16,
        guest: GUEST.into(),
        remote: flow.remote.into(),
        nat: flow.nat.into(),
        guest_port: flow.guest_port,
        remote_port: flow.remote_port,
        nat_port: flow.nat_port,
        protocol: flow.protocol,
        flags: flow.flags,
        isn: ISN,
        created_ns: 1,
        rule: 0,
        uplink_ifindex: uplink,
        owner: 0,
        epoch: 1,
        fin_end_tx: 0,
        fin_end_rx: 0,
        connect_us: 0,
    }
}

impl Loaded {
    pub(crate) fn set_tap(&mut self, ifindex: u32, vm: u32, vm_row: u32) {
        let mut taps = HashMap::<_, u32, TapEntry>::try_from(self.ebpf.map_mut("TAPS").unwrap())
            .expect("TAPS");
        taps.insert(ifindex, TapEntry { vm, vm_row }, 0)
            .expect("insert TAPS");
    }

    pub(crate) fn flows(&mut self) -> HashMap<&mut aya::maps::MapData, Tuple, FlowRef> {
        HashMap::try_from(self.ebpf.map_mut("FLOWS").unwrap()).expect("FLOWS")
    }

    /// Adds a port of the host (address, port, protocol) that leads to a VM in [`ROW`] (id, port).
    pub(crate) fn forward(
        &mut self,
        (host, port, protocol): (Ipv4Addr, u16, Protocol),
        (vm, guest_port): (u32, u16),
    ) {
        let key = ForwardKey::new(host.into(), port, protocol as u8);
        let target = ForwardTarget {
            vm,
            vm_row: ROW,
            guest_port,
            pad: [0; 6],
        };
        HashMap::<_, ForwardKey, ForwardTarget>::try_from(self.ebpf.map_mut("FORWARDS").unwrap())
            .expect("FORWARDS")
            .insert(key, target, 0)
            .expect("insert FORWARDS");
    }

    /// The same for IPv6.
    pub(crate) fn forward6(
        &mut self,
        (host, port, protocol): (Ipv6Addr, u16, Protocol),
        to: (u32, u16),
    ) {
        self.forward6_of((host, port, protocol as u8), to);
    }

    /// The same of a key with any number of a protocol.
    pub(crate) fn forward6_of(
        &mut self,
        (host, port, protocol): (Ipv6Addr, u16, u8),
        (vm, guest_port): (u32, u16),
    ) {
        let key = ForwardKey6::new(host.into(), port, protocol);
        let target = ForwardTarget {
            vm,
            vm_row: ROW,
            guest_port,
            pad: [0; 6],
        };
        HashMap::<_, ForwardKey6, ForwardTarget>::try_from(self.ebpf.map_mut("FORWARDS6").unwrap())
            .expect("FORWARDS6")
            .insert(key, target, 0)
            .expect("insert FORWARDS6");
    }

    pub(crate) fn deny(&mut self, prefix_len: u32, remote: Ipv4Addr) {
        let key = DenyKey {
            policy: 6u32.to_be_bytes(),
            remote: remote.into(),
        };
        LpmTrie::<_, DenyKey, u32>::try_from(self.ebpf.map_mut("DENY").unwrap())
            .expect("DENY")
            .insert(&Key::new(32 + prefix_len, key), 1, 0)
            .expect("insert DENY");
    }

    pub(crate) fn deny6(&mut self, prefix_len: u32, remote: Ipv6Addr) {
        let key = DenyKey6 {
            policy: 6u32.to_be_bytes(),
            remote: remote.octets(),
        };
        LpmTrie::<_, DenyKey6, u32>::try_from(self.ebpf.map_mut("DENY6").unwrap())
            .expect("DENY6")
            .insert(&Key::new(32 + prefix_len, key), 1, 0)
            .expect("insert DENY6");
    }

    /// Puts a flow of the VM into its slot and both tuples into `FLOWS`.
    pub(crate) fn admit(&mut self, flow: Flow) -> SlotRef {
        let generation = self.slots.get(flow.slot).generation + 1;
        let slot = self.fill(flow, generation);
        let entry = FlowRef {
            slot: flow.slot,
            generation,
        };
        let mut flows = self.flows();
        flows.insert(slot.world_tuple(), entry, 1).expect("world");
        flows.insert(slot.guest_tuple(), entry, 1).expect("guest");
        slot
    }

    /// Puts a flow of the VM into its slot.
    pub(crate) fn fill(&self, flow: Flow, generation: u32) -> SlotRef {
        self.slots
            .set(flow.slot, slot_of(&flow, generation, self.uplink));
        self.slot(flow.slot)
    }

    pub(crate) fn slot(&self, index: u32) -> SlotRef {
        // SAFETY: the mapping lives as long as the datapath, and tests keep it until their end.
        unsafe { SlotRef::new(self.slots.at(index)) }
    }

    /// Returns the sequence-space state of a slot's connection.
    pub(crate) fn sequences(&self, index: u32) -> SequencesRef {
        // SAFETY: as above.
        unsafe { SequencesRef::new(self.sequences.at(index)) }
    }

    /// Runs a TC program on a frame.
    pub(crate) fn run(&self, program: &str, frame: &[u8]) -> Run {
        self.run_gso(program, frame, 0)
    }

    /// Runs a TC program on a GSO frame.
    pub(crate) fn run_gso(&self, program: &str, frame: &[u8], gso_size: u32) -> Run {
        run_program(self.classifier(program), frame, gso_size)
    }

    /// Returns a TC program, to be run from several threads.
    pub(crate) fn classifier(&self, program: &str) -> &SchedClassifier {
        self.ebpf.program(program).unwrap().try_into().unwrap()
    }

    /// Runs the XDP program. Returns whether it passed the frame.
    pub(crate) fn guard(&self, frame: &[u8]) -> bool {
        let options = TestRunOptions {
            data_in: Some(frame),
            ..TestRunOptions::default()
        };
        let program: &Xdp = self.ebpf.program("guard").unwrap().try_into().unwrap();
        match program.test_run(options).expect("test run").return_value {
            2 => true,
            1 => false,
            other => panic!("guard returned {other}"),
        }
    }
}

/// Offset of `gso_size` in `__sk_buff`.
const GSO_SIZE: usize = 176;

/// Runs a TC program on a frame.
pub(crate) fn run_program(program: &SchedClassifier, frame: &[u8], gso_size: u32) -> Run {
    let mut context = [0u8; 192];
    context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&gso_size.to_ne_bytes());
    let mut out = vec![0; frame.len() + 64];
    let options = TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut out),
        ctx_in: (gso_size != 0).then_some(&context[..]),
        ..TestRunOptions::default()
    };
    let result = program.test_run(options).expect("test run");
    out.truncate(result.data_size_out as usize);
    Run {
        action: result.return_value as i32,
        frame: out,
    }
}
