//! The loaded programs, one VM, and flows in the maps.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::Ordering::{Acquire, Release},
};

use anyhow::{Context, Result};
use slipgate_abi::{
    Addresses6, FlowRef, NextHop, Protocol, Slot, SlotIndex, SlotRef, TapEntry, Verdict, Vm, Vm6,
    VmRow,
    forward::DenyKey,
    maps::{DEFAULT_VMS, MAX_NEXT_HOPS, MAX_OWNERS},
    slot::SlotFlags,
    tcp::TcpBits,
    vm6::Vm6Flags,
};
use slipgate_control::{
    Datapath, LoadOptions, Paths, Program, SharedMaps, Sizes,
    maps::{DenyPrefix, Insert},
};
use slipgate_testbed::test_run::test_run;

use crate::family::Family;

/// Row of the VM: the last one, because a running slipgate uses rows from the first on.
pub(super) const ROW: u32 = DEFAULT_VMS;
pub(super) const VM: u32 = 0x7fff_0001;
const POLICY: u32 = 6;
/// Ifindex of loopback, the device on which a test run's frames arrive.
const DEVICE: u32 = 1;
const HOP: u32 = MAX_NEXT_HOPS - 1;
/// Row of `OWNERS` that the VM names.
const OWNER: u32 = MAX_OWNERS - 1;
const SLOTS: u32 = 131_072;
const PROGRAMS: [Program; 5] = [
    Program::GuestEgress,
    Program::UplinkIngress,
    Program::UplinkIngressL3,
    Program::EnginePort,
    Program::Guard,
];
/// Address of the guest, and also the address to which its flows are translated, so that they form
/// rings.
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Remote address. A test run of a bare IP packet takes the EtherType from the packet's 13th and
/// 14th byte, the first half of the source address: 8.0 is IPv4's.
pub(super) const REMOTE: Ipv4Addr = Ipv4Addr::new(8, 0, 8, 8);
/// The same of IPv6.
pub(super) const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 0x15);
const PREFIX6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 0);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 1);
const GATEWAY_LOCAL6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
pub(super) const REMOTE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);
pub(super) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
pub(super) const GATEWAY_MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];
pub(super) const ROUTER_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 9, 9, 9];
const UPLINK_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 1, 1, 1];

/// A flow of the VM to [`REMOTE`] or [`REMOTE6`].
pub(super) struct Flow {
    pub(super) family: Family,
    pub(super) slot: u32,
    pub(super) protocol: Protocol,
    pub(super) guest_port: u16,
    pub(super) nat_port: u16,
    pub(super) remote_port: u16,
}

pub(super) struct Rig {
    programs: Vec<(Program, OwnedFd)>,
    /// Slots of the added flows.
    added: Vec<(SlotIndex, SlotRef)>,
    maps: SharedMaps,
    /// Programs that the benchmark loaded itself; `None` when a running slipgate's are measured.
    own: Option<Datapath>,
}

impl Rig {
    /// Loads the programs in this thread's network namespace, with one VM and no flow.
    pub(super) fn load(pins: &Path) -> Result<Rig> {
        let datapath = Datapath::open(&LoadOptions {
            paths: Paths::with_pin_dir(pins.to_owned())?,
            sizes: Sizes::of_slots(SLOTS),
            bpf_log: false,
            ipv6: true,
        })?;
        let mut rig = Rig::of_pinned(pins)?;
        rig.own = Some(datapath);
        Ok(rig)
    }

