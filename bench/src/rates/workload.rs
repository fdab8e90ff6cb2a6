//! A stream each way, and echoes beside it.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use slipgate_testbed::{
    clients::{tcp, udp},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use super::BYTES_PER_SECOND;
use crate::{
    contender::Stand,
    family::{Families, Family},
    statistics::percentile,
    workload::{Limits, Metric, Sample, Unit, Workload},
};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Interval between two echo requests.
const INTERVAL: Duration = Duration::from_millis(5);
/// Data of a full segment with timestamps, by IPv4 and by IPv6, bytes.
const SEGMENT_DATA: [f64; 2] = [1_448.0, 1_428.0];
/// Length of a full segment, bytes.
const SEGMENT: f64 = 1_500.0;

pub(crate) fn all(families: Families) -> Vec<Box<dyn Workload>> {
    let of = |family| {
        let ways = [Way::Up, Way::Down];
        ways.map(|way| Box::new(Limited { way, family }) as Box<dyn Workload>)
    };
    let wanted = Family::ALL.into_iter();
    let wanted = wanted.filter(|family| families.includes(*family));
    wanted.flat_map(of).collect()
}

#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
}

/// A stream through the VM's rate, and echoes of the same family.
struct Limited {
    way: Way,
    family: Family,
}

impl Workload for Limited {
    fn name(&self) -> &'static str {
        match self.way {
            Way::Up => self.family.of("rates-up", "rates-up-ipv6"),
            Way::Down => self.family.of("rates-down", "rates-down-ipv6"),
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
        const UP6: [Metric; 2] = [
            Unit::PercentOfTheRate.of("rates-up-ipv6 share"),
            Unit::Milliseconds.of("rates-up-ipv6 RTT p95"),
        ];
        const DOWN6: [Metric; 2] = [
            Unit::PercentOfTheRate.of("rates-down-ipv6 share"),
            Unit::Milliseconds.of("rates-down-ipv6 RTT p95"),
        ];
        match self.way {
            Way::Up => self.family.of(&UP, &UP6),
            Way::Down => self.family.of(&DOWN, &DOWN6),
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let (net, server) = (&stand.world.net, self.family.server());
        let streams = TcpServer::start(net, (server, 7000), TcpService::Streams)?;
        let echo = UdpServer::start(net, (server, 7007), UdpService::Echo)?;
        let (address, way) = (streams.address(), self.way);
        let stream = move |time| match way {
            Way::Up => tcp::rate_up(address, time, TIMEOUT),
            Way::Down => tcp::rate_down(address, time, TIMEOUT),
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
        let [data, data6] = SEGMENT_DATA;
        let share = rate.bits_per_second() / 8.0 * SEGMENT / self.family.of(data, data6);
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
fn round_trips(address: SocketAddr, during: Duration) -> Result<Vec<f64>> {
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
