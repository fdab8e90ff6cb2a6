//! Resources that a contender takes: CPU time while nothing happens, and memory per connection.

use std::{fs, net::TcpStream, time::Duration};

use anyhow::{Context as _, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use crate::{
    contender::{Stand, scheduled},
    workload::{Limits, Metric, Sample, Unit, Workload},
};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Connections of which the memory is measured, after as many that warm up.
const CONNECTIONS: usize = 1_000;

const IDLE: [Metric; 1] = [Unit::PercentOfACore.of("rootless idle")];
const MEMORY: [Metric; 1] = [Unit::Kibibytes.of("rootless memory per connection")];

/// What is measured before all traffic: what connections leave behind would hold those of the
/// measurement.
pub(super) fn of_a_fresh_process() -> Box<dyn Workload> {
    Box::new(Footprint::Memory)
}

/// What is measured after all traffic.
pub(super) fn after_traffic() -> Box<dyn Workload> {
    Box::new(Footprint::Idle)
}

enum Footprint {
    /// One connection is open, after traffic.
    Idle,
    Memory,
}

impl Workload for Footprint {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        match self {
            Self::Idle => &IDLE,
            Self::Memory => &MEMORY,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        match self {
            Self::Idle => idle(stand, limits),
            Self::Memory => memory(stand),
        }
    }
}

/// The process that does a contender's work.
#[derive(Clone, Copy)]
pub(super) struct Worker(u32);

impl Worker {
    pub(super) fn of(stand: &Stand) -> Result<Worker> {
        let process = stand.decider().context("no process does the work")?;
        Ok(Worker(process))
    }

    /// CPU time of its threads so far.
    pub(super) fn time(self) -> Result<Duration> {
        Ok(scheduled(self.0)?.ran)
    }
}

fn idle(stand: &Stand, limits: Limits) -> Result<Sample> {
    /// After it, what traffic led to is over.
    const REST: Duration = Duration::from_millis(300);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7003), TcpService::Hold)?;
    let held = stand.in_guest(|| tcp::connect(server.address(), TIMEOUT))?;
    std::thread::sleep(REST);
    let worker = Worker::of(stand)?;
    let before = worker.time()?;
    std::thread::sleep(limits.bulk);
    let cpu = worker.time()?.saturating_sub(before);
    drop(held);
    let share = cpu.as_secs_f64() / limits.bulk.as_secs_f64();
    Ok(Sample::of(&[(IDLE[0].name, share * 100.0)]))
}

fn memory(stand: &Stand) -> Result<Sample> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let server = TcpServer::start(&stand.world.net, (SERVER, 7004), TcpService::Hold)?;
    let open = || -> Result<Vec<TcpStream>> {
        let open = (0..CONNECTIONS).map(|_| tcp::connect(server.address(), TIMEOUT));
        let open = open.collect::<slipgate_testbed::Result<_>>();
        Ok(open?)
    };
    let Worker(process) = Worker::of(stand)?;
    let first = stand.in_guest(open)?;
    let before = kibibytes(process)?;
    let second = stand.in_guest(open)?;
    let after = kibibytes(process)?;
    drop((first, second));
    let each = (after - before) / CONNECTIONS as f64;
    Ok(Sample::of(&[(MEMORY[0].name, each)]).with("KiB before", before))
}

/// Memory of a process, its share of what it has in common with others included, KiB.
fn kibibytes(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let pss = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let number = pss.and_then(|pss| pss.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("no Pss in {path}"))
}
