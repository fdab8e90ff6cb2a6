//! Round trips of 64 bytes on one connection.

use std::time::{Duration, Instant};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp::{self, EchoSession},
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::{contender::Stand, statistics::percentile};

const TIMEOUT: Duration = Duration::from_secs(3);
const WARM_UP: usize = 100;
const SIZE_BYTES: usize = 64;

pub(super) struct RequestResponse;

impl Workload for RequestResponse {
    fn name(&self) -> &'static str {
        "request-response"
    }

    fn metrics(&self) -> &'static [Metric] {
        const METRICS: [Metric; 3] = [
            Unit::Microseconds.of("request-response p50"),
            Unit::Microseconds.of("request-response p99"),
            Unit::ThousandPerSecond.of("request-response rate"),
        ];
        &METRICS
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7002), TcpService::Echo)?;
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
        Ok(Sample::of(&[
            ("request-response p50", percentile(&took, 50.0)),
            ("request-response p99", percentile(&took, 99.0)),
            ("request-response rate", rate),
        ]))
    }
}
