//! A disk: random reads and scattered writes of 4 KiB by the built-in guest, under `slipgate run` and under
//! QEMU with a thread for its virtio-blk, by `aio=threads` and `aio=io_uring`.
//!
//! The image that is read is in the host's page cache, and one that is written in memory, for one boot. The
//! guest polls for the answers. It checks what it reads; what it has written is checked in the image.

use std::{path::Path, time::Duration};

use anyhow::{Error, Result, ensure};
use serde_json::Value;
use slipgate_testbed::{
    World,
    builtin_guest::{
        Device, check_disk_image, check_room_in_memory, disk_image, disk_image_in_memory,
    },
    requirements,
};

use crate::{
    conditions::Conditions,
    contender,
    guest_machine::{GuestMachine, is_vcpu, number, place},
    results::{self, Cell, Table},
    workload::{Measured, Metric, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const DISK: &str = "disk";
/// slipgate's contender, and the one that it is compared with.
pub(crate) const SLIPGATE: &str = "slipgate-disk";
pub(crate) const REFERENCE: &str = "qemu-disk-io_uring";
/// Time limit of a guest's work.
const WAIT: Duration = Duration::from_secs(60);
const IMAGE_BYTES: usize = 128 << 20;

/// Length of a request, bytes.
const BLOCK_BYTES: usize = 4096;
/// Number of writes behind which there is a flush.
const FLUSH_EACH: usize = 64;

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Read,
    /// Writes, and flushes.
    Write,
}

impl Action {
    /// Number of requests that are counted.
    fn requests(self, quick: bool) -> usize {
        match (self, quick) {
            (Action::Read, false) => 40_000,
            (Action::Read, true) => 2_000,
            (Action::Write, false) => IMAGE_BYTES / BLOCK_BYTES,
            (Action::Write, true) => 2_048,
        }
    }
}

/// What is done, how many requests are under way at once, and the names of what is measured: requests a
/// second, p50, p99, CPU time.
const CASES: [(Action, u32, [&str; 4]); 4] = [
    (
        Action::Read,
        1,
        [
            "disk random reads ×1",
            "disk random reads ×1 p50",
            "disk random reads ×1 p99",
            "disk random reads ×1, device's CPU",
        ],
    ),
    (
        Action::Read,
        32,
        [
            "disk random reads ×32",
            "disk random reads ×32 p50",
            "disk random reads ×32 p99",
            "disk random reads ×32, device's CPU",
        ],
    ),
    (
        Action::Write,
        1,
        [
            "disk writes ×1",
            "disk writes ×1 p50",
            "disk writes ×1 p99",
            "disk writes ×1, device's CPU",
        ],
    ),
    (
        Action::Write,
        32,
        [
            "disk writes ×32",
            "disk writes ×32 p50",
            "disk writes ×32 p99",
            "disk writes ×32, device's CPU",
        ],
    ),
];
/// Metrics of requests a second, and of the CPU time of each.
pub(crate) const RATES: [&str; CASES.len()] = of_all_cases(0);
pub(crate) const COSTS: [&str; CASES.len()] = of_all_cases(3);

const fn of_all_cases(at: usize) -> [&'static str; CASES.len()] {
    let [a, b, c, d] = &CASES;
    [a.2[at], b.2[at], c.2[at], d.2[at]]
}

const METRICS: usize = CASES.len() * 4;
pub(crate) const MEASURED: Measured = (DISK, &metrics());

const fn metrics() -> [Metric; METRICS] {
    let mut metrics = [Unit::Microseconds.of(""); METRICS];
    let mut at = 0;
    while at < METRICS {
        let unit = match at % 4 {
            0 => Unit::ThousandPerSecond,
            _ => Unit::Microseconds,
        };
        metrics[at] = unit.of(CASES[at / 4].2[at % 4]);
        at += 1;
    }
    metrics
}

/// A VMM, and how it reads and writes the image.
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
            Contender::Slipgate => SLIPGATE,
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

    fn start(
        self,
        world: &World,
        (image, action): (&Path, Action),
        work: &str,
    ) -> Result<GuestMachine> {
        let read_only = action == Action::Read;
        match self {
            Contender::Slipgate => {
                let how = if read_only { ",ro" } else { "" };
                let disk = format!("{}{how}", image.display());
                GuestMachine::slipgate(world, work, &["--disk", &disk])
            }
            Contender::Qemu(aio) => {
                let image = image.to_owned();
                let disk = Device::Disk {
                    image,
                    read_only,
                    aio,
                };
                GuestMachine::qemu(world, work, &[disk])
            }
        }
    }

    /// Whether a thread of this name carries requests out; the kernel names those that it adds for a ring
    /// `iou-…`.
    fn is_device(self, thread: &str) -> bool {
        match self {
            Contender::Slipgate => thread.starts_with("disk") || thread.starts_with("iou-"),
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
    // Hours may pass until the tables have the reason.
    let room = check_room_in_memory(Action::Write.requests(quick) * BLOCK_BYTES);
    let room = room.map_err(|why| format!("nothing is measured: {why}"));
    if let Err(why) = &room {
        eprintln!("{DISK}: {why}");
    }
    let mut present = ALL.to_vec();
    present.retain(|contender| {
        let version = room.clone().map_err(Error::msg);
        conditions.note(contender.name(), version.and_then(|()| contender.version()))
    });
    let image = disk_image(IMAGE_BYTES);
    let mut cells = Vec::new();
    for round in 1..=rounds {
        for contender in &present {
            let outcome = match &image {
                Ok((_folder, image)) => one(*contender, image, quick),
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
fn one(contender: Contender, image: &Path, quick: bool) -> Result<Sample> {
    let world = World::with(contender::world(false))?;
    let mut sample = Sample::default();
    for (action, at_once, names) in CASES {
        let requests = action.requests(quick);
        let work = work(action, requests, at_once);
        let written = match action {
            Action::Read => None,
            Action::Write => Some(disk_image_in_memory(requests * BLOCK_BYTES)?),
        };
        let image = written.as_ref().map_or(image, |(_folder, image)| image);
        let mut machine = contender.start(&world, (image, action), &work)?;
        machine.await_line("\"disk\"", WAIT)?;
        let is_device = |thread: &str| contender.is_device(thread);
        let before = machine.cpu_time(is_device)?;
        place(&world);
        let said = machine.await_line("\"disk\"", WAIT)?;
        let device = machine.cpu_time(is_device)?;
        ensure!(device > Duration::ZERO, "no thread of the disk is seen");
        let figures = figures(&said, device.saturating_sub(before))?;
        if action == Action::Write {
            ensure!(
                number(&said, "flushes")? > 0.0,
                "nothing was flushed: {said}"
            );
            check_disk_image(image)?;
        }
        sample.values.extend(names.into_iter().zip(figures));
    }
    Ok(sample)
}

/// Returns a guest's work. The line of a few requests says that the counted ones begin; the threads are
/// pinned during the first of these. The disk's machine stays until it is ended.
fn work(action: Action, requests: usize, at_once: u32) -> String {
    let (few, all) = match action {
        Action::Read => (
            format!("random {IMAGE_BYTES} 100"),
            format!("random {IMAGE_BYTES} {requests}"),
        ),
        Action::Write => {
            let (few, all) = (FLUSH_EACH * BLOCK_BYTES, requests * BLOCK_BYTES);
            (
                format!("scatter {few} {FLUSH_EACH}"),
                format!("scatter {all} {FLUSH_EACH}"),
            )
        }
    };
    format!(
        "address 10.0.2.15/24 10.0.2.2; disk 0 {few} x{at_once}; disk 0 {all} x{at_once}; wait 60s"
    )
}

/// Returns thousands of requests a second, p50 and p99, µs, and the device's CPU time, µs per request.
fn figures(said: &Value, device: Duration) -> Result<[f64; 4]> {
    let requests = number(said, "count")?;
    Ok([
        requests / number(said, "took_us")? * 1e3,
        number(said, "p50_us")?,
        number(said, "p99_us")?,
        device.as_secs_f64() * 1e6 / requests,
    ])
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
