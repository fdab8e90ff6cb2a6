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
    net::{Ipv4Addr, SocketAddrV4, SocketAddrV6},
    path::Path,
};

use anyhow::{Result, ensure};
use serde::Serialize;
use slipgate_abi::{Command, PortHeader, Protocol};
use slipgate_control::Program;
use slipgate_testbed::{
    NetNs, PinDir,
    frame::{FrameBuilder, tcp_flags},
};

use self::rig::{Flow, GUEST, GUEST_MAC, GUEST6, REMOTE, REMOTE6, ROUTER_MAC, ROW, Rig, VM};
use crate::{
    family::{Families, Family},
    guest_frames::{Kind, frame6},
    statistics::{Summary, percentile},
};

/// Place of the hop limit in an IPv6 frame.
const HOP_LIMIT_AT: usize = 14 + 7;
/// A frame starts with TTL 255 and stays on the fast path this many times.
const REPEAT: u32 = 250;
/// Number of frames per measurement.
const FRAMES: usize = 1_000;
const FIRST_PORT: u16 = 1_000;
const FIRST_REMOTE_PORT: u16 = 443;
/// Programs whose hits are measured.
const HIT_PROGRAMS: [Program; 2] = [Program::GuestEgress, Program::UplinkIngress];

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
pub(crate) fn measure(families: Families, rounds: usize) -> Result<Vec<Cost>> {
    let mut costs = Vec::new();
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        for flows in [FEW, MANY] {
            for family in Family::ALL {
                if families.includes(family) {
                    let way = (family, protocol);
                    costs.extend(in_namespace(|rig| hits(rig, way, flows, rounds))?);
                }
            }
        }
    }
    if families.includes(Family::Ipv6) {
        costs.extend(in_namespace(|rig| misses6(rig, rounds))?);
    }
    if families.includes(Family::Ipv4) {
        costs.extend(in_namespace(|rig| the_rest(rig, rounds))?);
    }
    Ok(costs)
}

/// Names of the metrics of [`of_running`].
pub(crate) const HIT_METRICS: [&str; 4] = [
    "guest_egress UDP hit",
    "uplink_ingress UDP hit",
    "guest_egress TCP hit",
    "uplink_ingress TCP hit",
];

/// The same of IPv6.
pub(crate) const HIT_METRICS6: [&str; 4] = [
    "guest_egress UDP hit IPv6",
    "uplink_ingress UDP hit IPv6",
    "guest_egress TCP hit IPv6",
    "uplink_ingress TCP hit IPv6",
];

/// Costs of the programs that a running slipgate has pinned.
pub(crate) struct Hits {
    /// Tags of the programs at the hooks, in the order of [`HIT_METRICS`].
    pub(crate) tags: Vec<String>,
    /// Each metric's value, ns over an empty run.
    pub(crate) costs: Vec<(&'static str, f64)>,
}

/// Measures the costs. Must be called in the network namespace of that slipgate.
pub(crate) fn of_running(pins: &Path, family: Family) -> Result<Hits> {
    const TIMES: usize = 9;
    let names = family.of(HIT_METRICS, HIT_METRICS6);
    let (mut tags, mut costs) = (Vec::new(), Vec::new());
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        let mut rig = Rig::of_pinned(pins)?;
        // The last ones: engines begin with the first.
        let last = rig.slots() - u32::from(FEW.len);
        let way = (family, protocol);
        let starts = admit_rings(&mut rig, way, FEW, Place::from_slot(last))?;
        let enough = FRAMES.div_ceil(starts.len());
        let starts = starts.repeat(enough);
        for program in HIT_PROGRAMS {
            let frames = frames(&starts[..FRAMES / 10], program, way);
            // The median, for what interrupts one of them is nobody's cost.
            let measured = hits_of(&rig, program, &frames, TIMES)?;
            costs.push((names[costs.len()], percentile(&measured, 50.0)));
            tags.push(rig.tag(program)?);
        }
    }
    Ok(Hits { tags, costs })
}

