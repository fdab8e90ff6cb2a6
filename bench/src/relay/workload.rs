//! Workloads of relays: sequential connections, and streams.

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
    workload::{Limits, Metric, Sample, Unit, Workload, bulk::Bulk, connect_close::connections},
};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Time for a relay to start: it may accept before its path to the guest works.
const START: Duration = Duration::from_secs(3);

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![
        Box::new(Through::Connect),
        Box::new(Through::Up),
        Box::new(Through::Down),
    ]
}

enum Through {
    /// Time from the client's connect until the guest's service has accepted and its close has
    /// arrived.
    Connect,
    Up,
    Down,
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
            Unit::Microseconds.of("relay-connect p50"),
            Unit::Microseconds.of("relay-connect p99"),
        ];
        const UP: [Metric; 1] = [Unit::GigabitsPerSecond.of("relay-up")];
        const DOWN: [Metric; 1] = [Unit::GigabitsPerSecond.of("relay-down")];
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
                Self::Connect => connections(to, self.metrics(), limits),
                Self::Up => Bulk::Up.stream(to, self.name(), limits),
                Self::Down => Bulk::Down.stream(to, self.name(), limits),
            }
        })
    }
}

/// Waits until a relay accepts connections at an address.
///
/// # Errors
/// It does not in time.
pub(crate) fn until_it_listens(to: SocketAddrV4) -> Result<()> {
    let until = Instant::now() + START;
    while let Err(why) = tcp::connect(to, TIMEOUT) {
        if Instant::now() > until {
            return Err(why.into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
