//! Sequential connections that the server closes at once.

use std::{
    net::SocketAddrV4,
    time::{Duration, Instant},
};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::{contender::Stand, statistics::percentile};

const TIMEOUT: Duration = Duration::from_secs(3);
const WARM_UP: usize = 50;

pub(super) struct ConnectClose;

impl Workload for ConnectClose {
    fn name(&self) -> &'static str {
        "connect-close"
    }

    fn metrics(&self) -> &'static [Metric] {
        const METRICS: [Metric; 2] = [
            Unit::Microseconds.of("connect-close p50"),
            Unit::Microseconds.of("connect-close p99"),
        ];
        &METRICS
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7001), TcpService::Close)?;
        stand.in_guest(|| connections(server.address(), self.metrics(), limits))
    }
}

/// Measures sequential connections to a server of [`TcpService::Close`]. The metrics are the median
/// and the 99th percentile of their times.
pub(crate) fn connections(
    server: SocketAddrV4,
    metrics: &[Metric],
    limits: Limits,
) -> Result<Sample> {
    let connect = || tcp::connect_close(server, TIMEOUT);
    for _ in 0..WARM_UP {
        connect()?;
    }
    let (mut took, started) = (Vec::new(), Instant::now());
    while started.elapsed() < limits.short {
        took.push(connect()?.as_secs_f64() * 1e6);
    }
    let percentiles = [50.0, 99.0].map(|percent| percentile(&took, percent));
    let names = metrics.iter().map(|metric| metric.name);
    let values: Vec<_> = names.zip(percentiles).collect();
    Ok(Sample::of(&values).with("connections", took.len() as f64))
}
