//! Many VMs on one host: the time to add each, the cost of all of them, and the admission of their
//! flows in spite of restarts, of each other, and by several engines.
//!
//! slipgate's daemon adds them by requests to its API, one after the other. The comparison is the
//! present practice with scripts: for each VM a network namespace with a masquerading uplink, and
//! three tc commands that connect its TAP to it (as `tc-redirect-tap` does). In both cases the TAPs
//! exist before. The other parts are about slipgate alone.

pub(crate) mod crowd;
pub(crate) mod daemon;
mod flood;
mod probes;
mod restart;
mod script;
mod workers;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use slipgate_testbed::{NetNs, World};

use crate::{
    contender::world,
    results::{Cell, Table, tables},
    run::Settings,
    statistics::percentile,
    workload::{Measured, Sample, Unit},
};

/// Name of all parts, as in `--only`.
pub(crate) const FLEET: &str = "fleet";
const ADD: &str = "fleet-add";
const RESTARTS: &str = "fleet-restart";
const FLOOD: &str = "fleet-flood";
const WORKERS: &str = "fleet-workers";
/// Names of the parts.
pub(crate) const PARTS: [&str; 4] = [ADD, RESTARTS, FLOOD, WORKERS];

/// Number of VMs in a full run.
const VMS: usize = 1_000;
/// Number of VMs in a quick run.
const FEW_VMS: usize = 100;

pub(crate) const ADD_P50: &str = "fleet add p50";
pub(crate) const ADD_P99: &str = "fleet add p99";
pub(crate) const ADD_ALL: &str = "fleet 1,000 added";
pub(crate) const REMOVE_ALL: &str = "fleet 1,000 removed";
pub(crate) const MEMORY: &str = "fleet memory";
pub(crate) const IDLE: &str = "fleet idle";
pub(crate) const LINK_EVENT: &str = "fleet link event";
pub(crate) const RESTART: &str = "fleet restart with flows";
pub(crate) const WORST_AFTER_RESTART: &str = "fleet worst first packet after it";
pub(crate) const WORST_UNDER_EVENTS: &str = "fleet worst first packet, 20 link events/s";
pub(crate) const KILLED: &str = "fleet engine killed";
pub(crate) const KILLED_FULL: &str = "fleet engine killed with flows";
const NEW_FLOW_P50: &str = "fleet new flow p50";
pub(crate) const NEW_FLOW_P99: &str = "fleet new flow p99";
pub(crate) const PER_ENGINE: &str = "fleet new flows per CPU second of each engine";

/// States that are compared with that of the contender [`daemon::NAME`].
pub(crate) const NO_FLOOD: &str = "no flood";
const UNSERVED_FLOOD: &str = "flood unserved";
pub(crate) const ONE_ENGINE: &str = "one engine";

/// Each part's metrics, in the order of the report.
pub(crate) const MEASURED: [Measured; 4] = [
    (
        ADD,
        &[
            Unit::Microseconds.of(ADD_P50),
            Unit::Microseconds.of(ADD_P99),
            Unit::Milliseconds.of(ADD_ALL),
            Unit::Milliseconds.of(REMOVE_ALL),
            Unit::Mebibytes.of(MEMORY),
            Unit::PercentOfACore.of(IDLE),
            Unit::Microseconds.of(LINK_EVENT),
        ],
    ),
    (
        RESTARTS,
        &[
            Unit::Milliseconds.of(RESTART),
            Unit::Milliseconds.of(WORST_AFTER_RESTART),
            Unit::Milliseconds.of(WORST_UNDER_EVENTS),
            Unit::Milliseconds.of(KILLED),
            Unit::Milliseconds.of(KILLED_FULL),
        ],
    ),
    (
        FLOOD,
        &[
            Unit::Microseconds.of(NEW_FLOW_P50),
            Unit::Microseconds.of(NEW_FLOW_P99),
        ],
    ),
    (WORKERS, &[Unit::ThousandPerSecond.of(PER_ENGINE)]),
];

