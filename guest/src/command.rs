//! The command line of the guest: the workloads to run, separated by `;`.
//!
//! ```text
//! address A/PREFIX ROUTER [DNS]      static address instead of DHCP; must come first
//! ipv6                               wait for an IPv6 address
//! dns NAME [RESOLVER]                look an A record up, with the network's resolver or another
//! dns6 NAME [RESOLVER]               the same for an AAAA record
//! ping A N                           N echo requests, one after the other
//! crr HOST:PORT N [xM] [close|get|echo]
//!                                    N connections, M at once, over all CPUs: open, exchange, close
//! rr HOST:PORT N [xM]                N times 64 bytes to an echo server and back, on M connections
//! stream HOST:PORT BYTES up|down|mixed [raw] [xM]
//!                                    a stream of predictable bytes, checked; raw: zeroes, unchecked;
//!                                    mixed: on M connections at once, a third each up, down, and idle
//!                                    until the others have ended
//! flood HOST:PORT N [SIZE] [xM]      N UDP frames of SIZE bytes, Ethernet header included (64)
//! serve PORT [PORT…] TIME            for this time, echo data on these ports, TCP and UDP
//! reset                              reset the machine, which ends it or begins it anew
//! wait TIME                          no traffic of its own; frames are still answered
//! fill MIB                           fill so much memory with bytes of its own, and keep it
//! disk N write|check BYTES           predictable bytes to the start of disk N, and a flush; or they
//!                                    are read and checked. Done first, in order
//! disk N discard|zero BYTES          the start of disk N is discarded, or made zeroes
//! disk N random BYTES COUNT [xM]     COUNT reads of 4 KiB at random places of such BYTES, M at once (up
//!                                    to 32), and each checked
//! disk N log BYTES EVERY [xM]        such BYTES in writes of 4 KiB, M at once (up to 32), with a flush
//!                                    for each EVERY of them, and after it a line of how many are safe
//! vsock echo PORT N                  on a port of vsock, send back what comes, until N connections of
//!                                    the host have ended. Done behind the disks, in order
//! vsock sink PORT N BYTES            the same, but each connection takes BYTES and sends a receipt
//! vsock source PORT N BYTES          the same, but each connection is sent BYTES of zeroes
//! vsock connect PORT N BYTES         connect N times to a program of the host, send BYTES, and get the
//!                                    same back
//! vsock messages PORT N COUNT        connect N times at once, and send and get COUNT numbered messages
//!                                    on each, all beside each other
//! vsock abort PORT N COUNT           the same, but the guest resets each behind its last message
//! balloon report MIB                 fill so much memory, report it as free to the balloon, and use it
//!                                    again; done behind vsock's work, in order
//! balloon follow TIME                for this time, give the balloon what it asks for, and take it back
//! selftest                           self-test of the driver against the device
//! ```
//!
//! TIME is `60ms` or `2s`; a bare number is milliseconds, for `wait` alone.
//!
//! HOST is an address or a name, as in `192.0.2.1:80`, `[2001:db8::1]:80` and `www.example.com:80`. A
//! name is looked up by IPv4, and one in brackets, as in `[www.example.com]:80`, by IPv6. The last word of `crr` is the exchange on a connection:
//! `close` sends nothing and reads until the server closes; `get` does the same after an HTTP/1.0
//! request for `/`; `echo` sends 64 bytes, awaits them and closes first. The default is `get` for
//! port 80, and `close` for any other.

mod parse;

use alloc::{string::String, vec::Vec};
use core::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

pub use parse::parse;

/// Largest number of connections or senders at once.
pub const AT_ONCE_MAX: u32 = 1024;
/// Range of the frame sizes of `flood`, bytes with the Ethernet header.
pub const FRAME_BYTES: core::ops::RangeInclusive<u32> = 60..=65_535;

/// Range of the ports that `serve` takes. They belong to CPU 0, below all local ports of the
/// guest's own connections.
pub const SERVED_PORTS: core::ops::RangeInclusive<u16> = 1..=16_383;
/// Largest number of ports of one `serve`.
pub const SERVED_PORTS_MAX: usize = 16;

/// Syntax of each command, for error messages.
const USAGES: &[&str] = &[
    "address A/PREFIX ROUTER [DNS]",
    "ipv6",
    "dns NAME [RESOLVER]",
    "dns6 NAME [RESOLVER]",
    "ping HOST N",
    "crr HOST:PORT N [xM] [close|get|echo]",
    "rr HOST:PORT N [xM]",
    "stream HOST:PORT BYTES up|down|mixed [raw] [xM]",
    "flood HOST:PORT N [SIZE] [xM]",
    "serve PORT [PORT…] TIME, as serve 7 5s",
    "reset",
    "wait TIME, as wait 60ms",
    "fill MIB",
    "disk N write|check|discard|zero BYTES, or disk N random BYTES COUNT [xM], or disk N log|scatter BYTES EVERY [xM]",
    "vsock echo PORT N, or vsock sink|source|connect PORT N BYTES, or vsock messages|abort PORT N COUNT",
    "balloon report MIB|follow TIME, as balloon follow 5s",
    "selftest",
];