    /// Uses the pinned programs and maps in a directory, with one additional VM. Dropping the rig
    /// removes the VM and its flows.
    pub(super) fn of_pinned(pins: &Path) -> Result<Rig> {
        let programs = PROGRAMS.map(|program| Ok((program, program.open_pinned(pins)?)));
        let maps = SharedMaps::open_pinned(pins)?;
        let vm_row = maps
            .vm(VmRow::new(ROW as u16))
            .context("no row for the VM")?;
        let hop = maps.next_hop(HOP).context("no element for a next hop")?;
        let owner = maps.owner_ref(OWNER).context("no row for the process")?;
        // Nobody takes in what is handed over.
        owner.common().store(u32::MAX, Release);
        let vm6_row = maps
            .vm6(VmRow::new(ROW as u16))
            .context("no IPv6 row for the VM")?;
        // SAFETY: rows and an element that nobody else uses.
        unsafe {
            vm6_row.as_ptr().write_volatile(vm6());
            vm_row.as_ptr().write_volatile(vm());
            hop.as_ptr().write_volatile(next_hop());
        }
        let tap = TapEntry {
            vm: VM,
            vm_row: ROW,
        };
        maps.taps.insert(&DEVICE, &tap, Insert::Any)?;
        Ok(Rig {
            programs: programs.into_iter().collect::<Result<_>>()?,
            added: Vec::new(),
            maps,
            own: None,
        })
    }

    /// Returns the tag of a program: a hash of its instructions, by the kernel.
    pub(super) fn tag(&self, program: Program) -> Result<String> {
        let path = format!("/proc/self/fdinfo/{}", self.program(program)?.as_raw_fd());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let tag = text.lines().find_map(|line| line.strip_prefix("prog_tag:"));
        Ok(tag.context("a program without a tag")?.trim().to_owned())
    }

