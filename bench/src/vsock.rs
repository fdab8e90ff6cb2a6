//! vsock: a program of the host and the built-in guest, under `slipgate run`, there with socat between
//! the program and the device's socket as well, and under QEMU with the rings served by
//! vhost-device-vsock (vhost-user) and by the host's kernel.
//!
//! The guest polls, and its vCPU has a CPU of its own where there are two. All else, the program
//! included, has the other. Only the program's own work is not counted as cost.

mod contender;
mod program;

use std::time::{Duration, Instant};

use anyhow::Result;
use slipgate_testbed::affinity;

use self::contender::{Contender, Served, Stand};
use crate::{
    conditions::Conditions,
    results::{self, Cell, Table},
    statistics::percentile,
    workload::{Measured, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const VSOCK: &str = "vsock";
/// slipgate's contender, and the one that it is compared with.
pub(crate) const SLIPGATE: &str = "slipgate-vsock";
pub(crate) const REFERENCE: &str = "qemu-vhost-user-vsock";

const P50: &str = "vsock request-response p50";
const P99: &str = "vsock request-response p99";
const MESSAGE_CPU: &str = "vsock request-response, device's CPU";
const DOWN: &str = "vsock stream to the guest";
const DOWN_CPU: &str = "vsock stream to the guest, device's CPU per Gb";
const UP: &str = "vsock stream from the guest";
const UP_CPU: &str = "vsock stream from the guest, device's CPU per Gb";
/// Metrics of times and CPU times, and of streams.
pub(crate) const COSTS: &[&str] = &[P50, P99, MESSAGE_CPU, DOWN_CPU, UP_CPU];
pub(crate) const STREAMS: &[&str] = &[DOWN, UP];
pub(crate) const MEASURED: Measured = (
    VSOCK,
    &[
        Unit::Microseconds.of(P50),
        Unit::Microseconds.of(P99),
        Unit::Microseconds.of(MESSAGE_CPU),
        Unit::GigabitsPerSecond.of(DOWN),
        Unit::Milliseconds.of(DOWN_CPU),
        Unit::GigabitsPerSecond.of(UP),
        Unit::Milliseconds.of(UP_CPU),
    ],
);

/// Ports of the guest.
const ECHO: u32 = 1000;
const SINK: u32 = 1001;
const SOURCE: u32 = 1002;

/// How much is measured.
#[derive(Clone, Copy)]
struct Amounts {
    messages: usize,
    bytes: u64,
}

/// Runs all rounds. Contenders that this machine does not have are in the tables with the reason.
pub(crate) fn measure(
    rounds: usize,
    quick: bool,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let missing_before = conditions.missing.len();
    let mut present = contender::ALL.to_vec();
    present.retain(|contender| conditions.note(contender.name(), contender.version()));
    let amounts = match quick {
        true => Amounts {
            messages: 1_000,
            bytes: 16 << 20,
        },
        false => Amounts {
            messages: 20_000,
            bytes: 512 << 20,
        },
    };
    let mut cells = Vec::new();
    for round in 1..=rounds {
        for contender in &present {
            let outcome = one_boot(*contender, amounts);
            cells.push(Cell::of(round, contender.name(), VSOCK, outcome));
        }
    }
    let names: Vec<_> = present.iter().map(|one| one.name()).collect();
    let mut tables = results::tables(&[MEASURED], &names, REFERENCE, &cells);
    results::add_missing(&mut tables, &conditions.missing[missing_before..]);
    (cells, tables)
}

fn one_boot(contender: Contender, amounts: Amounts) -> Result<Sample> {
    let Amounts { messages, bytes } = amounts;
    // The rest of the guest's time it is looked at; then it is killed.
    let work = format!(
        "address 10.0.2.15/24 10.0.2.2; vsock echo {ECHO} 1; vsock sink {SINK} 1 {bytes}; \
         vsock source {SOURCE} 1 {bytes}; wait 60s"
    );
    let mut stand = Stand::boot(contender, &work)?;
    stand.await_port()?;
    let (cpu, device) = (stand.place(), stand.device()?);
    let (times, cost) = affinity::on_cpu(cpu, || -> Result<_> {
        let mut stream = device.connect(ECHO)?;
        program::exchanges(&mut stream, messages / 10)?;
        let before = device.device_time();
        let times = program::exchanges(&mut stream, messages)?;
        Ok((times, device.device_time().saturating_sub(before)))
    })?;
    stand.await_end()?;
    stand.await_port()?;
    let down = affinity::on_cpu(cpu, || {
        let mut stream = device.connect(SINK)?;
        device.timed(bytes, || program::to_guest(&mut stream, bytes))
    })?;
    stand.await_end()?;
    stand.await_port()?;
    let up = affinity::on_cpu(cpu, || {
        let mut stream = device.connect(SOURCE)?;
        device.timed(bytes, || program::from_guest(&mut stream, bytes))
    })?;
    stand.await_end()?;
    Ok(Sample::of(&[
        (P50, percentile(&times, 50.0)),
        (P99, percentile(&times, 99.0)),
        (MESSAGE_CPU, cost.as_secs_f64() * 1e6 / messages as f64),
        (DOWN, down.gigabits_per_second),
        (DOWN_CPU, down.cpu_ms_per_gigabit),
        (UP, up.gigabits_per_second),
        (UP_CPU, up.cpu_ms_per_gigabit),
    ]))
}

/// Figures of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stream {
    gigabits_per_second: f64,
    cpu_ms_per_gigabit: f64,
}

impl Stream {
    fn of(bytes: u64, took: Duration, device: Duration) -> Stream {
        let gigabits = bytes as f64 * 8.0 / 1e9;
        Stream {
            gigabits_per_second: gigabits / took.as_secs_f64(),
            cpu_ms_per_gigabit: device.as_secs_f64() * 1e3 / gigabits,
        }
    }
}

impl Served {
    /// Measures a transfer of so many bytes.
    fn timed(&self, bytes: u64, transfer: impl FnOnce() -> Result<()>) -> Result<Stream> {
        let (before, begin) = (self.device_time(), Instant::now());
        transfer()?;
        let took = begin.elapsed();
        let device = self.device_time().saturating_sub(before);
        Ok(Stream::of(bytes, took, device))
    }
}

#[cfg(test)]
#[path = "vsock_test.rs"]
mod tests;