/// Parsed command line of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// Static address; `None` to take a lease.
    pub address: Option<StaticAddress>,
    /// Workloads to run, in order.
    pub workloads: Vec<Workload>,
}

/// Static configuration, in place of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticAddress {
    /// Address of the guest.
    pub address: Ipv4Addr,
    /// Prefix length of the guest's network, bits.
    pub prefix: u8,
    /// Default router of the guest's network.
    pub router: Ipv4Addr,
    /// Resolver; `None` without one.
    pub dns: Option<Ipv4Addr>,
}

/// One workload of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Waits for an IPv6 address.
    Ipv6,
    /// Looks up a name.
    Dns {
        /// Name to look up.
        name: String,
        /// Family of the addresses to look for.
        family: Family,
        /// Resolver to ask; `None` for the network's.
        resolver: Option<IpAddr>,
    },
    /// Sends ICMP echo requests.
    Ping {
        /// Destination of the requests.
        host: Host,
        /// Number of requests to send.
        count: u32,
    },
    /// Opens connections, exchanges data on each, and closes them.
    Connections {
        /// Server to connect to.
        server: Server,
        /// Number of connections in all.
        count: u32,
        /// Number of connections at a time.
        at_once: u32,
        /// Data exchange on each connection.
        exchange: Exchange,
    },
    /// Sends small messages to an echo server on open connections, and awaits each answer.
    RequestResponse {
        /// Echo server to connect to.
        server: Server,
        /// Number of messages in all.
        count: u32,
        /// Number of connections at a time.
        at_once: u32,
    },
    /// Streams bytes in one direction.
    Stream {
        /// Stream server to connect to.
        server: Server,
        /// Bytes on each connection.
        bytes: u64,
        /// Direction of the stream.
        direction: Direction,
        /// If set, the bytes are zeroes and are not checked.
        raw: bool,
        /// Number of connections at a time.
        at_once: u32,
    },
    /// Sends datagrams as fast as the device takes them.
    Flood {
        /// Destination of the datagrams.
        server: Server,
        /// Number of frames in all.
        count: u32,
        /// Length of a frame, bytes with the Ethernet header.
        frame_bytes: u32,
        /// Number of senders at a time.
        at_once: u32,
    },
    /// Echoes received data, by TCP and UDP.
    Serve {
        /// Local ports to serve.
        ports: Vec<u16>,
        /// Duration of the service, milliseconds.
        ms: u32,
    },
    /// Resets the machine, which ends the run or restarts it.
    Reset,
    /// Waits without traffic of its own.
    Wait {
        /// Duration of the wait, milliseconds.
        ms: u32,
    },
    /// Fills memory, which stays taken until the end.
    Fill {
        /// How much, MiB.
        mib: u32,
    },
    /// Writes predictable bytes to a disk, checks them, or clears its start, before the network is used.
    Disk {
        /// Number of the disk, in the order of the PCI bus.
        number: u32,
        /// What is done there.
        work: DiskWork,
        /// Number of bytes, from the start of the disk: whole sectors, or whole blocks of 4 KiB for
        /// random reads, scattered writes and a log.
        bytes: u64,
    },
    /// Streams between the guest and programs of the host, before the network is used.
    Vsock(VsockWork),
    /// Gives memory to the balloon, before the network is used.
    Balloon(BalloonWork),
    /// Runs the driver's self-test.
    SelfTest,
}

impl Workload {
    /// Returns how many units of work the CPUs share, and how many connections they have at once;
    /// `None` for a workload that one CPU does alone.
    pub fn shared(&self) -> Option<(u64, u32)> {
        match *self {
            Workload::Connections { count, at_once, .. }
            | Workload::RequestResponse { count, at_once, .. }
            | Workload::Flood { count, at_once, .. } => Some((count.into(), at_once)),
            Workload::Stream { at_once, .. } => Some((at_once.into(), at_once)),
            _ => None,
        }
    }

    /// Returns whether it needs an IPv6 address of the guest.
    pub fn is_by_ipv6(&self) -> bool {
        match self {
            Workload::Ipv6 => true,
            Workload::Dns { resolver, .. } => resolver.is_some_and(|resolver| resolver.is_ipv6()),
            Workload::Ping { host, .. } => host.family() == Family::Ipv6,
            Workload::Connections { server, .. }
            | Workload::RequestResponse { server, .. }
            | Workload::Stream { server, .. }
            | Workload::Flood { server, .. } => server.host.family() == Family::Ipv6,
            _ => false,
        }
    }

    /// Returns the workload's word on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Ipv6 => "ipv6",
            Workload::Dns { family, .. } => match family {
                Family::Ipv4 => "dns",
                Family::Ipv6 => "dns6",
            },
            Workload::Ping { .. } => "ping",
            Workload::Connections { .. } => "crr",
            Workload::RequestResponse { .. } => "rr",
            Workload::Stream { .. } => "stream",
            Workload::Flood { .. } => "flood",
            Workload::Serve { .. } => "serve",
            Workload::Reset => "reset",
            Workload::Wait { .. } => "wait",
            Workload::Fill { .. } => "fill",
            Workload::Disk { .. } => "disk",
            Workload::Vsock(_) => "vsock",
            Workload::Balloon(_) => "balloon",
            Workload::SelfTest => "selftest",
        }
    }
}

