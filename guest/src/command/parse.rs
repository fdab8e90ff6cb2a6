//! Parser of the command line.
use alloc::{string::String, vec::Vec};
use core::{
    net::{IpAddr, Ipv6Addr},
    num::{NonZeroU32, NonZeroU64},
    str::FromStr,
};

use super::{
    AT_ONCE_MAX, BalloonWork, CommandError, CommandLine, Direction, DiskWork, Exchange,
    FRAME_BYTES, Family, Host, SERVED_PORTS, SERVED_PORTS_MAX, Server, StaticAddress, USAGES,
    VsockService, VsockWork, Workload,
};
use crate::virtio::block::{BLOCK_BYTES, BLOCKS_MAX, SECTOR_BYTES};

/// Parses a command line. An empty one is valid: the guest boots, takes a lease and ends.
///
/// # Errors
/// A command is unknown or has wrong words.
pub fn parse(line: &str) -> Result<CommandLine, CommandError> {
    let mut read = CommandLine::default();
    let parts = line.split(';').map(str::trim);
    for part in parts.filter(|part| !part.is_empty()) {
        let wrong = |why: String| CommandError {
            command: part.into(),
            why: match part.split_whitespace().next().and_then(usage) {
                Some(usage) => alloc::format!("{why}; it is `{usage}`"),
                None => why,
            },
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

/// Returns the syntax of a command; `None` if the word is no command.
fn usage(word: &str) -> Option<&'static str> {
    let of = |usage: &&&str| usage.split_whitespace().next() == Some(word);
    USAGES.iter().find(of).copied()
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
        "ipv6" => Workload::Ipv6,
        "dns" | "dns6" => Workload::Dns {
            name: name(words.next("a name")?)?,
            family: match word {
                "dns" => Family::Ipv4,
                _ => Family::Ipv6,
            },
            resolver: words.rest("a resolver's address")?,
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
            let direction = match words.take(&["up", "down", "mixed"]) {
                Some("up") => Direction::Up,
                Some("down") => Direction::Down,
                Some(_) => Direction::Mixed,
                None => return Err(words.expected("`up`, `down` or `mixed`")),
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
        "reset" => Workload::Reset,
        "wait" => Workload::Wait {
            ms: words.milliseconds()?,
        },
        "fill" => Workload::Fill {
            mib: words.count("how many MiB")?,
        },
        "serve" => {
            let mut ports = Vec::new();
            while ports.is_empty() || words.peek().is_some_and(|word| !word.ends_with('s')) {
                match words.parsed("a port")? {
                    port if SERVED_PORTS.contains(&port) && ports.len() < SERVED_PORTS_MAX => {
                        ports.push(port);
                    }
                    _ => return Err(served_ports_limits()),
                }
            }
            Workload::Serve {
                ports,
                ms: words.milliseconds()?,
            }
        }
        "disk" => {
            let number = words.parsed("the number of a disk")?;
            let known = [
                "write", "check", "discard", "zero", "random", "scatter", "log",
            ];
            let Some(action) = words.take(&known) else {
                let due = "`write`, `check`, `discard`, `zero`, `random`, `scatter` or `log`";
                return Err(words.expected(due));
            };
            let bytes: u64 = words.parsed("how many bytes")?;
            let (unit, name) = match action {
                "random" | "scatter" | "log" => (BLOCK_BYTES, "blocks"),
                _ => (SECTOR_BYTES, "sectors"),
            };
            if bytes == 0 || !bytes.is_multiple_of(unit as u64) {
                return Err(alloc::format!(
                    "{bytes} bytes are no whole {name} of {unit}"
                ));
            }
            let work = match action {
                "write" => DiskWork::Write,
                "check" => DiskWork::Check,
                "discard" => DiskWork::Discard,
                "zero" => DiskWork::Zero,
                "scatter" => DiskWork::Scatter {
                    every: words.count("after how many writes")?,
                    at_once: words.blocks_at_once()?,
                },
                "log" => DiskWork::Log {
                    every: words.count("after how many writes")?,
                    at_once: words.blocks_at_once()?,
                },
                _ => DiskWork::Random {
                    count: words.count("how many reads")?,
                    at_once: words.blocks_at_once()?,
                },
            };
            Workload::Disk {
                number,
                work,
                bytes,
            }
        }
        "vsock" => {
            let known = ["echo", "sink", "source", "connect", "messages", "abort"];
            let Some(service) = words.take(&known) else {
                let due = "`echo`, `sink`, `source`, `connect`, `messages` or `abort`";
                return Err(words.expected(due));
            };
            let port = words.parsed("a port")?;
            let count = words.count("how many connections")?;
            let service = match service {
                "echo" => VsockService::Echo,
                "sink" => VsockService::Sink(words.bytes()?),
                "connect" => VsockService::Connect(words.bytes()?),
                "messages" => VsockService::Messages(words.messages()?),
                "abort" => VsockService::Abort(words.messages()?),
                _ => VsockService::Source(words.bytes()?),
            };
            Workload::Vsock(VsockWork {
                service,
                port,
                count,
            })
        }
        "balloon" => Workload::Balloon(match words.take(&["report", "follow"]) {
            Some("report") => BalloonWork::Report {
                mib: words.count("how many MiB")?,
            },
            Some(_) => BalloonWork::Follow {
                ms: words.milliseconds()?,
            },
            None => return Err(words.expected("`report` or `follow`")),
        }),
        "selftest" => Workload::SelfTest,
        _ => {
            let known = "ipv6, dns, dns6, ping, crr, rr, stream, flood, serve, wait, fill, disk, vsock, balloon, \
                 selftest, address";
            return Err(alloc::format!("`{word}` is no workload; there are {known}"));
        }
    })
}

fn served_ports_limits() -> String {
    let (first, last) = (SERVED_PORTS.start(), SERVED_PORTS.end());
    alloc::format!("up to {SERVED_PORTS_MAX} ports from {first} to {last} can be served")
}

fn server(words: &mut Words<'_>) -> Result<Server, String> {
    let word = words.next("HOST:PORT")?;
    let read = word
        .rsplit_once(':')
        // An IPv6 address has brackets before its port.
        .filter(|(host, _)| host.starts_with('[') || !host.contains(':'))
        .map(|(host, port)| (host, port.parse::<u16>()));
    match read {
        Some((name, Ok(port))) if port != 0 => Ok(Server {
            host: host(name)?,
            port,
        }),
        _ => Err(alloc::format!("`{word}` is not HOST:PORT")),
    }
}

/// Parses an address, a name, or either in brackets, which is by IPv6.
fn host(word: &str) -> Result<Host, String> {
    let in_brackets = word
        .strip_prefix('[')
        .and_then(|word| word.strip_suffix(']'));
    match in_brackets {
        Some(inner) => match inner.parse::<Ipv6Addr>() {
            Ok(address) => Ok(Host::Address(address.into())),
            Err(_) => name(inner).map(|name| Host::Name(name, Family::Ipv6)),
        },
        None => match word.parse::<IpAddr>() {
            Ok(address) => Ok(Host::Address(address)),
            Err(_) => name(word).map(|name| Host::Name(name, Family::Ipv4)),
        },
    }
}

/// Checks that a name fits a DNS question (RFC 1035, 2.3.4). Returns it without its trailing dot.
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
        Err(alloc::format!("`{word}` is neither an address nor a name"))
    }
}

