//! Sequential connections that the server closes at once.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::{contender::Stand, family::Family, statistics::percentile};

const TIMEOUT: Duration = Duration::from_secs(3);
const WARM_UP: usize = 50;

pub(super) struct ConnectClose(pub(super) Family);

impl Workload for ConnectClose {
    fn name(&self) -> &'static str {
        self.0.of("connect-close", "connect-close-ipv6")
    }

    fn metrics(&self) -> &'static [Metric] {
        const IPV4: [Metric; 2] = [
            Unit::Microseconds.of("connect-close p50"),
            Unit::Microseconds.of("connect-close p99"),
        ];
        const IPV6: [Metric; 2] = [
            Unit::Microseconds.of("connect-close-ipv6 p50"),
            Unit::Microseconds.of("connect-close-ipv6 p99"),
        ];
        self.0.of(&IPV4, &IPV6)
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server =
            TcpServer::start(&stand.world.net, (self.0.server(), 7001), TcpService::Close)?;
        stand.in_guest(|| connections(server.address(), self.metrics(), limits))
    }
}

/// Measures sequential connections to a server of [`TcpService::Close`]. The metrics are the median
/// and the 99th percentile of their times.
pub(crate) fn connections(
    server: impl Into<SocketAddr>,
    metrics: &[Metric],
    limits: Limits,
) -> Result<Sample> {
    let server = server.into();
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