/// Contenders of each part; the ratios are to the first.
const CONTENDERS: [&[&str]; 4] = [
    &[script::NAME, daemon::NAME],
    &[daemon::NAME],
    &[NO_FLOOD, UNSERVED_FLOOD, daemon::NAME],
    &[ONE_ENGINE, daemon::NAME],
];

/// A way to serve many VMs.
trait Fleet {
    /// Adds a VM that reaches the world.
    fn add(&mut self, host: &NetNs, tap: &str) -> Result<()>;
    /// Removes the VM of this TAP.
    fn remove(&mut self, host: &NetNs, tap: &str) -> Result<()>;
    /// Returns the cost of the serving processes while all VMs exist.
    fn cost(&self, host: &NetNs) -> Result<Sample>;
}

/// Measures the wanted parts. Returns the cells and their tables.
pub(crate) fn measure(
    settings: &Settings,
    quick: bool,
    wanted: impl Fn(&str) -> bool,
) -> (Vec<Cell>, Vec<Table>) {
    let mut cells = Vec::new();
    for round in 1..=settings.rounds.min(3) {
        for part in PARTS.into_iter().filter(|part| wanted(part)) {
            for (contender, outcome) in one_round(part, settings, quick) {
                cells.push(Cell::of(round, contender, part, outcome));
            }
        }
    }
    let of_part = |(measured, contenders): (&Measured, &&[&'static str])| {
        tables(&[*measured], contenders, contenders[0], &cells)
    };
    let all = MEASURED.iter().zip(&CONTENDERS);
    let all = all.filter(|((part, _), _)| wanted(part));
    let tables = all.flat_map(of_part).collect();
    (cells, tables)
}

/// Measures a part once. Returns the outcome of each contender.
fn one_round(part: &str, settings: &Settings, quick: bool) -> Vec<(&'static str, Result<Sample>)> {
    match part {
        ADD => {
            let vms = if quick { FEW_VMS } else { VMS };
            let slipgate =
                daemon::Daemon::start().and_then(|(world, fleet)| run(&world, fleet, vms));
            let script = || {
                let world = World::with(world(true))?;
                // A tenth of them: each takes as long as the one before.
                run(&world, script::Script::default(), vms / 10)
            };
            vec![(daemon::NAME, slipgate), (script::NAME, script())]
        }
        RESTARTS => vec![(daemon::NAME, restart::measure(quick, settings.pinning))],
        FLOOD => match flood::measure(quick, settings) {
            Ok(all) => all.map(|(name, sample)| (name, Ok(sample))).into(),
            Err(why) => vec![(daemon::NAME, Err(why))],
        },
        _ => {
            let limit = settings.limits.short;
            let measure = |workers| workers::measure(workers, limit);
            vec![(ONE_ENGINE, measure(1)), (daemon::NAME, measure(2))]
        }
    }
}

fn run(world: &World, mut fleet: impl Fleet, vms: usize) -> Result<Sample> {
    let taps: Vec<String> = (0..vms).map(|number| format!("fleet{number}")).collect();
    let lines = taps
        .iter()
        .map(|tap| format!("tuntap add {tap} mode tap vnet_hdr\n"));
    world.host.batch("ip", &lines.collect::<String>())?;
    let began = Instant::now();
    let mut each = Vec::with_capacity(vms);
    for tap in &taps {
        let began = Instant::now();
        fleet
            .add(&world.host, tap)
            .with_context(|| format!("adding {tap}"))?;
        each.push(micros(began.elapsed()));
    }
    let added = began.elapsed();
    let mut sample = fleet.cost(&world.host)?.with("vms", vms as f64);
    let began = Instant::now();
    for tap in &taps {
        fleet
            .remove(&world.host, tap)
            .with_context(|| format!("removing {tap}"))?;
    }
    let removed = began.elapsed();
    // In ms for a thousand, however many there were.
    sample.values.extend([
        (ADD_P50, percentile(&each, 50.0)),
        (ADD_P99, percentile(&each, 99.0)),
        (ADD_ALL, added.as_secs_f64() * 1e6 / vms as f64),
        (REMOVE_ALL, removed.as_secs_f64() * 1e6 / vms as f64),
    ]);
    Ok(sample)
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
