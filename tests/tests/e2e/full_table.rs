//! The readers of the tables where these are large. What they cost is a measurement, of the binary that
//! `SLIPGATE_BIN` names (docs/performance.md, "A million flows").
use std::{
    io::{BufRead as _, BufReader},
    mem::{self, MaybeUninit},
    net::{Ipv6Addr, SocketAddr},
    process::Stdio,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use slipgate_abi::{
    Addresses6, Ip4, Ip6, Protocol, Slot, SlotIndex, Verdict, VmRow, maps::SLOTS_PER_CHUNK,
    slot::SlotFlags,
};
use slipgate_control::SharedMaps;
use slipgate_testbed::require_root_and_tun;

use crate::{
    Cell, Stand,
    matrix::{GUEST6, cells, matrix},
    stand::maps,
};

matrix! {
    flows_whose_reader_leaves_after_a_line_end_in_silence: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "a flow is a socket there, and a process may not have the ten thousand of this test; the command is the same";
}

/// Room for two million flows, as in the workload `scale`.
const SLOTS: &str = "2097152";
/// Rows of `OWNERS` that no process has, so that no engine ends these flows.
const OWNERS: std::ops::Range<u32> = 40..60;
const COUNTS: [usize; 2] = [1_000, 1_000_000];
const ROUNDS: usize = 5;

/// CPU time of all children that have ended.
fn children_time() -> Duration {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: it is filled in; zeros are valid as well.
    let usage = unsafe {
        assert_eq!(
            libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()),
            0
        );
        usage.assume_init()
    };
    let us = [usage.ru_utime, usage.ru_stime].map(|time| time.tv_sec * 1_000_000 + time.tv_usec);
    Duration::from_micros(us.iter().sum::<i64>() as u64)
}

/// Slots of chunks that the test has claimed, so that no engine ends the flows in them.
struct Filled {
    stand: Stand,
    maps: SharedMaps,
    slots: Vec<u32>,
    /// The stand's VM: its row and its id.
    vm: (u16, u32),
    live: usize,
}

impl Filled {
    /// Claims room for as many flows.
    fn room_for(cell: Cell, most: usize) -> Self {
        let stand = Stand::of(cell, &["--flow-table", SLOTS]);
        let maps = maps(stand.slipgate.pins());
        let mut slots = Vec::new();
        for owner in OWNERS {
            while slots.len() < most
                && let Some((chunk, _)) = maps.claim_chunk(owner, 0)
            {
                assert_eq!(chunk.len(), SLOTS_PER_CHUNK as usize);
                slots.extend(chunk);
            }
        }
        assert!(slots.len() >= most);
        let id = |row: u16| {
            let vm = maps.vm(VmRow::new(row));
            vm.map_or(0, |vm| vm.id().load(Relaxed))
        };
        let row = (0..8).find(|row| id(*row) != 0).expect("the stand's VM");
        Self {
            vm: (row, id(row)),
            stand,
            maps,
            slots,
            live: 0,
        }
    }

    /// Adds flows up to this number.
    fn fill(&mut self, count: usize) {
        for (at, index) in self.slots.iter().enumerate().take(count).skip(self.live) {
            let index = SlotIndex::new(*index);
            let slot = self.maps.slot(index).unwrap();
            let mut flow = flow(at as u32, self.vm.0, self.vm.1);
            if self.stand.cell.is_ipv6() {
                let addresses = self.maps.addresses6(index).unwrap();
                addresses.set(take_addresses(&mut flow));
            }
            // SAFETY: an element of SLOTS, of a chunk that is this test's.
            unsafe { slot.as_ptr().write(flow) };
        }
        self.live = count;
    }
}

