//! Round trips of 64 bytes on one connection.

use std::time::{Duration, Instant};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp::{self, EchoSession},
    servers::{TcpServer, TcpService},
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::{contender::Stand, family::Family, statistics::percentile};

const TIMEOUT: Duration = Duration::from_secs(3);
const WARM_UP: usize = 100;
const SIZE_BYTES: usize = 64;

pub(super) struct RequestResponse(pub(super) Family);

impl Workload for RequestResponse {
    fn name(&self) -> &'static str {
        self.0.of("request-response", "request-response-ipv6")
    }

    fn metrics(&self) -> &'static [Metric] {
        const IPV4: [Metric; 3] = [
            Unit::Microseconds.of("request-response p50"),
            Unit::Microseconds.of("request-response p99"),
            Unit::ThousandPerSecond.of("request-response rate"),
        ];
        const IPV6: [Metric; 3] = [
            Unit::Microseconds.of("request-response-ipv6 p50"),
            Unit::Microseconds.of("request-response-ipv6 p99"),
            Unit::ThousandPerSecond.of("request-response-ipv6 rate"),
        ];
        self.0.of(&IPV4, &IPV6)
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (self.0.server(), 7002), TcpService::Echo)?;
        let (took, elapsed) = stand.in_guest(|| -> slipgate_testbed::Result<_> {
            let mut stream = tcp::connect(server.address(), TIMEOUT)?;
            let mut session = EchoSession::new(&mut stream);
            (0..WARM_UP).try_for_each(|_| session.round(SIZE_BYTES).map(drop))?;
            let (mut took, started) = (Vec::new(), Instant::now());
            while started.elapsed() < limits.short {
                took.push(session.round(SIZE_BYTES)?.as_secs_f64() * 1e6);
            }
            Ok((took, started.elapsed()))
        })?;
        let rate = took.len() as f64 / elapsed.as_secs_f64() / 1e3;
        let values = [percentile(&took, 50.0), percentile(&took, 99.0), rate];
        let names = self.metrics().iter().map(|metric| metric.name);
        Ok(Sample::of(&names.zip(values).collect::<Vec<_>>()))
    }
}
