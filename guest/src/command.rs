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
//! wait MS                            nothing, but for answering what comes
//! selftest                           the driver's and the device's agreement, walked through
//! ```
//!
//! HOST is an IPv4 address or a name. What a connection of `crr` exchanges: `close` sends nothing
//! and reads until the server ends; `get` does the same after an HTTP/1.0 request for `/`; `echo`
//! sends 64 bytes, awaits them and is the first to close. The default is `get` for port 80, and
//! `close` for any other.

use alloc::{string::String, vec::Vec};
use core::{fmt, net::Ipv4Addr, num::NonZeroU32, str::FromStr};

/// Connections or senders at once, at most.
pub const AT_ONCE_MAX: u32 = 1024;
/// Frames of `flood`, Ethernet header included: from the smallest to the largest there is.
pub const FRAME_BYTES: core::ops::RangeInclusive<u32> = 60..=65_535;

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

/// Reads a command line. An empty one is right: the guest boots, takes a lease and ends.
pub fn parse(line: &str) -> Result<CommandLine, CommandError> {
    let mut read = CommandLine::default();
    let parts = line.split(';').map(str::trim);
    for part in parts.filter(|part| !part.is_empty()) {
        let wrong = |why: String| CommandError {
            command: part.into(),
            why,
        };
        let mut words = Words::of(part);
        match words.next("a workload").map_err(wrong)? {
            "address" if read.address.is_none() && read.workloads.is_empty() => {
                read.address = Some(static_address(&mut words).map_err(wrong)?);
            }
            "address" => return Err(wrong("an address is given once, and first".into())),
            word => read
                .workloads
                .push(workload(word, &mut words).map_err(wrong)?),
        }
        words.end().map_err(wrong)?;
    }
    Ok(read)
}

fn static_address(words: &mut Words<'_>) -> Result<StaticAddress, String> {
    let cidr = words.next("an address with its prefix, as 10.0.2.15/24")?;
    let split = cidr
        .split_once('/')
        .and_then(|(address, prefix)| Some((address.parse().ok()?, prefix.parse().ok()?)));
    let Some((address, prefix @ 1..=30)) = split else {
        let why = alloc::format!(
            "`{cidr}` is not an IPv4 address with a prefix of 1 to 30, as 10.0.2.15/24"
        );
        return Err(why);
    };
    Ok(StaticAddress {
        address,
        prefix,
        router: words.parsed("the router's IPv4 address")?,
        dns: words.rest("a resolver's IPv4 address")?,
    })
}

fn workload(word: &str, words: &mut Words<'_>) -> Result<Workload, String> {
    Ok(match word {
        "dns" => Workload::Dns {
            name: name(words.next("a name")?)?,
            resolver: words.rest("a resolver's IPv4 address")?,
        },
        "ping" => Workload::Ping {
            host: host(words.next("an address")?)?,
            count: words.count("how often")?,
        },
        "crr" => {
            let server = server(words)?;
            let count = words.count("how many connections")?;
            let at_once = words.at_once()?;
            let exchange = match words.take(&["close", "get", "echo"]) {
                Some("get") => Exchange::Get,
                Some("echo") => Exchange::Echo,
                None if server.port == 80 => Exchange::Get,
                _ => Exchange::Close,
            };
            Workload::Connections {
                server,
                count,
                at_once,
                exchange,
            }
        }
        "rr" => Workload::RequestResponse {
            server: server(words)?,
            count: words.count("how many messages")?,
            at_once: words.at_once()?,
        },
        "stream" => {
            let server = server(words)?;
            let bytes = words.parsed("how many bytes")?;
            let direction = match words.take(&["up", "down"]) {
                Some("up") => Direction::Up,
                Some(_) => Direction::Down,
                None => return Err(words.expected("`up` or `down`")),
            };
            Workload::Stream {
                server,
                bytes,
                direction,
                raw: words.take(&["raw"]).is_some(),
                at_once: words.at_once()?,
            }
        }
        "flood" => {
            let server = server(words)?;
            let count = words.count("how many frames")?;
            let frame_bytes = match words.peek() {
                Some(size) if !size.starts_with('x') => words.parsed("the size of a frame")?,
                _ => 64,
            };
            if !FRAME_BYTES.contains(&frame_bytes) {
                let (least, most) = (FRAME_BYTES.start(), FRAME_BYTES.end());
                return Err(alloc::format!("a frame is of {least} to {most} bytes"));
            }
            Workload::Flood {
                server,
                count,
                frame_bytes,
                at_once: words.at_once()?,
            }
        }
        "wait" => Workload::Wait {
            ms: words.parsed("milliseconds")?,
        },
        "selftest" => Workload::SelfTest,
        _ => {
            let known = "dns, ping, crr, rr, stream, flood, wait, selftest, address";
            return Err(alloc::format!("`{word}` is no workload; there are {known}"));
        }
    })
}