/// Iterator over the words of one command.
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

    /// Takes the next word if it is one of `words`.
    fn take(&mut self, words: &[&str]) -> Option<&'a str> {
        self.left.next_if(|word| words.contains(word))
    }

    fn parsed<T: FromStr>(&mut self, what: &str) -> Result<T, String> {
        let word = self.next(what)?;
        word.parse()
            .map_err(|_| alloc::format!("`{word}` is not {what}"))
    }

    /// Parses the last word, if there is one.
    fn rest<T: FromStr>(&mut self, what: &str) -> Result<Option<T>, String> {
        match self.peek() {
            None => Ok(None),
            Some(_) => self.parsed(what).map(Some),
        }
    }

    /// Parses a time: `60ms`, `2s`, or `60`, which is milliseconds.
    fn milliseconds(&mut self) -> Result<u32, String> {
        let word = self.next("a time, as 60ms or 2s,")?;
        let (number, each) = match word.strip_suffix("ms") {
            Some(number) => (number, 1),
            None => word.strip_suffix('s').map_or((word, 1), |s| (s, 1000)),
        };
        let number: Option<u32> = number.parse().ok();
        number.and_then(|n| n.checked_mul(each)).ok_or_else(|| {
            alloc::format!("`{word}` is no time in milliseconds or seconds, as 60ms or 2s")
        })
    }

    fn count(&mut self, what: &str) -> Result<u32, String> {
        self.parsed::<NonZeroU32>(what).map(NonZeroU32::get)
    }

    /// Parses a number of bytes above zero.
    fn bytes(&mut self) -> Result<u64, String> {
        let what = "how many bytes";
        self.parsed::<NonZeroU64>(what).map(NonZeroU64::get)
    }

    /// Parses a number of messages above zero.
    fn messages(&mut self) -> Result<u64, String> {
        self.count("how many messages").map(u64::from)
    }

    /// Parses `xM`; returns 1 if it is absent.
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

    /// Parses `xM` of a disk's requests; returns 1 if it is absent.
    fn blocks_at_once(&mut self) -> Result<u16, String> {
        match self.at_once()? {
            at_once if at_once <= BLOCKS_MAX.into() => Ok(at_once as u16),
            more => Err(alloc::format!("x{more} is not x1 to x{BLOCKS_MAX}")),
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