/// Address, or name to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Address of the host.
    Address(IpAddr),
    /// Name of the host, without a trailing dot, and the family by which it is reached.
    Name(String, Family),
}

impl Host {
    /// Returns the family by which the host is reached.
    pub fn family(&self) -> Family {
        match self {
            Host::Address(IpAddr::V4(_)) => Family::Ipv4,
            Host::Address(IpAddr::V6(_)) => Family::Ipv6,
            Host::Name(_, family) => *family,
        }
    }
}

/// Version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Addresses of A records.
    Ipv4,
    /// Addresses of AAAA records.
    Ipv6,
}

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Host of the server.
    pub host: Host,
    /// Port of the server.
    pub port: u16,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.host.family()) {
            (Host::Address(address), Family::Ipv4) => write!(f, "{address}:{}", self.port),
            (Host::Address(address), Family::Ipv6) => write!(f, "[{address}]:{}", self.port),
            (Host::Name(name, _), Family::Ipv4) => write!(f, "{name}:{}", self.port),
            (Host::Name(name, _), Family::Ipv6) => write!(f, "[{name}]:{}", self.port),
        }
    }
}

/// Data exchange on a connection of `crr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Reads until the server closes.
    Close,
    /// Sends an HTTP request, then reads until the server closes.
    Get,
    /// Sends 64 bytes and reads them back; the guest closes first.
    Echo,
}

impl Exchange {
    /// Returns the exchange's word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Exchange::Close => "close",
            Exchange::Get => "get",
            Exchange::Echo => "echo",
        }
    }
}

/// Direction of a stream, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest to the server.
    Up,
    /// From the server to the guest.
    Down,
    /// A third of the connections each way, and a third idle until the others have ended.
    Mixed,
}

impl Direction {
    /// Returns the direction's word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Up => "up",
            Direction::Down => "down",
            Direction::Mixed => "mixed",
        }
    }
}

/// Work of the workload `disk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskWork {
    /// Writes the bytes, and flushes.
    Write,
    /// Reads and checks the bytes.
    Check,
    /// Discards the bytes.
    Discard,
    /// Makes the bytes zeroes.
    Zero,
    /// Reads and checks 4 KiB at random places.
    Random {
        /// Number of reads.
        count: u32,
        /// Number of reads at a time.
        at_once: u16,
    },
    /// Writes each block of 4 KiB once, in an order in which none is behind its neighbour.
    Scatter {
        /// Number of writes behind which there is a flush.
        every: u32,
        /// Number of writes at a time.
        at_once: u16,
    },
    /// Writes blocks of 4 KiB in order, and says of how many a flush was answered.
    Log {
        /// Number of writes for which a flush is made.
        every: u32,
        /// Number of writes at a time.
        at_once: u16,
    },
}

/// Work of the workload `vsock`: a port is served until so many connections have ended, or connected
/// to so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VsockWork {
    /// What the port does.
    pub service: VsockService,
    /// Port of the guest, or of the host to which it connects.
    pub port: u32,
    /// Number of connections after which it ends.
    pub count: u32,
}

/// What a port of vsock does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VsockService {
    /// Sends back what comes.
    Echo,
    /// Takes so many bytes, then sends a receipt.
    Sink(u64),
    /// Sends so many zeroes.
    Source(u64),
    /// It is the guest that connects, sends so many bytes, and gets the same back.
    Connect(u64),
    /// It is the guest that connects, all connections at once, and so many numbered messages go each
    /// way on each.
    Messages(u64),
    /// The same, but the guest resets each connection behind its last message.
    Abort(u64),
}

impl VsockService {
    /// Returns the service's word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            VsockService::Echo => "echo",
            VsockService::Sink(_) => "sink",
            VsockService::Source(_) => "source",
            VsockService::Connect(_) => "connect",
            VsockService::Messages(_) => "messages",
            VsockService::Abort(_) => "abort",
        }
    }

    /// Returns whether the guest listens, and programs of the host connect.
    pub fn listens(self) -> bool {
        match self {
            VsockService::Echo | VsockService::Sink(_) | VsockService::Source(_) => true,
            VsockService::Connect(_) | VsockService::Messages(_) | VsockService::Abort(_) => false,
        }
    }
}

/// Work of `balloon`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalloonWork {
    /// Reports memory that was filled as free, and uses it again.
    Report {
        /// How much, MiB.
        mib: u32,
    },
    /// Gives what the balloon asks for, and takes it back.
    Follow {
        /// For how long, ms.
        ms: u32,
    },
}

/// Error in a command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{command}`: {why}")]
pub struct CommandError {
    /// Command that is wrong: the part between two `;`.
    pub command: String,
    /// Reason, with the right syntax.
    pub why: String,
}

#[cfg(test)]
#[path = "command_test.rs"]
mod tests;
