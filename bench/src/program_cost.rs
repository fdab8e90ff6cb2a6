//! Cost of a packet in each BPF program, measured by PROG_TEST_RUN on the real object and maps,
//! with flows inserted into the maps.
//!
//! A repeated test run works on the frame as the previous run left it. So flows form a ring: the
//! port that one translates to is the one that the next translates from, addresses stay, and only
//! the TTL ends it. A ring of two stays in the cache; one over 100,000 flows in random order does
//! not. `engine_port` turns its header into MAC addresses and `uplink_ingress_l3` puts an Ethernet
//! header in front, so there each run is a system call of its own, and its time includes cold
//! caches.

mod rig;

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    path::Path,
};

use anyhow::{Result, ensure};
use serde::Serialize;
use slipgate_abi::{Command, PortHeader, Protocol};
use slipgate_control::Program;
use slipgate_testbed::{NetNs, PinDir, frame::FrameBuilder};

use self::rig::{Flow, GUEST, GUEST_MAC, REMOTE, ROUTER_MAC, ROW, Rig, VM};
use crate::statistics::{Summary, percentile};

/// A frame starts with TTL 255 and stays on the fast path this many times.
const REPEAT: u32 = 250;
/// Number of frames per measurement.
const FRAMES: usize = 1_000;
const FIRST_PORT: u16 = 1_000;

/// Cost of one program in one case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) program: &'static str,
    pub(crate) protocol: &'static str,
    pub(crate) what: &'static str,
    /// Time above that of an empty run, ns.
    pub(crate) ns: Summary,
}

/// Number of flows, as rings of a given length.
#[derive(Clone, Copy)]
struct Flows {
    what: &'static str,
    rings: u16,
    len: u16,
}

const FEW: Flows = Flows {
    what: "hit, 2 flows in turn",
    rings: 1,
    len: 2,
};
const MANY: Flows = Flows {
    what: "hit, 100,000 flows at random",
    rings: 2,
    len: 50_000,
};

/// Measures all programs, `rounds` times.
pub(crate) fn measure(rounds: usize) -> Result<Vec<Cost>> {
    let mut costs = Vec::new();
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        for flows in [FEW, MANY] {
            costs.extend(in_namespace(|rig| hits(rig, protocol, flows, rounds))?);
        }
    }
    costs.extend(in_namespace(|rig| the_rest(rig, rounds))?);
    Ok(costs)
}

/// Names of the metrics of [`of_running`].
pub(crate) const HIT_METRICS: [&str; 4] = [
    "guest_egress UDP hit",
    "uplink_ingress UDP hit",
    "guest_egress TCP hit",
    "uplink_ingress TCP hit",
];

/// Costs of the programs that a running slipgate has pinned.
pub(crate) struct Hits {
    /// Tags of the programs, in the order of [`HIT_METRICS`].
    pub(crate) tags: Vec<String>,
    /// Each metric's value, ns over an empty run.
    pub(crate) costs: Vec<(&'static str, f64)>,
}

/// Measures the costs. Must be called in the network namespace of that slipgate.
pub(crate) fn of_running(pins: &Path) -> Result<Hits> {
    const TIMES: usize = 9;
    let (mut tags, mut costs) = (Vec::new(), Vec::new());
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        let mut rig = Rig::of_pinned(pins)?;
        // The last ones: engines begin with the first.
        let last = rig.slots() - u32::from(FEW.len);
        let starts = admit_rings(&mut rig, protocol, FEW, last)?;
        for program in [Program::GuestEgress, Program::UplinkIngress] {
            let frames = frames(&starts[..FRAMES / 10], program, protocol);
            // The median, for what interrupts one of them is nobody's cost.
            let measured = hits_of(&rig, program, &frames, TIMES)?;
            costs.push((HIT_METRICS[costs.len()], percentile(&measured, 50.0)));
            tags.push(rig.tag(program)?);
        }
    }
    Ok(Hits { tags, costs })
}

