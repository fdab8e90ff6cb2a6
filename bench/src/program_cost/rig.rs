//! The loaded programs, one VM, and flows in the maps.

use std::{
    net::Ipv4Addr,
    os::fd::{AsRawFd, BorrowedFd},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use slipgate_abi::{FlowRef, NextHop, Protocol, Slot, TapEntry, Verdict, Vm, tcp::TcpBits};
use slipgate_control::{Datapath, LoadOptions, Paths, Program, maps::Insert};

pub(super) const ROW: u32 = 3;
pub(super) const VM: u32 = 77;
/// Loopback: the device that a test run's frames come in by.
const DEVICE: u32 = 1;
const HOP: u32 = 5;
const SLOTS: u32 = 131_072;
/// Also the address that its flows are translated to, so that they form rings.
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// A test run of a bare IP packet takes the EtherType from its 13th and 14th byte, the first half
/// of the source address: 8.0 is IPv4's.
pub(super) const REMOTE: Ipv4Addr = Ipv4Addr::new(8, 0, 8, 8);
pub(super) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
pub(super) const GATEWAY_MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];
pub(super) const ROUTER_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 9, 9, 9];
const UPLINK_MAC: [u8; 6] = [0x00, 0x16, 0x3e, 1, 1, 1];

/// A flow of the VM to [`REMOTE`].
pub(super) struct Flow {
    pub(super) slot: u32,
    pub(super) protocol: Protocol,
    pub(super) guest_port: u16,
    pub(super) nat_port: u16,
    pub(super) remote_port: u16,
}

pub(super) struct Rig {
    datapath: Datapath,
}

impl Rig {
    /// Loads the programs in this thread's network namespace, with one VM and no flow.
    pub(super) fn load(pins: &Path) -> Result<Rig> {
        let datapath = Datapath::open(&LoadOptions {
            paths: Paths::with_pin_dir(pins.to_owned())?,
            slots: SLOTS,
            bpf_log: false,
        })?;
        let maps = datapath.maps();
        let row = maps.vm(ROW).context("VMS has no such row")?;
        let hop = maps
            .next_hop(HOP)
            .context("NEXT_HOPS has no such element")?;
        // SAFETY: both point to mapped elements, and nobody else has these maps.
        unsafe {
            row.as_ptr().write(vm());
            hop.as_ptr().write(next_hop());
        }
        let tap = TapEntry {
            vm: VM,
            vm_row: ROW,
        };
        maps.taps.insert(&DEVICE, &tap, Insert::New)?;
        Ok(Rig { datapath })
    }

    /// Puts a flow into its slot and both tuples into `FLOWS`.
    pub(super) fn admit(&mut self, flow: Flow) -> Result<()> {
        let maps = self.datapath.maps();
        let slot = maps.slot(flow.slot).context("SLOTS has no such element")?;
        // SAFETY: it points to a mapped element that no program uses yet.
        unsafe { slot.as_ptr().write(filled(&flow)) };
        let entry = FlowRef {
            slot: flow.slot,
            generation: 1,
        };
        maps.flows
            .insert(&slot.world_tuple(), &entry, Insert::New)?;
        maps.flows
            .insert(&slot.guest_tuple(), &entry, Insert::New)?;
        Ok(())
    }

    /// Packets that were translated so far.
    pub(super) fn translated(&self) -> u64 {
        let maps = self.datapath.maps();
        let slots = (0..maps.slots()).filter_map(|index| maps.slot(index));
        // SAFETY: mapped elements; the programs run on this thread only.
        let slots = slots.map(|slot| unsafe { slot.as_ptr().read_volatile() });
        slots.map(|slot| slot.tx_packets + slot.rx_packets).sum()
    }

    /// Mean time of a run of nearly nothing, ns: ARP on the uplink, which is left to the host.
    pub(super) fn empty_run_ns(&self, repeat: u32) -> Result<f64> {
        let mut arp = [0; 64];
        arp[12..14].copy_from_slice(&[8, 6]);
        self.run_ns(Program::UplinkIngress, &arp, repeat)
    }

    /// Mean time of a run of `program` on `frame`, each on what the run before left, ns.
    pub(super) fn run_ns(&self, program: Program, frame: &[u8], repeat: u32) -> Result<f64> {
        let fd = self.datapath.program(program)?;
        test_run(fd, frame, repeat).with_context(|| format!("PROG_TEST_RUN of {}", program.name()))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // The pins are the caller's; the locks beside them are nobody's any more.
        let _ = std::fs::remove_dir_all(&self.datapath.paths().run_dir);
    }
}

/// The part of `union bpf_attr` that BPF_PROG_TEST_RUN reads (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

const BPF_PROG_TEST_RUN: libc::c_long = 10;

fn test_run(program: BorrowedFd<'_>, frame: &[u8], repeat: u32) -> Result<f64> {
    let mut run = TestRun {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_in: frame.as_ptr() as u64,
        repeat,
        ..TestRun::default()
    };
    // SAFETY: the attribute is writable for its size, and the frame readable for its length; no
    // output buffer is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_TEST_RUN,
            &raw mut run,
            size_of::<TestRun>(),
        )
    };
    ensure!(done == 0, "{}", std::io::Error::last_os_error());
    Ok(f64::from(run.duration))
}

fn vm() -> Vm {
    Vm {
        id: VM,
        owner: 0,
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
        policy: 6,
        prefix_len: 24,
        pad0: 0,
        handed_over: 0,
        taken_in: 0,
        arp_answered: 0,
        guard_window_ns: 0,
        guard_passed: 0,
        pad1: [0; 24],
        name: [0; 64],
    }
}

fn next_hop() -> NextHop {
    NextHop {
        valid: 1,
        ifindex: DEVICE,
        mtu: 1500,
        flags: 0,
        neighbour_mac: ROUTER_MAC,
        uplink_mac: UPLINK_MAC,
        neighbour: Ipv4Addr::new(192, 0, 2, 1).into(),
        owner: 1,
        pad: [0; 28],
    }
}

fn filled(flow: &Flow) -> Slot {
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
        guest: GUEST.into(),
        remote: REMOTE.into(),
        nat: GUEST.into(),
        guest_port: flow.guest_port,
        remote_port: flow.remote_port,
        nat_port: flow.nat_port,
        protocol: flow.protocol,
        flags: 0,
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
