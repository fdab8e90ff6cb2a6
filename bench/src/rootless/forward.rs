//! A port of the host's loopback that leads to the guest.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::Result;
use slipgate_testbed::servers::{TcpServer, TcpService};

use super::footprint::Worker;
use crate::{
    contender::Stand,
    relay::until_it_listens,
    workload::{Limits, Metric, Sample, Unit, Workload, bulk::Bulk, connect_close::connections},
};

/// Contender that the others are compared with.
pub(super) const REFERENCE: &str = "splice-loop";
/// Port to which the host's clients connect.
pub(super) const PORT: u16 = 8080;
/// Port of the guest's service.
pub(super) const GUEST_PORT: u16 = 80;
/// Both, as `slipgate exec` and as pasta write it.
pub(super) const RULE: &str = "tcp:8080:80";
pub(super) const PORTS: &str = "8080:80";

const CONNECT: [Metric; 3] = [
    Unit::Microseconds.of("rootless forward p50"),
    Unit::Microseconds.of("rootless forward p99"),
    Unit::Microseconds.of("rootless forward CPU"),
];
const UP: [Metric; 1] = [Unit::GigabitsPerSecond.of("rootless forward up")];
const DOWN: [Metric; 1] = [Unit::GigabitsPerSecond.of("rootless forward down")];

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![
        Box::new(Forward::Connect),
        Box::new(Forward::Up),
        Box::new(Forward::Down),
    ]
}

enum Forward {
    /// Time from the client's connect until the guest's service has accepted and its close has
    /// arrived.
    Connect,
    /// Bytes into the guest.
    Up,
    Down,
}

impl Workload for Forward {
    fn name(&self) -> &'static str {
        match self {
            Self::Connect => "rootless forward",
            Self::Up | Self::Down => self.metrics()[0].name,
        }
    }

    fn metrics(&self) -> &'static [Metric] {
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
        let server = TcpServer::start(stand.guest_ns(), inside, service)?;
        let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT);
        let worker = Worker::of(stand)?;
        stand.world.host.run(|| {
            until_it_listens(to)?;
            let (before, accepted) = (worker.time()?, server.accepted());
            let mut sample = match self {
                Self::Connect => connections(to, &CONNECT[..2], limits)?,
                Self::Up => return Bulk::Up.stream(to, self.name(), limits),
                Self::Down => return Bulk::Down.stream(to, self.name(), limits),
            };
            let cpu = worker.time()?.saturating_sub(before);
            let each = cpu.as_secs_f64() * 1e6 / (server.accepted() - accepted) as f64;
            sample.values.insert(CONNECT[2].name, each);
            Ok(sample)
        })
    }
}