/// Measures hits of the programs that a running slipgate has pinned, with each of these numbers of
/// flows in ascending order, at random over all of them. Returns the costs of `guest_egress` and of
/// `uplink_ingress` for each. Must be called in its network namespace; the flows are taken out again.
pub(crate) fn at_sizes(pins: &Path, family: Family, sizes: &[usize]) -> Result<Vec<[f64; 2]>> {
    const TIMES: usize = 7;
    const LONGEST: usize = 50_000;
    let way = (family, Protocol::Udp);
    let mut rig = Rig::of_pinned(pins)?;
    let (mut starts, mut costs) = (Vec::new(), Vec::new());
    let mut place = Place {
        // From the end: engines begin with the first.
        first_slot: rig.slots() - sizes.last().copied().unwrap_or_default() as u32,
        first_remote_port: FIRST_REMOTE_PORT,
    };
    let mut random = Random::new(3);
    for &size in sizes {
        let more = size - starts.len();
        let rings = more.div_ceil(LONGEST);
        let flows = Flows {
            what: "",
            rings: rings as u16,
            len: (more / rings) as u16,
        };
        let new = admit_rings(&mut rig, way, flows, place)?;
        place.first_slot += new.len() as u32;
        place.first_remote_port += flows.rings;
        starts.extend(new);
        random.shuffle(&mut starts);
        let mut of_size = [0.0; 2];
        for (cost, program) in of_size.iter_mut().zip(HIT_PROGRAMS) {
            let before = rig.translated();
            let mut measured = Vec::new();
            for chosen in starts.chunks(FRAMES).cycle().take(TIMES) {
                let frames = frames(chosen, program, way);
                measured.extend(mean_hits(&rig, program, &frames, 1)?);
            }
            expect_hits(&rig, program, before, TIMES * FRAMES * REPEAT as usize)?;
            *cost = percentile(&measured, 50.0);
        }
        costs.push(of_size);
    }
    Ok(costs)
}

/// Runs `f` on freshly loaded programs, and removes the pins afterwards.
fn in_namespace<T: Send>(f: impl FnOnce(&mut Rig) -> Result<T> + Send) -> Result<T> {
    let (ns, pins) = (NetNs::new("programs")?, PinDir::new()?);
    ns.run(|| {
        let mut rig = Rig::load(pins.path())?;
        f(&mut rig)
    })
}

fn hits(rig: &mut Rig, way: Way, flows: Flows, rounds: usize) -> Result<Vec<Cost>> {
    let starts = admit_rings(rig, way, flows, Place::from_slot(0))?;
    let starts = starts.repeat(FRAMES.div_ceil(starts.len()));
    let mut costs = Vec::new();
    for program in HIT_PROGRAMS {
        let frames = frames(&starts[..FRAMES], program, way);
        let measured = hits_of(rig, program, &frames, rounds)?;
        costs.extend(cost(program, name_of(way), flows.what, &measured));
    }
    Ok(costs)
}

/// A family, and a protocol in it.
type Way = (Family, Protocol);

fn name_of((family, protocol): Way) -> &'static str {
    match (family, protocol) {
        (Family::Ipv4, protocol) => protocol.name(),
        (Family::Ipv6, Protocol::Tcp) => "tcp6",
        (Family::Ipv6, _) => "udp6",
    }
}

/// Measures misses of IPv6.
fn misses6(rig: &mut Rig, rounds: usize) -> Result<Vec<Cost>> {
    let way = (Family::Ipv6, Protocol::Udp);
    let mut costs = Vec::new();
    for (program, what) in [
        (Program::GuestEgress, "miss: handed to the engine"),
        (Program::UplinkIngress, "miss: left to the host"),
    ] {
        let frame = frame(program, way, FIRST_PORT, 443);
        let measured = runs_of(rig, program, &frame, rounds)?;
        costs.extend(cost(program, name_of(way), what, &measured));
    }
    Ok(costs)
}