    fn program(&self, program: Program) -> Result<BorrowedFd<'_>> {
        let found = self.programs.iter().find(|(known, _)| *known == program);
        let (_, fd) = found.with_context(|| format!("{} is not measured", program.name()))?;
        Ok(fd.as_fd())
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.maps.slots()
    }

    /// Adds prefixes to the guard's list, whose packets it drops whatever the VM's policy is.
    pub(super) fn deny(&self, prefixes: impl Iterator<Item = (Ipv4Addr, u32)>) -> Result<()> {
        let own = self.own.as_ref().context("programs of others")?;
        for (remote, len) in prefixes {
            let prefix = DenyPrefix {
                prefix_len: 32 + len,
                key: DenyKey {
                    policy: POLICY.to_be_bytes(),
                    remote: remote.into(),
                },
            };
            own.maps().deny.insert(&prefix, &0, Insert::New)?;
        }
        Ok(())
    }

    /// Puts a flow into its slot and both tuples into `FLOWS`.
    pub(super) fn admit(&mut self, flow: Flow) -> Result<()> {
        let slot = self
            .maps
            .slot(SlotIndex::new(flow.slot))
            .context("no such slot")?;
        // SAFETY: a slot that nobody else uses.
        unsafe { slot.as_ptr().write_volatile(filled(&flow)) };
        self.added.push((SlotIndex::new(flow.slot), slot));
        let entry = FlowRef {
            slot: flow.slot,
            generation: 1,
        };
        match flow.family {
            Family::Ipv4 => {
                for tuple in [slot.world_tuple(), slot.guest_tuple()] {
                    self.maps.flows.insert(&tuple, &entry, Insert::Any)?;
                }
            }
            Family::Ipv6 => {
                let index = SlotIndex::new(flow.slot);
                let addresses = self.maps.addresses6(index).context("no such addresses")?;
                addresses.set(Addresses6 {
                    guest: GUEST6.into(),
                    remote: REMOTE6.into(),
                    nat: GUEST6.into(),
                    pad: [0; 16],
                });
                for tuple in [addresses.world_tuple(slot), addresses.guest_tuple(slot)] {
                    self.maps.flows6.insert(&tuple, &entry, Insert::Any)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the number of packets translated so far.
    pub(super) fn translated(&self) -> u64 {
        let packets = |(_, slot): &(SlotIndex, SlotRef)| {
            slot.tx_packets().load(Acquire) + slot.rx_packets().load(Acquire)
        };
        self.added.iter().map(packets).sum()
    }

    /// Returns the mean time of a nearly empty run, ns: ARP on the uplink, which is left to the
    /// host.
    pub(super) fn empty_run_ns(&self, repeat: u32) -> Result<f64> {
        let mut arp = [0; 64];
        arp[12..14].copy_from_slice(&[8, 6]);
        self.run_ns(Program::UplinkIngress, &arp, repeat)
    }

    /// Returns the mean time of a run of `program` on `frame`, each on the result of the previous
    /// run, ns.
    pub(super) fn run_ns(&self, program: Program, frame: &[u8], repeat: u32) -> Result<f64> {
        let ran = test_run(self.program(program)?, frame, 0, repeat)
            .with_context(|| format!("PROG_TEST_RUN of {}", program.name()))?;
        Ok(f64::from(ran.mean_ns))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            // The pins are the caller's; the locks beside them are nobody's any more.
            let _ = std::fs::remove_dir_all(&own.paths().run_dir);
            return;
        }
        // As the others' maps were found, but for rows and slots that nobody else has.
        let _ = self.maps.taps.remove(&DEVICE);
        for (index, slot) in &self.added {
            match self.maps.addresses6(*index).filter(|_| slot.is_ipv6()) {
                Some(addresses) => {
                    for tuple in [addresses.world_tuple(*slot), addresses.guest_tuple(*slot)] {
                        let _ = self.maps.flows6.remove(&tuple);
                    }
                }
                None => {
                    for tuple in [slot.world_tuple(), slot.guest_tuple()] {
                        let _ = self.maps.flows.remove(&tuple);
                    }
                }
            }
            // A scan of the whole table must not find a flow there.
            slot.set_verdict(Verdict::Free);
        }
        if let Some(vm6) = self.maps.vm6(VmRow::new(ROW as u16)) {
            vm6.clear();
        }
    }
}

fn vm() -> Vm {
    Vm {
        id: VM,
        owner: OWNER,
        tap_ifindex: DEVICE,
        port_ifindex: DEVICE,
        guest: GUEST.into(),
        gateway: GATEWAY.into(),
        guest_mac: GUEST_MAC,
        gateway_mac: GATEWAY_MAC,
        flags: 0,
        mtu: 1500,
        // Nobody takes in what is handed over.
        credits: u32::MAX,
        policy: POLICY,
        prefix_len: 24,
        world_credits: u32::MAX,
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

fn vm6() -> Vm6 {
    let mut row = Vm6 {
        flags: Vm6Flags::ON,
        prefix: PREFIX6.into(),
        gateway: GATEWAY6.into(),
        gateway_local: GATEWAY_LOCAL6.into(),
        ..Vm6::OFF
    };
    row.guests[1] = GUEST6.into();
    row
}

fn next_hop() -> NextHop {
    NextHop {
        sequence: 1,
        ifindex: DEVICE,
        mtu: 1500,
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

fn filled(flow: &Flow) -> Slot {
    let of_ipv4 = |address: Ipv4Addr| flow.family.of(address, Ipv4Addr::UNSPECIFIED).into();
    Slot {
        generation: 1,
        verdict: Verdict::Fast,
        tcp: match flow.protocol {
            Protocol::Tcp => TcpBits::SYN_TX | TcpBits::SYN_RX,
            _ => 0,
        },
        next_hop: HOP,
        tx_packets: 0,
        tx_bytes: 0,
        rx_packets: 0,
        rx_bytes: 0,
        tx_last_ns: 0,
        rx_last_ns: 0,
        vm: VM,
        vm_row: ROW as u16,
        guest: of_ipv4(GUEST),
        remote: of_ipv4(REMOTE),
        nat: of_ipv4(GUEST),
        guest_port: flow.guest_port,
        remote_port: flow.remote_port,
        nat_port: flow.nat_port,
        protocol: flow.protocol,
        flags: flow.family.of(0, SlotFlags::IPV6),
        isn: 1,
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
