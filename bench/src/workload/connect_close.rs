//! Connections, one after the other, that the server closes at once.

use std::time::{Duration, Instant};

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
        const UNIT: Unit = Unit::Microseconds;
        &[
            Metric {
                name: "connect-close p50",
                unit: UNIT,
            },
            Metric {
                name: "connect-close p99",
                unit: UNIT,
            },
        ]
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7001), TcpService::Close)?;
        let connect = || tcp::connect_close(server.address(), TIMEOUT);
        let took = stand.in_guest(|| -> slipgate_testbed::Result<_> {
            (0..WARM_UP).try_for_each(|_| connect().map(drop))?;
            let (mut took, started) = (Vec::new(), Instant::now());
            while started.elapsed() < limits.short {
                took.push(connect()?.as_secs_f64() * 1e6);
            }
            Ok(took)
        })?;
        let values = [
            ("connect-close p50", percentile(&took, 50.0)),
            ("connect-close p99", percentile(&took, 99.0)),
        ];
        Ok(Sample::of(&values).with("connections", took.len() as f64))
    }
}