/// `slipgate flows | head -1`, where the rest is more than a pipe holds.
fn flows_whose_reader_leaves_after_a_line_end_in_silence(cell: Cell) {
    const FLOWS: usize = 10_000;
    let mut filled = Filled::room_for(cell, FLOWS);
    filled.fill(FLOWS);
    let stand = &filled.stand;
    for (args, first) in [
        (&["flows"][..], "ID "),
        (&["flows", "--json"], "[\n"),
        (&["flows", "--sort", "vm"], "ID "),
        (&["flows", "--watch"], "ID "),
    ] {
        let mut command = stand.slipgate.command(args).unwrap();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = stand.world.host.spawn(command).unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        drop(out);
        let ended = child.wait_with_output().unwrap();
        assert!(line.starts_with(first), "{args:?}: {line:?}");
        assert!(ended.status.success(), "{args:?}: {ended:?}");
        assert!(ended.stderr.is_empty(), "{args:?}: {ended:?}");
    }
    // One that stays gets all of them.
    let all = stand.slipgate.run(&["flows"]).unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&all).lines().count(), FLOWS + 1);
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), FLOWS);
    let guests = flows.iter().map(|flow| flow.guest.parse::<SocketAddr>());
    assert!(
        guests
            .into_iter()
            .all(|guest| guest.unwrap().ip() == cell.guest())
    );
}

#[test]
#[ignore = "a measurement"]
fn measure_readers_of_a_full_table() {
    require_root_and_tun!();
    let mut filled = Filled::room_for(cells::hybrid_ipv4, COUNTS[1]);
    for count in COUNTS {
        filled.fill(count);
        let stand = &filled.stand;
        for args in [
            &["flows"][..],
            &["flows", "--json"],
            &["flows", "--sort", "bytes"],
            &["stats"],
        ] {
            let mut cpu = Vec::new();
            let mut wall = Vec::new();
            for _ in 0..ROUNDS {
                let mut command = stand.slipgate.command(args).unwrap();
                command.stdout(Stdio::null());
                let (before, start) = (children_time(), Instant::now());
                let mut child = stand.world.host.spawn(command).unwrap();
                assert!(child.wait().unwrap().success());
                wall.push(start.elapsed());
                cpu.push(children_time() - before);
            }
            cpu.sort();
            wall.sort();
            println!("{count} flows, {args:?}: CPU {cpu:?}, by the clock {wall:?}");
        }
    }
}

fn flow(number: u32, vm_row: u16, vm: u32) -> Slot {
    let [_, a, b, c] = number.to_be_bytes();
    Slot {
        generation: 1,
        verdict: Verdict::Fast,
        protocol: Protocol::Udp,
        tcp: 0,
        next_hop: 0,
        tx_packets: 1 + u64::from(number),
        tx_bytes: 50 * (1 + u64::from(number)),
        rx_packets: 7,
        rx_bytes: 3_000_000_000,
        tx_last_ns: 1_000_000_000,
        rx_last_ns: 2_000_000_000,
        vm,
        vm_row,
        guest: Ip4 {
            octets: [10, 0, 2, 15],
        },
        guest_port: 10_000 + (number % 50_000) as u16,
        remote: Ip4 {
            octets: [198, a, b, c],
        },
        remote_port: 4_433,
        nat: Ip4 {
            octets: [203, 0, 113, 1],
        },
        nat_port: 61_000 + (number % 4_000) as u16,
        flags: 0,
        isn: 0,
        created_ns: 500_000_000,
        rule: 0,
        uplink_ifindex: 2,
        owner: OWNERS.start as u16,
        connect_us: 0,
        fin_end_tx: 0,
        fin_end_rx: 0,
        epoch: 1,
    }
}

/// Makes the flow one of IPv6. Returns its addresses, which are beside the slot.
fn take_addresses(flow: &mut Slot) -> Addresses6 {
    flow.flags |= SlotFlags::IPV6;
    flow.guest = Ip4::UNSPECIFIED;
    let taken = |address: &mut Ip4| -> Ip6 {
        let [a, b, c, d] = mem::take(address).octets.map(u16::from);
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, a, b, c, d).into()
    };
    Addresses6 {
        guest: GUEST6.into(),
        remote: taken(&mut flow.remote),
        nat: taken(&mut flow.nat),
        pad: [0; 16],
    }
}
