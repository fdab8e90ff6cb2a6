//! What a flow log tells of the past: flows, questions and refusals, whatever else is in it.
//!
//! A flow's name is the one that DNS opened its address by, as recorded; else the last one for which
//! the VM was told that address.
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    path::Path,
};

use serde::Deserialize;
use slipgate_abi::Protocol;

use crate::{DNS_PORT, Destination, document::ConfigError};

/// Ids of flows that have begun and not ended are kept to tell each flow once; of so many at most.
const MOST_OPEN: usize = 1 << 20;
/// Addresses, with their VM, of which the name is known: of so many at most.
const MOST_TOLD: usize = 1 << 20;

/// One thing that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// A flow that the guest opened.
    Flow {
        /// The VM's name.
        vm: String,
        /// Where to.
        to: Destination,
        /// The name that its address was told for.
        name: Option<String>,
        /// In the log.
        id: Option<String>,
        /// When it began, ns since 1970.
        at_ns: Option<u64>,
        /// It is over already: nothing will be told of its end.
        is_over: bool,
    },
    /// One that was led to the host's loopback.
    Loopback {
        /// The VM's name.
        vm: String,
        /// Where to.
        to: Destination,
        /// The port of the host's 127.0.0.1.
        host_port: u16,
    },
    /// The end of a flow of which the begin was told.
    End {
        /// The VM's name.
        vm: String,
        /// Its id in the log.
        id: String,
    },
    /// A question to DNS, by the type's name.
    Question {
        /// The VM's name.
        vm: String,
        /// The name that its address was told for.
        name: String,
        /// The record type's name.
        kind: String,
        /// The names that the answer led through.
        chain: Vec<String>,
        /// When it was asked, ns since 1970.
        at_ns: Option<u64>,
        /// It was answered from the cache.
        from_cache: bool,
    },
    /// Flows that the rules refused, with the destination of one of them.
    Refused {
        /// The VM's name.
        vm: String,
        /// Where to.
        to: Destination,
        /// The name that its address was told for.
        name: Option<String>,
        /// How many.
        count: u64,
    },
}

/// A line as far as it matters here. Older logs have no `event`: all of their lines are ends.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    event: Option<String>,
    #[serde(default)]
    vm: String,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    proto: Option<String>,
    #[serde(default)]
    remote: Option<SocketAddrV4>,
    #[serde(default)]
    host: Option<SocketAddrV4>,
    #[serde(default)]
    direction: Option<String>,
    #[serde(default)]
    dns_name: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    chain: Vec<String>,
    #[serde(default)]
    answers: Vec<IpAddr>,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    count: Option<u64>,
    #[serde(default)]
    time: Option<String>,
    #[serde(default)]
    started: Option<String>,
    #[serde(default)]
    source: Option<String>,
}

impl Seen {
    /// The VM it is of.
    pub fn vm(&self) -> &str {
        match self {
            Self::Flow { vm, .. }
            | Self::Loopback { vm, .. }
            | Self::End { vm, .. }
            | Self::Question { vm, .. }
            | Self::Refused { vm, .. } => vm,
        }
    }
}

/// VMs that are named when another was asked for.
const MOST_NAMED: usize = 16;

/// Whom a log speaks of: nothing is to be found in order of a VM whose name was mistyped.
#[derive(Debug, Default)]
pub struct Recorded(BTreeSet<String>);

impl Recorded {
    /// Notes whom a record is of.
    pub fn note(&mut self, seen: &Seen) {
        if !self.0.contains(seen.vm()) {
            self.0.insert(seen.vm().to_owned());
        }
    }

    /// Fails where there is no record of `vm`, or of any; `flag`: which names it.
    pub fn has(&self, vm: Option<&str>, flag: &'static str, log: &Path) -> Result<(), ConfigError> {
        let log = log.display();
        if self.0.is_empty() {
            let remedy = "give the --flow-log of a slipgate that has run";
            return Err(ConfigError::new(
                "--flow-log",
                log,
                "it has no records",
                remedy,
            ));
        }
        match vm {
            Some(vm) if !self.0.contains(vm) => {
                let some: Vec<&str> = self.0.iter().take(MOST_NAMED).map(|vm| &**vm).collect();
                let problem = format!("{log} has no record of it");
                let remedy = format!("there are records of {}", some.join(", "));
                Err(ConfigError::new(flag, vm, problem, remedy))
            }
            _ => Ok(()),
        }
    }
}