fn server(words: &mut Words<'_>) -> Result<Server, String> {
    let word = words.next("HOST:PORT")?;
    let read = word
        .split_once(':')
        .map(|(host, port)| (host, port.parse::<u16>()));
    match read {
        Some((name, Ok(port))) if port != 0 => Ok(Server {
            host: host(name)?,
            port,
        }),
        _ => Err(alloc::format!("`{word}` is not HOST:PORT")),
    }
}

fn host(word: &str) -> Result<Host, String> {
    match word.parse() {
        Ok(address) => Ok(Host::Address(address)),
        Err(_) => name(word).map(Host::Name),
    }
}

/// A name that fits a DNS question (RFC 1035, 2.3.4).
fn name(word: &str) -> Result<String, String> {
    let name = word.strip_suffix('.').unwrap_or(word);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if name.len() <= 253 && name.split('.').all(label) {
        Ok(name.into())
    } else {
        Err(alloc::format!(
            "`{word}` is neither an IPv4 address nor a name"
        ))
    }
}

/// The words of one command, one after the other.
struct Words<'a> {
    left: core::iter::Peekable<core::str::SplitWhitespace<'a>>,
}

impl<'a> Words<'a> {
    fn of(command: &'a str) -> Self {
        Words {
            left: command.split_whitespace().peekable(),
        }
    }

    fn peek(&mut self) -> Option<&'a str> {
        self.left.peek().copied()
    }

    fn next(&mut self, what: &str) -> Result<&'a str, String> {
        match self.left.next() {
            Some(word) => Ok(word),
            None => Err(self.expected(what)),
        }
    }

    /// The next word, if it is one of these.
    fn take(&mut self, words: &[&str]) -> Option<&'a str> {
        self.left.next_if(|word| words.contains(word))
    }

    fn parsed<T: FromStr>(&mut self, what: &str) -> Result<T, String> {
        let word = self.next(what)?;
        word.parse()
            .map_err(|_| alloc::format!("`{word}` is not {what}"))
    }

    /// The last word, if there is one more.
    fn rest<T: FromStr>(&mut self, what: &str) -> Result<Option<T>, String> {
        match self.peek() {
            None => Ok(None),
            Some(_) => self.parsed(what).map(Some),
        }
    }

    fn count(&mut self, what: &str) -> Result<u32, String> {
        self.parsed::<NonZeroU32>(what).map(NonZeroU32::get)
    }

    /// `xM`, or 1 if there is none.
    fn at_once(&mut self) -> Result<u32, String> {
        let is_at_once = |word: &&str| word.starts_with('x');
        let Some(word) = self.left.next_if(is_at_once) else {
            return Ok(1);
        };
        match word[1..].parse() {
            Ok(at_once @ 1..=AT_ONCE_MAX) => Ok(at_once),
            _ => Err(alloc::format!("`{word}` is not x1 to x{AT_ONCE_MAX}")),
        }
    }

    fn expected(&mut self, what: &str) -> String {
        match self.peek() {
            Some(word) => alloc::format!("{what} is due where `{word}` is"),
            None => alloc::format!("{what} is missing"),
        }
    }

    fn end(mut self) -> Result<(), String> {
        match self.peek() {
            None => Ok(()),
            Some(word) => Err(alloc::format!("`{word}` is one word too many")),
        }
    }
}

#[cfg(test)]
#[path = "command_test.rs"]
mod tests;
