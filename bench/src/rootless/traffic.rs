//! TCP through a contender: streams, connections and requests, each with the CPU time of the process
//! that does the work.

use std::{
    net::SocketAddrV4,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use slipgate_testbed::{
    clients::tcp::{self, EchoSession, Rate},
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use super::footprint::Worker;
use crate::{
    contender::Stand,
    statistics::percentile,
    workload::{Limits, Metric, Sample, Unit, Workload, connect_close::connections},
};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Rounds of a request and its answer before those that are measured.
const WARM_UP: usize = 100;
const REQUEST_BYTES: usize = 64;

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![
        Box::new(Traffic::Up),
        Box::new(Traffic::Down),
        Box::new(Traffic::UpOf8),
        Box::new(Traffic::DownOf8),
        Box::new(Traffic::Connections),
        Box::new(Traffic::Requests),
    ]
}

#[derive(Clone, Copy)]
enum Traffic {
    Up,
    Down,
    UpOf8,
    DownOf8,
    Connections,
    Requests,
}

const UP: [Metric; 2] = stream("rootless up", "rootless up CPU per Gb");
const DOWN: [Metric; 2] = stream("rootless down", "rootless down CPU per Gb");
const UP_OF_8: [Metric; 2] = stream("rootless up ×8", "rootless up ×8 CPU per Gb");
const DOWN_OF_8: [Metric; 2] = stream("rootless down ×8", "rootless down ×8 CPU per Gb");
const CONNECTIONS: [Metric; 3] = [
    Unit::Microseconds.of("rootless connect-close p50"),
    Unit::Microseconds.of("rootless connect-close p99"),
    Unit::Microseconds.of("rootless connect-close CPU"),
];
const REQUESTS: [Metric; 2] = [
    Unit::Microseconds.of("rootless request-response p50"),
    Unit::Microseconds.of("rootless request-response CPU"),
];

const fn stream(rate: &'static str, cpu: &'static str) -> [Metric; 2] {
    [Unit::GigabitsPerSecond.of(rate), Unit::Milliseconds.of(cpu)]
}

impl Workload for Traffic {
    fn name(&self) -> &'static str {
        match self {
            Self::Connections => "rootless connect-close",
            Self::Requests => "rootless request-response",
            _ => self.metrics()[0].name,
        }
    }

    fn metrics(&self) -> &'static [Metric] {
        match self {
            Self::Up => &UP,
            Self::Down => &DOWN,
            Self::UpOf8 => &UP_OF_8,
            Self::DownOf8 => &DOWN_OF_8,
            Self::Connections => &CONNECTIONS,
            Self::Requests => &REQUESTS,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        match self {
            Self::Up => self.streams(stand, 1, tcp::rate_up, limits),
            Self::Down => self.streams(stand, 1, tcp::rate_down, limits),
            Self::UpOf8 => self.streams(stand, 8, tcp::rate_up, limits),
            Self::DownOf8 => self.streams(stand, 8, tcp::rate_down, limits),
            Self::Connections => self.connections(stand, limits),
            Self::Requests => self.requests(stand, limits),
        }
    }
}

/// Measures one stream for a time; the last argument is after what time it has stalled.
type Measure = fn(SocketAddrV4, Duration, Duration) -> slipgate_testbed::Result<Rate>;

impl Traffic {
    fn streams(
        self,
        stand: &Stand,
        count: usize,
        measure: Measure,
        limits: Limits,
    ) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams)?;
        let to = server.address();
        let run = |time| all_of(count, || measure(to, time, TIMEOUT));
        stand.in_guest(|| run(limits.bulk / 10))?;
        let worker = Worker::of(stand)?;
        let before = worker.time()?;
        let rates = stand.in_guest(|| run(limits.bulk))?;
        let cpu = worker.time()?.saturating_sub(before);
        let gigabits: f64 = rates.iter().map(|rate| rate.bytes as f64 * 8e-9).sum();
        let rate: f64 = rates.iter().map(|rate| rate.bits_per_second() * 1e-9).sum();
        let stalled = rates.iter().any(|rate| rate.stalled);
        let [of_rate, of_cpu] = [self.metrics()[0].name, self.metrics()[1].name];
        let sample = Sample::of(&[
            (of_rate, rate),
            (of_cpu, cpu.as_secs_f64() * 1e3 / gigabits),
        ]);
        Ok(sample.with("stalled", f64::from(u8::from(stalled))))
    }

    fn connections(self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7001), TcpService::Close)?;
        let worker = Worker::of(stand)?;
        let before = worker.time()?;
        let mut sample =
            stand.in_guest(|| connections(server.address(), &CONNECTIONS[..2], limits))?;
        let cpu = worker.time()?.saturating_sub(before);
        let count = server.accepted() as f64;
        let each = cpu.as_secs_f64() * 1e6 / count;
        sample.values.insert(CONNECTIONS[2].name, each);
        Ok(sample)
    }

    fn requests(self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7002), TcpService::Echo)?;
        let worker = Worker::of(stand)?;
        let (took, cpu) = stand.in_guest(|| -> Result<_> {
            let mut stream = tcp::connect(server.address(), TIMEOUT)?;
            let mut session = EchoSession::new(&mut stream);
            for _ in 0..WARM_UP {
                session.round(REQUEST_BYTES)?;
            }
            let before = worker.time()?;
            let (mut took, started) = (Vec::new(), Instant::now());
            while started.elapsed() < limits.short {
                took.push(session.round(REQUEST_BYTES)?.as_secs_f64() * 1e6);
            }
            Ok((took, worker.time()?.saturating_sub(before)))
        })?;
        let each = cpu.as_secs_f64() * 1e6 / took.len() as f64;
        Ok(Sample::of(&[
            (REQUESTS[0].name, percentile(&took, 50.0)),
            (REQUESTS[1].name, each),
        ]))
    }
}

/// Runs so many at once. A thread of the guest's is the guest's too.
fn all_of(
    count: usize,
    run: impl Fn() -> slipgate_testbed::Result<Rate> + Sync,
) -> Result<Vec<Rate>> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(&run)).collect();
        let rates = threads.into_iter().map(|thread| {
            let rate = thread
                .join()
                .map_err(|_| anyhow!("a stream's thread ended"))?;
            rate.context("a stream")
        });
        rates.collect()
    })
}