/// Makes sense of lines.
#[derive(Debug, Default)]
pub struct Reader {
    told: HashMap<(String, Ipv4Addr), String>,
    begun: HashSet<String>,
    /// Lines that were no record.
    pub foreign: u64,
    /// Records that were lost on their way here.
    pub lost: u64,
    /// Addresses that were told for a name, and for which there was no room.
    pub untold: u64,
}

impl Reader {
    /// What a line tells; `None`: nothing that matters, or what was told already.
    pub fn line(&mut self, text: &str) -> Option<Seen> {
        if text.trim().is_empty() {
            return None;
        }
        let Ok(line) = serde_json::from_str::<Line>(text) else {
            self.foreign += 1;
            return None;
        };
        match line.event.as_deref() {
            Some("flow_start") => {
                if self.begun.len() < MOST_OPEN
                    && let Some(id) = &line.id
                {
                    self.begun.insert(id.clone());
                }
                self.flow(line, false)
            }
            Some("flow_end") | None => match line.id {
                Some(id) if self.begun.remove(&id) => Some(Seen::End { vm: line.vm, id }),
                _ => self.flow(line, true),
            },
            Some("dns") => {
                let lower = |name: &str| name.trim_end_matches('.').to_ascii_lowercase();
                let name = lower(&line.name?);
                for answer in line.answers {
                    if let IpAddr::V4(addr) = answer {
                        self.tell((line.vm.clone(), addr), &name);
                    }
                }
                Some(Seen::Question {
                    vm: line.vm,
                    name,
                    kind: line.kind.unwrap_or_default(),
                    chain: line.chain.iter().map(|name| lower(name)).collect(),
                    at_ns: line.time.as_deref().and_then(time_ns),
                    from_cache: line.source.as_deref() == Some("cache"),
                })
            }
            Some("lost") => {
                self.lost += line.count.unwrap_or(1);
                None
            }
            Some("refused") => {
                // A quota's refusals say nothing of the rules.
                if !matches!(
                    line.reason.as_deref(),
                    Some("rule" | "default" | "default_deny" | "protected" | "dns_elsewhere")
                ) {
                    return None;
                }
                let to = destination(&line)?;
                Some(Seen::Refused {
                    name: self.name_of(&line.vm, to.addr),
                    vm: line.vm,
                    to,
                    count: line.count.unwrap_or(1),
                })
            }
            Some(_) => None,
        }
    }

    fn flow(&mut self, line: Line, is_over: bool) -> Option<Seen> {
        if line.direction.as_deref() == Some("inbound") {
            return None;
        }
        let Some(to) = destination(&line) else {
            self.foreign += 1;
            return None;
        };
        // It is answered by slipgate, whatever the rules.
        if to.port == DNS_PORT {
            return None;
        }
        if let Some(host) = line.host {
            return Some(Seen::Loopback {
                vm: line.vm,
                to,
                host_port: host.port(),
            });
        }
        let name = line.dns_name.or_else(|| self.name_of(&line.vm, to.addr));
        Some(Seen::Flow {
            vm: line.vm,
            to,
            name,
            id: line.id,
            at_ns: line.started.as_deref().and_then(time_ns),
            is_over,
        })
    }

    fn tell(&mut self, to: (String, Ipv4Addr), name: &str) {
        let has_room = self.told.len() < MOST_TOLD;
        match self.told.get_mut(&to) {
            Some(known) => name.clone_into(known),
            None if has_room => drop(self.told.insert(to, name.to_owned())),
            None => self.untold += 1,
        }
    }

    fn name_of(&self, vm: &str, addr: Ipv4Addr) -> Option<String> {
        self.told.get(&(vm.to_owned(), addr)).cloned()
    }
}

/// A time as records have it, `2026-01-31T12:00:00.000Z` (RFC 3339 in UTC), ns since 1970.
fn time_ns(text: &str) -> Option<u64> {
    // jiff also reads a blank or a small letter for T and Z, and other offsets.
    if !text.ends_with('Z') || !text.contains('T') {
        return None;
    }
    let time: jiff::Timestamp = text.parse().ok()?;
    u64::try_from(time.as_nanosecond()).ok()
}

fn destination(line: &Line) -> Option<Destination> {
    let protocol = match line.proto.as_deref()? {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "icmp" => Protocol::Icmp,
        _ => return None,
    };
    let remote = line.remote?;
    Some(Destination {
        addr: *remote.ip(),
        port: match protocol {
            Protocol::Icmp => 0,
            _ => remote.port(),
        },
        protocol,
    })
}

#[cfg(test)]
#[path = "flow_log_test.rs"]
mod tests;