/// Runs `f` on freshly loaded programs, and removes the pins afterwards.
fn in_namespace<T: Send>(f: impl FnOnce(&mut Rig) -> Result<T> + Send) -> Result<T> {
    let (ns, pins) = (NetNs::new("programs")?, PinDir::new()?);
    ns.run(|| {
        let mut rig = Rig::load(pins.path())?;
        f(&mut rig)
    })
}

fn hits(rig: &mut Rig, protocol: Protocol, flows: Flows, rounds: usize) -> Result<Vec<Cost>> {
    let starts = admit_rings(rig, protocol, flows, 0)?;
    let mut costs = Vec::new();
    for program in [Program::GuestEgress, Program::UplinkIngress] {
        let frames = frames(&starts[..FRAMES], program, protocol);
        let measured = hits_of(rig, program, &frames, rounds)?;
        costs.extend(cost(program, protocol.name(), flows.what, &measured));
    }
    Ok(costs)
}

/// Measures misses, the engine's port, and the guard.
fn the_rest(rig: &mut Rig, rounds: usize) -> Result<Vec<Cost>> {
    let protocol = Protocol::Udp;
    let mut costs = Vec::new();
    for (program, what) in [
        (Program::GuestEgress, "miss: handed to the engine"),
        (Program::UplinkIngress, "miss: left to the host"),
        (Program::UplinkIngressL3, "miss: left to the host"),
        (Program::Guard, "pass"),
    ] {
        let frame = frame(program, protocol, FIRST_PORT, 443);
        let measured = runs_of(rig, program, &frame, rounds)?;
        costs.extend(cost(program, protocol.name(), what, &measured));
    }
    rig.deny(denied())?;
    let passing = frame(Program::Guard, protocol, FIRST_PORT, 443);
    let measured = runs_of(rig, Program::Guard, &passing, rounds)?;
    let what = "pass, 1,000 prefixes denied";
    costs.extend(cost(Program::Guard, protocol.name(), what, &measured));
    rig.admit(Flow {
        slot: 0,
        protocol,
        guest_port: FIRST_PORT,
        nat_port: FIRST_PORT,
        remote_port: 443,
    })?;
    let header = PortHeader {
        code: Command::Forward as u8,
        flags: 0,
        vm_row: ROW as u16,
        id: VM,
    };
    let mut forwarded = frame(Program::GuestEgress, protocol, FIRST_PORT, 443);
    forwarded[..PortHeader::LEN].copy_from_slice(&header.encode());
    let received = frame(Program::UplinkIngressL3, protocol, FIRST_PORT, 443);
    for (program, frame, what) in [
        (Program::UplinkIngressL3, received, "hit, single runs"),
        (Program::EnginePort, forwarded, "forward, single runs"),
    ] {
        let measured = single_hits(rig, program, &frame, rounds)?;
        costs.extend(cost(program, protocol.name(), what, &measured));
    }
    Ok(costs)
}

/// Returns networks around the remote address that do not contain it.
fn denied() -> impl Iterator<Item = (Ipv4Addr, u32)> {
    let network = |i: u32| (Ipv4Addr::from_bits((8 << 24) + ((i + 1) << 14)), 18);
    (0..1_000).map(network)
}

fn single_hits(rig: &Rig, program: Program, frame: &[u8], rounds: usize) -> Result<Vec<f64>> {
    const RUNS: usize = 10_000;
    let before = rig.translated();
    let measured: Result<Vec<f64>> = (0..rounds)
        .map(|_| {
            let base = mean_of((0..RUNS).map(|_| rig.empty_run_ns(1)))?;
            Ok(mean_of((0..RUNS).map(|_| rig.run_ns(program, frame, 1)))? - base)
        })
        .collect();
    expect_hits(rig, program, before, rounds * RUNS)?;
    measured
}

/// Returns mean times of hits on these frames, over an empty run, ns.
fn hits_of(rig: &Rig, program: Program, frames: &[Vec<u8>], times: usize) -> Result<Vec<f64>> {
    let before = rig.translated();
    let mean = || {
        mean_of(
            frames
                .iter()
                .map(|frame| rig.run_ns(program, frame, REPEAT)),
        )
    };
    let over_empty = |_| Ok(mean()? - rig.empty_run_ns(10_000)?);
    let measured = (0..times).map(over_empty).collect();
    expect_hits(rig, program, before, times * frames.len() * REPEAT as usize)?;
    measured
}

