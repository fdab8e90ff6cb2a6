//! Many VMs on one host: the time to add each, and the cost of all of them.
//!
//! slipgate's daemon adds them by requests to its API, one after the other. The comparison is the
//! present practice with scripts: for each VM a network namespace with a masquerading uplink, and
//! three tc commands that connect its TAP to it (as `tc-redirect-tap` does). In both cases the TAPs
//! exist before.

mod daemon;
mod script;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use slipgate_testbed::{NetNs, World};

use crate::{
    contender::world,
    results::{Cell, Table, tables},
    run::Settings,
    statistics::percentile,
    workload::{Metric, Sample, Unit},
};

/// Name of the workload, as in `--only`.
pub(crate) const FLEET: &str = "fleet";
/// Number of VMs.
const VMS: usize = 1_000;
/// Number of VMs in a quick run.
const FEW_VMS: usize = 100;

const ADD_P50: &str = "fleet add p50";
const ADD_P99: &str = "fleet add p99";
const ADD_ALL: &str = "fleet 1,000 added";
const REMOVE_ALL: &str = "fleet 1,000 removed";
const MEMORY: &str = "fleet memory";
const IDLE: &str = "fleet idle";
const LINK_EVENT: &str = "fleet link event";

const METRICS: &[Metric] = &[
    Unit::Microseconds.of(ADD_P50),
    Unit::Microseconds.of(ADD_P99),
    Unit::Milliseconds.of(ADD_ALL),
    Unit::Milliseconds.of(REMOVE_ALL),
    Unit::Mebibytes.of(MEMORY),
    Unit::PercentOfACore.of(IDLE),
    Unit::Microseconds.of(LINK_EVENT),
];

/// A way to serve many VMs.
trait Fleet {
    /// Adds a VM that reaches the world.
    fn add(&mut self, host: &NetNs, tap: &str) -> Result<()>;
    /// Removes a VM.
    fn remove(&mut self, host: &NetNs, tap: &str) -> Result<()>;
    /// Returns the cost of the serving processes while all VMs exist.
    fn cost(&self, host: &NetNs) -> Result<Sample>;
}

/// Measures both ways. Returns the cells and their tables.
pub(crate) fn measure(settings: &Settings, quick: bool) -> (Vec<Cell>, Vec<Table>) {
    let vms = if quick { FEW_VMS } else { VMS };
    let mut cells = Vec::new();
    for round in 1..=settings.rounds.min(3) {
        let slipgate =
            || daemon::Daemon::start().and_then(|(world, fleet)| run(&world, fleet, vms));
        let script = || {
            let world = World::with(world(true))?;
            // A tenth of them: each takes as long as the one before.
            run(&world, script::Script::default(), vms / 10)
        };
        let contenders: [(&'static str, &dyn Fn() -> Result<Sample>); 2] =
            [(daemon::NAME, &slipgate), (script::NAME, &script)];
        for (contender, measure) in contenders {
            cells.push(Cell {
                round,
                contender,
                workload: FLEET,
                outcome: measure().map_err(|why| format!("{why:#}")),
            });
        }
    }
    let contenders = [daemon::NAME, script::NAME];
    let tables = tables(&[(FLEET, METRICS)], &contenders, script::NAME, &cells);
    (cells, tables)
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
