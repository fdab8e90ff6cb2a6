//! A stream each way, and echoes beside it.

use std::{
    net::SocketAddrV4,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use slipgate_testbed::{
    clients::{tcp, udp},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::SERVER,
};

use super::BYTES_PER_SECOND;
use crate::{
    contender::Stand,
    statistics::percentile,
    workload::{Limits, Metric, Sample, Unit, Workload},
};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Interval between two echo requests.
const INTERVAL: Duration = Duration::from_millis(5);
/// Data and length of a full segment with timestamps, bytes.
const SEGMENT: (f64, f64) = (1_448.0, 1_500.0);

pub(crate) fn all() -> Vec<Box<dyn Workload>> {
    vec![Box::new(Way::Up), Box::new(Way::Down)]
}

#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
}

impl Workload for Way {
    fn name(&self) -> &'static str {
        match self {
            Self::Up => "rates-up",
            Self::Down => "rates-down",
        }
    }

    fn metrics(&self) -> &'static [Metric] {
        const UP: [Metric; 2] = [
            Unit::PercentOfTheRate.of("rates-up share"),
            Unit::Milliseconds.of("rates-up RTT p95"),
        ];
        const DOWN: [Metric; 2] = [
            Unit::PercentOfTheRate.of("rates-down share"),
            Unit::Milliseconds.of("rates-down RTT p95"),
        ];
        match self {
            Self::Up => &UP,
            Self::Down => &DOWN,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let streams = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams)?;
        let echo = UdpServer::start(&stand.world.net, (SERVER, 7007), UdpService::Echo)?;
        let (address, way) = (streams.address(), *self);
        let stream = move |time| match way {
            Self::Up => tcp::rate_up(address, time, TIMEOUT),
            Self::Down => tcp::rate_down(address, time, TIMEOUT),
        };
        let echo_at = echo.address();
        // A thread of the guest's is the guest's too.
        let (rate, trips) = stand.in_guest(|| {
            thread::scope(|scope| {
                let rate = scope.spawn(|| stream(limits.bulk));
                let trips = round_trips(echo_at, limits.bulk)?;
                match rate.join() {
                    Ok(rate) => Ok((rate?, trips)),
                    Err(_) => bail!("the stream's thread ended"),
                }
            })
        })?;
        let share = rate.bits_per_second() / 8.0 * SEGMENT.1 / SEGMENT.0;
        let [metric_share, metric_trip] = self.metrics() else {
            bail!("two metrics");
        };
        Ok(Sample::of(&[
            (
                metric_share.name,
                share * 100.0 / f64::from(BYTES_PER_SECOND),
            ),
            (metric_trip.name, percentile(&trips, 95.0)),
        ])
        .with("stalled", f64::from(u8::from(rate.stalled)))
        .with("echoes", trips.len() as f64))
    }
}

/// Round trips over this time, ms. An echo that is lost has none.
fn round_trips(address: SocketAddrV4, during: Duration) -> Result<Vec<f64>> {
    let until = Instant::now() + during;
    let mut trips = Vec::new();
    while Instant::now() < until {
        let left = until.saturating_duration_since(Instant::now());
        let wait = left.clamp(Duration::from_millis(1), Duration::from_millis(500));
        if let udp::UdpOutcome::Answered(took) = udp::probe(address, b"x", wait)? {
            trips.push(took.as_secs_f64() * 1e3);
        }
        thread::sleep(INTERVAL);
    }
    ensure!(!trips.is_empty(), "no echo came back");
    Ok(trips)
}