/// Returns mean times of runs on one frame, over an empty run, ns.
fn runs_of(rig: &Rig, program: Program, frame: &[u8], times: usize) -> Result<Vec<f64>> {
    const RUNS: u32 = 200_000;
    let over_empty = |_| Ok(rig.run_ns(program, frame, RUNS)? - rig.empty_run_ns(RUNS)?);
    (0..times).map(over_empty).collect()
}

/// Checks that every run translated a packet.
///
/// # Errors
/// One did not, so something else was measured.
fn expect_hits(rig: &Rig, program: Program, before: u64, runs: usize) -> Result<()> {
    let hits = rig.translated() - before;
    let name = program.name();
    ensure!(hits == runs as u64, "{name}: {hits} hits in {runs} runs");
    Ok(())
}

fn cost(
    program: Program,
    protocol: &'static str,
    what: &'static str,
    measured: &[f64],
) -> Option<Cost> {
    Some(Cost {
        program: program.name(),
        protocol,
        what,
        ns: Summary::of(measured)?,
    })
}

fn mean_of(times: impl ExactSizeIterator<Item = Result<f64>>) -> Result<f64> {
    let count = times.len() as f64;
    let sum: Result<f64> = times.sum();
    Ok(sum? / count)
}

/// Inserts rings of flows, one per remote port, into slots from `first_slot` on. Returns the guest
/// port and remote port at which each ring begins, shuffled.
fn admit_rings(
    rig: &mut Rig,
    protocol: Protocol,
    flows: Flows,
    first_slot: u32,
) -> Result<Vec<(u16, u16)>> {
    let mut random = Random(1);
    let mut ports: Vec<u16> = (0..flows.len).map(|port| FIRST_PORT + port).collect();
    random.shuffle(&mut ports);
    let count = u32::from(flows.rings) * u32::from(flows.len);
    let mut slots: Vec<u32> = (first_slot..first_slot + count).collect();
    random.shuffle(&mut slots);
    let mut starts = Vec::new();
    for remote_port in (443..).take(usize::from(flows.rings)) {
        for (at, &guest_port) in ports.iter().enumerate() {
            rig.admit(Flow {
                slot: slots[starts.len()],
                protocol,
                guest_port,
                nat_port: ports[(at + 1) % ports.len()],
                remote_port,
            })?;
            starts.push((guest_port, remote_port));
        }
    }
    random.shuffle(&mut starts);
    let enough = FRAMES.div_ceil(starts.len());
    Ok(starts.repeat(enough))
}

fn frames(starts: &[(u16, u16)], program: Program, protocol: Protocol) -> Vec<Vec<u8>> {
    let frame = |&(port, remote_port): &(u16, u16)| frame(program, protocol, port, remote_port);
    starts.iter().map(frame).collect()
}

/// Returns a flow's frame in the form in which `program` receives it, with TTL 255.
fn frame(program: Program, protocol: Protocol, port: u16, remote_port: u16) -> Vec<u8> {
    let (guest, remote) = (
        SocketAddrV4::new(GUEST, port),
        SocketAddrV4::new(REMOTE, remote_port),
    );
    let from_guest = matches!(program, Program::GuestEgress | Program::Guard);
    let (source, destination) = match from_guest {
        true => (guest, remote),
        false => (remote, guest),
    };
    // A test run's device is loopback, whose address is zero: so it is a frame for this host.
    let macs = match from_guest {
        true => (GUEST_MAC, rig::GATEWAY_MAC),
        false => (ROUTER_MAC, [0; 6]),
    };
    let builder = match protocol {
        Protocol::Tcp => FrameBuilder::tcp(source, destination),
        _ => FrameBuilder::udp(source, destination),
    };
    let builder = builder.ttl(255).payload(&[0x5a; 22]);
    match program {
        Program::UplinkIngressL3 => builder.build_ip(),
        _ => builder.macs(macs.0, macs.1).build().1,
    }
}

/// xorshift generator. Its quality does not affect the measurement.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}
