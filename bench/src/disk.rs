//! A disk: random reads of 4 KiB by the built-in guest, under `slipgate run` and under QEMU with a thread
//! for its virtio-blk, by `aio=threads` and `aio=io_uring`.
//!
//! The image is in the host's page cache. The guest polls for the answers and checks each.

use std::{path::Path, time::Duration};

use anyhow::{Error, Result, ensure};
use serde_json::Value;
use slipgate_testbed::{
    World,
    builtin_guest::{Device, disk_image},
    requirements,
};

use crate::{
    conditions::Conditions,
    contender,
    guest_machine::{GuestMachine, is_vcpu, number, place},
    results::{self, Cell, Table},
    workload::{Measured, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const DISK: &str = "disk";
const REFERENCE: &str = "qemu-disk-io_uring";
/// Time limit of a guest's work.
const WAIT: Duration = Duration::from_secs(60);
const IMAGE_BYTES: usize = 128 << 20;

/// Reads under way at once, and the names of what is measured: reads a second, p50, p99, CPU time.
const CASES: [(u32, [&str; 4]); 2] = [
    (
        1,
        [
            "disk random reads ×1",
            "disk random reads ×1 p50",
            "disk random reads ×1 p99",
            "disk random reads ×1, device's CPU",
        ],
    ),
    (
        32,
        [
            "disk random reads ×32",
            "disk random reads ×32 p50",
            "disk random reads ×32 p99",
            "disk random reads ×32, device's CPU",
        ],
    ),
];
const MEASURED: Measured = (
    DISK,
    &[
        Unit::ThousandPerSecond.of(CASES[0].1[0]),
        Unit::Microseconds.of(CASES[0].1[1]),
        Unit::Microseconds.of(CASES[0].1[2]),
        Unit::Microseconds.of(CASES[0].1[3]),
        Unit::ThousandPerSecond.of(CASES[1].1[0]),
        Unit::Microseconds.of(CASES[1].1[1]),
        Unit::Microseconds.of(CASES[1].1[2]),
        Unit::Microseconds.of(CASES[1].1[3]),
    ],
);

/// A VMM, and how it reads the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contender {
    Slipgate,
    Qemu(&'static str),
}

const ALL: [Contender; 3] = [
    Contender::Slipgate,
    Contender::Qemu("threads"),
    Contender::Qemu("io_uring"),
];

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Contender::Slipgate => "slipgate-disk",
            Contender::Qemu("threads") => "qemu-disk-threads",
            Contender::Qemu(_) => REFERENCE,
        }
    }

    fn version(self) -> Result<String> {
        requirements::kvm().map_err(Error::msg)?;
        match self {
            Contender::Slipgate => Ok("this commit".to_owned()),
            Contender::Qemu(engine) => {
                let qemu = contender::version("qemu-system-x86_64", "qemu-system-x86")?;
                Ok(format!("{qemu}, virtio-blk with a thread, aio={engine}"))
            }
        }
    }

    fn start(self, world: &World, image: &Path, work: &str) -> Result<GuestMachine> {
        match self {
            Contender::Slipgate => {
                let disk = format!("{},ro", image.display());
                GuestMachine::slipgate(world, work, &["--disk", &disk])
            }
            Contender::Qemu(engine) => {
                let disk = Device::Disk(image.to_owned(), engine);
                GuestMachine::qemu(world, work, &[disk])
            }
        }
    }

    /// Whether a thread of this name carries reads out.
    fn is_device(self, thread: &str) -> bool {
        match self {
            Contender::Slipgate => thread.starts_with("disk"),
            // The main loop has the network and the start.
            Contender::Qemu(_) => !is_vcpu(thread) && !thread.starts_with("qemu-system"),
        }
    }
}

/// Runs all rounds. Contenders that this machine does not have are in the tables with the reason.
pub(crate) fn measure(
    rounds: usize,
    quick: bool,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let missing_before = conditions.missing.len();
    let mut present = ALL.to_vec();
    present.retain(|contender| conditions.note(contender.name(), contender.version()));
    let reads = if quick { 2_000 } else { 40_000 };
    let image = disk_image(IMAGE_BYTES);
    let mut cells = Vec::new();
    for round in 1..=rounds {
        for contender in &present {
            let outcome = match &image {
                Ok((_folder, image)) => one(*contender, image, reads),
                Err(why) => Err(Error::msg(why.to_string())),
            };
            cells.push(Cell::of(round, contender.name(), DISK, outcome));
        }
    }
    let names: Vec<_> = present.iter().map(|one| one.name()).collect();
    let mut tables = results::tables(&[MEASURED], &names, REFERENCE, &cells);
    results::add_missing(&mut tables, &conditions.missing[missing_before..]);
    (cells, tables)
}

/// Measures each case in a boot of its own.
fn one(contender: Contender, image: &Path, reads: u32) -> Result<Sample> {
    let world = World::with(contender::world(false))?;
    let mut sample = Sample::default();
    for (at_once, names) in CASES {
        // The line of a few reads says that the counted ones begin; the threads are pinned during the first
        // of these.
        let work = format!(
            "address 10.0.2.15/24 10.0.2.2; disk 0 random {IMAGE_BYTES} 100 x{at_once}; \
             disk 0 random {IMAGE_BYTES} {reads} x{at_once}; wait 60s"
        );
        let mut machine = contender.start(&world, image, &work)?;
        machine.await_line("\"disk\"", WAIT)?;
        let is_device = |thread: &str| contender.is_device(thread);
        let before = machine.cpu_time(is_device)?;
        place(&world);
        let said = machine.await_line("\"disk\"", WAIT)?;
        let device = machine.cpu_time(is_device)?;
        ensure!(device > Duration::ZERO, "no thread of the disk is seen");
        let figures = figures(&said, device.saturating_sub(before))?;
        sample.values.extend(names.into_iter().zip(figures));
    }
    Ok(sample)
}

/// Returns thousands of reads a second, p50 and p99, µs, and the device's CPU time, µs per read.
fn figures(said: &Value, device: Duration) -> Result<[f64; 4]> {
    let reads = number(said, "count")?;
    Ok([
        reads / number(said, "took_us")? * 1e3,
        number(said, "p50_us")?,
        number(said, "p99_us")?,
        device.as_secs_f64() * 1e6 / reads,
    ])
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
