//! What the guest is told to do: the workloads on its command line, separated by `;`.
//!
//! ```text
//! address A/PREFIX ROUTER [DNS]      no DHCP, but this; first, if at all
//! dns NAME [RESOLVER]                look an A record up, with the network's resolver or another
//! ping A N                           N echo requests, one after the other
//! crr HOST:PORT N [xM] [close|get|echo]
//!                                    N connections, M at once, over all CPUs: open, exchange, close
//! rr HOST:PORT N [xM]                N times 64 bytes to an echo server and back, on M connections
//! stream HOST:PORT BYTES up|down [raw] [xM]
//!                                    a stream of predictable bytes, checked; raw: zeroes, unchecked
//! flood HOST:PORT N [SIZE] [xM]      N UDP frames of SIZE bytes, Ethernet header included (64)
//! serve PORT [PORT…] TIME            for so long, echo what comes to these ports, TCP and UDP
//! wait TIME                          nothing, but for answering what comes
//! selftest                           the driver's and the device's agreement, walked through
//! ```
//!
//! TIME is `60ms` or `2s`; a bare number is milliseconds, for `wait` alone.
//!
//! HOST is an IPv4 address or a name. What a connection of `crr` exchanges: `close` sends nothing
//! and reads until the server ends; `get` does the same after an HTTP/1.0 request for `/`; `echo`
//! sends 64 bytes, awaits them and is the first to close. The default is `get` for port 80, and
//! `close` for any other.

mod parse;

use alloc::{string::String, vec::Vec};
use core::{fmt, net::Ipv4Addr};

pub use parse::parse;

/// Connections or senders at once, at most.
pub const AT_ONCE_MAX: u32 = 1024;
/// Frames of `flood`, Ethernet header included: from the smallest to the largest there is.
pub const FRAME_BYTES: core::ops::RangeInclusive<u32> = 60..=65_535;

/// Ports that `serve` takes: CPU 0's, below all that connections of the guest's own leave by.
pub const SERVED_PORTS: core::ops::RangeInclusive<u16> = 1..=16_383;
/// Ports of one `serve`, at most.
pub const SERVED_PORTS_MAX: usize = 16;

/// What the words of each command are, for errors.
const USAGES: &[&str] = &[
    "address A/PREFIX ROUTER [DNS]",
    "dns NAME [RESOLVER]",
    "ping HOST N",
    "crr HOST:PORT N [xM] [close|get|echo]",
    "rr HOST:PORT N [xM]",
    "stream HOST:PORT BYTES up|down [raw] [xM]",
    "flood HOST:PORT N [SIZE] [xM]",
    "serve PORT [PORT…] TIME, as serve 7 5s",
    "wait TIME, as wait 60ms",
    "selftest",
];

/// Everything on a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// An address of its own instead of a lease.
    pub address: Option<StaticAddress>,
    /// What to do, in order.
    pub workloads: Vec<Workload>,
}

/// What a lease would have said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticAddress {
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Its network's length, in bits.
    pub prefix: u8,
    /// The next hop to everywhere else.
    pub router: Ipv4Addr,
    /// A resolver.
    pub dns: Option<Ipv4Addr>,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Look up a name.
    Dns {
        /// The name.
        name: String,
        /// Whom to ask, if not the network's resolver.
        resolver: Option<Ipv4Addr>,
    },
    /// ICMP echo.
    Ping {
        /// To whom.
        host: Host,
        /// How often.
        count: u32,
    },
    /// Connect, exchange, close.
    Connections {
        /// The server.
        server: Server,
        /// Connections in all.
        count: u32,
        /// Connections at a time.
        at_once: u32,
        /// What is done on each.
        exchange: Exchange,
    },
    /// Small messages there and back on open connections.
    RequestResponse {
        /// An echo server.
        server: Server,
        /// Messages in all.
        count: u32,
        /// Connections.
        at_once: u32,
    },
    /// Bytes in one direction.
    Stream {
        /// A stream server.
        server: Server,
        /// Bytes on each connection.
        bytes: u64,
        /// Which way.
        direction: Direction,
        /// Zeroes that nobody checks.
        raw: bool,
        /// Connections.
        at_once: u32,
    },
    /// Datagrams as fast as the device takes them.
    Flood {
        /// To whom.
        server: Server,
        /// Frames in all.
        count: u32,
        /// Bytes of a frame, Ethernet header included.
        frame_bytes: u32,
        /// Senders.
        at_once: u32,
    },
    /// Echo what comes, TCP and UDP.
    Serve {
        /// To which ports.
        ports: Vec<u16>,
        /// For how many milliseconds.
        ms: u32,
    },
    /// Do nothing for a while.
    Wait {
        /// Milliseconds.
        ms: u32,
    },
    /// The platform's test of itself.
    SelfTest,
}

impl Workload {
    /// Its word on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Dns { .. } => "dns",
            Workload::Ping { .. } => "ping",
            Workload::Connections { .. } => "crr",
            Workload::RequestResponse { .. } => "rr",
            Workload::Stream { .. } => "stream",
            Workload::Flood { .. } => "flood",
            Workload::Serve { .. } => "serve",
            Workload::Wait { .. } => "wait",
            Workload::SelfTest => "selftest",
        }
    }
}

/// An address, or a name to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Its address.
    Address(Ipv4Addr),
    /// Its name.
    Name(String),
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where.
    pub host: Host,
    /// Which port.
    pub port: u16,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Address(address) => write!(f, "{address}:{}", self.port),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// What a connection of `crr` is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Read until the server ends.
    Close,
    /// An HTTP request, then the same.
    Get,
    /// 64 bytes there and back; the guest closes first.
    Echo,
}

impl Exchange {
    /// Its word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Exchange::Close => "close",
            Exchange::Get => "get",
            Exchange::Echo => "echo",
        }
    }
}

/// The way of a stream, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest.
    Up,
    /// To the guest.
    Down,
}

impl Direction {
    /// Its word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Up => "up",
            Direction::Down => "down",
        }
    }
}

/// What is wrong with a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError {
    /// The part between two `;` that is wrong.
    pub command: String,
    /// Why, and what would be right.
    pub why: String,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.command, self.why)
    }
}

impl core::error::Error for CommandError {}

#[cfg(test)]
#[path = "command_test.rs"]
mod tests;
