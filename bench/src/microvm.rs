//! Whole microVMs: the built-in guest, with the same driver and TCP stack everywhere, under
//! `slipgate run` and under QEMU with each of the network back ends in common use.
//!
//! Each machine has one vCPU and one queue pair, which is all that libslirp and passt support;
//! slipgate and QEMU's TAP are also measured with two, and Firecracker with two vCPUs. One boot runs all workloads, one after the
//! other; the contenders alternate boot by boot. On TAPs, the threads of a machine with one vCPU
//! are pinned ([`placement`]). With two vCPUs they are not, because on machines as small as those
//! of CI no CPU would be left for the rest.

mod contender;
pub(crate) mod placement;
pub(crate) mod ring;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use serde_json::Value;
use slipgate_testbed::{
    affinity,
    builtin_guest::GuestOutput,
    requirements,
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use self::{
    contender::{Contender, Stand},
    placement::Placement,
};
use crate::{
    conditions::Conditions,
    is_wanted,
    results::{self, Cell, Table},
    workload::{Measured, Metric, Sample, Unit},
};

/// Contenders that need no root, with the MTU of all and with their largest.
pub(crate) const ROOTLESS: [&str; 14] = [
    "slipgate-run-userspace",
    "qemu-vhost-user",
    "qemu-socket",
    "qemu-passt",
    "qemu-passt-current",
    "qemu-passt-vhost-user",
    "qemu-gvproxy",
    "qemu-libslirp",
    "slipgate-run-userspace-65520",
    "qemu-vhost-user-65520",
    "qemu-socket-65520",
    "qemu-passt-65520",
    "qemu-passt-current-65520",
    "qemu-passt-vhost-user-65520",
];
/// Contender that the others are compared with: the usual network of a fast microVM.
const REFERENCE: &str = "qemu-tap";
/// Time limit of a boot with all workloads.
const TIMEOUT: Duration = Duration::from_secs(90);

const CONNECTIONS: &[Metric] = &[
    Unit::Microseconds.of("vm connect-close ×1 p50"),
    Unit::Microseconds.of("vm connect-close ×1 p99"),
    Unit::Microseconds.of("vm connect-close ×2 p50"),
    Unit::Microseconds.of("vm connect-close ×4 p50"),
    Unit::Microseconds.of("vm connect-close ×8 p50"),
    Unit::ThousandPerSecond.of("vm connect-close ×8 rate"),
];
const MESSAGES: &[Metric] = &[Unit::Microseconds.of("vm request-response p50")];
const STREAMS: &[Metric] = &[
    Unit::GigabitsPerSecond.of("vm stream up"),
    Unit::GigabitsPerSecond.of("vm stream down"),
];
const MEASURED: [Measured; 3] = [
    ("vm connect-close", CONNECTIONS),
    ("vm request-response", MESSAGES),
    ("vm streams", STREAMS),
];

/// Parts that can be measured separately.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Whether whole guests and their connections are measured.
    pub(crate) guests: bool,
    /// Whether the network card alone is measured.
    pub(crate) ring: bool,
}

/// Returns the names of the contenders that run whole guests.
pub(crate) fn contenders() -> impl Iterator<Item = &'static str> {
    contender::ALL.into_iter().map(Contender::name)
}

/// Runs all rounds of the named contenders, or of all if none is named. Contenders that cannot run
/// on this machine are recorded in the conditions.
pub(crate) fn measure(
    parts: Parts,
    only: &[String],
    rounds: usize,
    quick: bool,
    conditions: &mut Conditions,
) -> Vec<Cell> {
    let all = contender::ALL.into_iter();
    let mut present: Vec<_> = all.filter(|one| is_wanted(one.name(), only)).collect();
    present.retain(|contender| {
        let possible = requirements::kvm().map_err(anyhow::Error::msg);
        let version = possible.and_then(|()| contender.version());
        conditions.note(contender.name(), version)
    });
    let mut cells = Vec::new();
    for round in 1..=rounds {
        for contender in present.iter().filter(|_| parts.guests) {
            let outcome = one_boot(*contender, quick, &conditions.congestion_control);
            let outcome = outcome.map_err(|why| {
                eprintln!("round {round}: {}: {why:#}", contender.name());
                // All that it said is above.
                let why = format!("{why:#}");
                why.lines().next().unwrap_or_default().to_owned()
            });
            for (workload, metrics) in MEASURED {
                cells.push(Cell {
                    round,
                    contender: contender.name(),
                    workload,
                    outcome: match &outcome {
                        Ok(sample) => Ok(those_of(sample, metrics)),
                        Err(why) => Err(why.clone()),
                    },
                });
            }
        }
        if parts.ring {
            ring::round(round, quick, &mut cells);
        }
    }
    cells
}

