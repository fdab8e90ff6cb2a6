//! One TCP stream at full speed, with GSO frames where the contender supports them.

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::{contender::Stand, family::Family};

/// Time after which a stalled stream is ended. The round counts, because a user would wait too.
const TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, Copy)]
pub(crate) enum Bulk {
    Up,
    Down,
}

/// A stream through the NAT.
pub(super) struct BulkStream(pub(super) Bulk, pub(super) Family);

impl Workload for BulkStream {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        const UP: [Metric; 1] = [Unit::GigabitsPerSecond.of("bulk-up")];
        const DOWN: [Metric; 1] = [Unit::GigabitsPerSecond.of("bulk-down")];
        const UP6: [Metric; 1] = [Unit::GigabitsPerSecond.of("bulk-up-ipv6")];
        const DOWN6: [Metric; 1] = [Unit::GigabitsPerSecond.of("bulk-down-ipv6")];
        match self.0 {
            Bulk::Up => self.1.of(&UP, &UP6),
            Bulk::Down => self.1.of(&DOWN, &DOWN6),
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let at = (self.1.server(), 7000);
        let server = TcpServer::start(&stand.world.net, at, TcpService::Streams)?;
        let address = server.address();
        stand.in_guest(|| self.0.stream(address, self.name(), limits))
    }
}

impl Bulk {
    /// Measures a stream to a server of [`TcpService::Streams`], or from it, after a short stream
    /// to warm up. The rate is the metric `name`.
    pub(crate) fn stream(
        self,
        server: impl Into<SocketAddr>,
        name: &'static str,
        limits: Limits,
    ) -> Result<Sample> {
        let server = server.into();
        let run = |time| match self {
            Bulk::Up => tcp::rate_up(server, time, TIMEOUT),
            Bulk::Down => tcp::rate_down(server, time, TIMEOUT),
        };
        run(limits.bulk / 10)?;
        let rate = run(limits.bulk)?;
        let sample = Sample::of(&[(name, rate.bits_per_second() / 1e9)]);
        let stalled = f64::from(u8::from(rate.stalled));
        Ok(sample
            .with("bytes", rate.bytes as f64)
            .with("stalled", stalled))
    }
}