/// Measures misses, the engine's port, and the guard.
fn the_rest(rig: &mut Rig, rounds: usize) -> Result<Vec<Cost>> {
    let protocol = Protocol::Udp;
    let way = (Family::Ipv4, protocol);
    let mut costs = Vec::new();
    for (program, what) in [
        (Program::GuestEgress, "miss: handed to the engine"),
        (Program::UplinkIngress, "miss: left to the host"),
        (Program::UplinkIngressL3, "miss: left to the host"),
        (Program::Guard, "pass"),
    ] {
        let frame = frame(program, way, FIRST_PORT, 443);
        let measured = runs_of(rig, program, &frame, rounds)?;
        costs.extend(cost(program, protocol.name(), what, &measured));
    }
    rig.deny(denied())?;
    let passing = frame(Program::Guard, way, FIRST_PORT, 443);
    let measured = runs_of(rig, Program::Guard, &passing, rounds)?;
    let what = "pass, 1,000 prefixes denied";
    costs.extend(cost(Program::Guard, protocol.name(), what, &measured));
    rig.admit(Flow {
        family: Family::Ipv4,
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
    let mut forwarded = frame(Program::GuestEgress, way, FIRST_PORT, 443);
    forwarded[..PortHeader::LEN].copy_from_slice(&header.encode());
    let received = frame(Program::UplinkIngressL3, way, FIRST_PORT, 443);
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
    let measured = mean_hits(rig, program, frames, times)?;
    expect_hits(rig, program, before, times * frames.len() * REPEAT as usize)?;
    Ok(measured)
}

/// As the checked measurement, but the runs' results are not compared.
fn mean_hits(rig: &Rig, program: Program, frames: &[Vec<u8>], times: usize) -> Result<Vec<f64>> {
    let mean = || {
        mean_of(
            frames
                .iter()
                .map(|frame| rig.run_ns(program, frame, REPEAT)),
        )
    };
    let over_empty = |_| Ok(mean()? - rig.empty_run_ns(10_000)?);
    (0..times).map(over_empty).collect()
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
    (family, protocol): Way,
    flows: Flows,
    place: Place,
) -> Result<Vec<(u16, u16)>> {
    let Place {
        first_slot,
        first_remote_port,
    } = place;
    let mut random = Random::new(1);
    let mut ports: Vec<u16> = (0..flows.len).map(|port| FIRST_PORT + port).collect();
    random.shuffle(&mut ports);
    let count = u32::from(flows.rings) * u32::from(flows.len);
    let mut slots: Vec<u32> = (first_slot..first_slot + count).collect();
    random.shuffle(&mut slots);
    let mut starts = Vec::new();
    for remote_port in (first_remote_port..).take(usize::from(flows.rings)) {
        for (at, &guest_port) in ports.iter().enumerate() {
            rig.admit(Flow {
                family,
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
    Ok(starts)
}

/// Where rings of flows begin.
#[derive(Clone, Copy)]
struct Place {
    first_slot: u32,
    first_remote_port: u16,
}

impl Place {
    fn from_slot(first_slot: u32) -> Self {
        Self {
            first_slot,
            first_remote_port: FIRST_REMOTE_PORT,
        }
    }
}

fn frames(starts: &[(u16, u16)], program: Program, way: Way) -> Vec<Vec<u8>> {
    let frame = |&(port, remote_port): &(u16, u16)| frame(program, way, port, remote_port);
    starts.iter().map(frame).collect()
}

/// Returns a flow's frame in the form in which `program` receives it, with TTL 255.
fn frame(program: Program, way: Way, port: u16, remote_port: u16) -> Vec<u8> {
    let (family, protocol) = way;
    if family == Family::Ipv6 {
        return frame_of_ipv6(program, protocol, port, remote_port);
    }
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

fn frame_of_ipv6(program: Program, protocol: Protocol, port: u16, remote_port: u16) -> Vec<u8> {
    const FIRST_FLAGS: usize = 14 + 40 + 13;
    let guest = SocketAddrV6::new(GUEST6, port, 0, 0);
    let remote = SocketAddrV6::new(REMOTE6, remote_port, 0, 0);
    let from_guest = matches!(program, Program::GuestEgress);
    let (macs, source, destination) = match from_guest {
        true => ((GUEST_MAC, rig::GATEWAY_MAC), guest, remote),
        false => ((ROUTER_MAC, [0; 6]), remote, guest),
    };
    let kind = match protocol {
        Protocol::Tcp => Kind::Syn(0),
        _ => Kind::Udp(&[0x5a; 22]),
    };
    let mut frame = frame6(macs, source, destination, kind);
    frame[HOP_LIMIT_AT] = 255;
    if protocol == Protocol::Tcp {
        // An established connection's. Nobody looks at the checksum here.
        frame[FIRST_FLAGS] = tcp_flags::ACK;
    }
    frame
}

/// xorshift generator. Its quality does not affect the measurement.
pub(crate) struct Random(u64);

impl Random {
    /// Starts a sequence; the seed must not be 0.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}
