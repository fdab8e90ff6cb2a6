//! One TCP stream as fast as it goes, with GSO frames where the contender has them.

use std::time::Duration;

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::SERVER,
};

use super::{Limits, Metric, Sample, Unit, Workload};
use crate::contender::Stand;

/// A stream that stands still for so long is over; the time counts, for it is what a user gets.
const TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, Copy)]
pub(super) enum Bulk {
    Up,
    Down,
}

impl Workload for Bulk {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        const UNIT: Unit = Unit::GigabitsPerSecond;
        match self {
            Bulk::Up => &[Metric {
                name: "bulk-up",
                unit: UNIT,
            }],
            Bulk::Down => &[Metric {
                name: "bulk-down",
                unit: UNIT,
            }],
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams)?;
        let warm_up = limits.bulk / 10;
        let rate = stand.in_guest(|| -> slipgate_testbed::Result<_> {
            let run = |time| match self {
                Bulk::Up => tcp::rate_up(server.address(), time, TIMEOUT),
                Bulk::Down => tcp::rate_down(server.address(), time, TIMEOUT),
            };
            run(warm_up)?;
            run(limits.bulk)
        })?;
        let sample = Sample::of(&[(self.name(), rate.bits_per_second() / 1e9)]);
        let stalled = f64::from(u8::from(rate.stalled));
        Ok(sample
            .with("bytes", rate.bytes as f64)
            .with("stalled", stalled))
    }
}
