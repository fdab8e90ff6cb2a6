//! Connections one after the other, and streams.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::{Duration, Instant},
};

use anyhow::Result;
use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService},
};

use super::{GUEST_PORT, PORT};
use crate::{
    contender::Stand,
    statistics::percentile,
    workload::{Limits, Metric, Sample, Unit, Workload},
};

const TIMEOUT: Duration = Duration::from_secs(3);
const WARM_UP: usize = 20;
/// A relay may open its end a moment after it listens.
const START: Duration = Duration::from_secs(3);

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![
        Box::new(Through::Connect),
        Box::new(Through::Up),
        Box::new(Through::Down),
    ]
}

enum Through {
    /// From the client's connect until the guest's service has accepted and its close is back.
    Connect,
    Up,
    Down,
}

const fn metric(name: &'static str, unit: Unit) -> Metric {
    Metric { name, unit }
}

impl Workload for Through {
    fn name(&self) -> &'static str {
        match self {
            Self::Connect => "relay-connect",
            Self::Up => "relay-up",
            Self::Down => "relay-down",
        }
    }

    fn metrics(&self) -> &'static [Metric] {
        const CONNECT: [Metric; 2] = [
            metric("relay-connect p50", Unit::Microseconds),
            metric("relay-connect p99", Unit::Microseconds),
        ];
        const UP: [Metric; 1] = [metric("relay-up", Unit::GigabitsPerSecond)];
        const DOWN: [Metric; 1] = [metric("relay-down", Unit::GigabitsPerSecond)];
        match self {
            Self::Connect => &CONNECT,
            Self::Up => &UP,
            Self::Down => &DOWN,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let service = match self {
            Self::Connect => TcpService::Close,
            Self::Up | Self::Down => TcpService::Streams,
        };
        let inside = (Ipv4Addr::UNSPECIFIED, GUEST_PORT);
        let _server = TcpServer::start(stand.guest_ns(), inside, service)?;
        let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT);
        stand.world.host.run(|| {
            until_it_listens(to)?;
            match self {
                Self::Connect => connections(to, limits),
                Self::Up => {
                    tcp::rate_up(to, limits.bulk / 10, TIMEOUT)?;
                    rate(self.name(), tcp::rate_up(to, limits.bulk, TIMEOUT)?)
                }
                Self::Down => {
                    tcp::rate_down(to, limits.bulk / 10, TIMEOUT)?;
                    rate(self.name(), tcp::rate_down(to, limits.bulk, TIMEOUT)?)
                }
            }
        })
    }
}

fn until_it_listens(to: SocketAddrV4) -> Result<()> {
    let until = Instant::now() + START;
    while let Err(why) = tcp::connect(to, TIMEOUT) {
        if Instant::now() > until {
            return Err(why.into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn connections(to: SocketAddrV4, limits: Limits) -> Result<Sample> {
    let connect = || tcp::connect_close(to, TIMEOUT);
    for _ in 0..WARM_UP {
        connect()?;
    }
    let (mut took, started) = (Vec::new(), Instant::now());
    while started.elapsed() < limits.short {
        took.push(connect()?.as_secs_f64() * 1e6);
    }
    let values = [
        ("relay-connect p50", percentile(&took, 50.0)),
        ("relay-connect p99", percentile(&took, 99.0)),
    ];
    Ok(Sample::of(&values).with("connections", took.len() as f64))
}

fn rate(name: &'static str, rate: tcp::Rate) -> Result<Sample> {
    let sample = Sample::of(&[(name, rate.bits_per_second() / 1e9)]);
    let stalled = f64::from(u8::from(rate.stalled));
    Ok(sample
        .with("bytes", rate.bytes as f64)
        .with("stalled", stalled))
}