/// Returns a table per metric.
pub(crate) fn tables(cells: &[Cell]) -> Vec<Table> {
    let took_part = |name: &&str| cells.iter().any(|cell| cell.contender == *name);
    let names: Vec<_> = contenders().filter(took_part).collect();
    let mut tables = match names.is_empty() {
        true => Vec::new(),
        false => results::tables(&MEASURED, &names, REFERENCE, cells),
    };
    tables.extend(ring::tables(cells));
    tables
}

fn those_of(sample: &Sample, metrics: &[Metric]) -> Sample {
    let mut of = sample.clone();
    of.values
        .retain(|name, _| metrics.iter().any(|metric| metric.name == *name));
    of
}

fn one_boot(contender: Contender, quick: bool, congestion_control: &str) -> Result<Sample> {
    let stand = Stand::new(contender)?;
    // Where it can't be, the conditions say so.
    stand.world.set_congestion_control(congestion_control).ok();
    let world_cpu = Placement::here().map(Placement::others);
    let serve = |port, service| {
        let start = || TcpServer::start(&stand.world.net, (SERVER, port), service);
        affinity::on_cpu(world_cpu, start)
    };
    let _streams = serve(7000, TcpService::Streams)?;
    let _echo = serve(7002, TcpService::Echo)?;
    // Each with ports of its own to come from: a NAT has only so many for one server.
    let mut closing = vec![serve(7001, TcpService::Close)?];
    let (connections, megabytes) = if quick { (200, 8) } else { (2000, 128) };
    let mut line = format!("crr {SERVER}:7001 50 x2 close");
    for at_once in [1, 2, 4, 8] {
        let port = 7100 + at_once;
        closing.push(serve(port, TcpService::Close)?);
        line += &format!("; crr {SERVER}:{port} {connections} x{at_once} close");
    }
    line += &format!("; rr {SERVER}:7002 {connections}");
    for way in ["up", "down"] {
        line += &format!("; stream {SERVER}:7000 {}000000 {way} raw", megabytes);
    }
    let output = stand.boot(&line, TIMEOUT)?.expect_well()?;
    sample(&output).with_context(|| output.to_string())
}

fn sample(output: &GuestOutput) -> Result<Sample> {
    let mut values = BTreeMap::new();
    let closed = output.results("crr");
    // The first ones warm the way up.
    for (at, name) in [
        "vm connect-close ×1 p50",
        "vm connect-close ×2 p50",
        "vm connect-close ×4 p50",
        "vm connect-close ×8 p50",
    ]
    .into_iter()
    .enumerate()
    {
        values.insert(name, number(closed.get(at + 1), "p50_us")?);
    }
    values.insert("vm connect-close ×1 p99", number(closed.get(1), "p99_us")?);
    let rate = number(closed.get(4), "per_second")?;
    values.insert("vm connect-close ×8 rate", rate / 1e3);
    let messages = output.results("rr");
    values.insert(
        "vm request-response p50",
        number(messages.first(), "p50_us")?,
    );
    let streams = output.results("stream");
    for (at, name) in ["vm stream up", "vm stream down"].into_iter().enumerate() {
        let bits = number(streams.get(at), "gbit_per_s")?;
        values.insert(name, bits);
    }
    Ok(Sample {
        values,
        ..Sample::default()
    })
}

fn number(result: Option<&Value>, field: &str) -> Result<f64> {
    let result = result.context("the guest left a result out")?;
    result[field]
        .as_f64()
        .with_context(|| format!("no {field} in {result}"))
}
