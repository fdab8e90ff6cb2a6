//! Reading of flow logs: flows, questions and refusals; other events are skipped.
//!
//! A flow's name is the recorded one, by which DNS opened its address; otherwise the last name for
//! which the VM's DNS answers gave that address.
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use serde::Deserialize;
use slipgate_abi::Protocol;

use crate::{DNS_PORT, Destination, document::ConfigError};

/// Maximum number of ids kept of flows that have begun and not ended, so that each flow is reported
/// once.
const MOST_LIVE: usize = 1 << 20;
/// Maximum number of addresses, per VM and address, whose name is kept.
const MOST_ADDRESSES: usize = 1 << 20;

/// An event of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// A flow that the guest opened.
    Flow {
        /// Name of the VM.
        vm: String,
        /// Destination of the flow.
        to: Destination,
        /// Name whose DNS answer gave the address, if known.
        name: Option<String>,
        /// Id of the flow in the log.
        id: Option<String>,
        /// Start of the flow, ns since 1970.
        at_ns: Option<u64>,
        /// Whether the flow has ended already; no [`Seen::End`] follows.
        is_over: bool,
    },
    /// A flow that was led to the host's loopback.
    Loopback {
        /// Name of the VM.
        vm: String,
        /// Destination of the flow.
        to: Destination,
        /// Port of the host's loopback.
        host_port: u16,
    },
    /// The end of a flow whose start was reported.
    End {
        /// Name of the VM.
        vm: String,
        /// Id of the flow in the log.
        id: String,
    },
    /// A question to DNS, and how it was answered.
    Question {
        /// Name of the VM.
        vm: String,
        /// Name that was asked for; empty of a message that is not accepted as a query.
        name: String,
        /// Name of the record type.
        kind: String,
        /// Aliases (CNAME chain) in the answer.
        chain: Vec<String>,
        /// Time of the question, ns since 1970.
        at_ns: Option<u64>,
        /// Whether the cache answered it.
        from_cache: bool,
    },
    /// Flows that the rules refused, with the destination of one of them.
    Refused {
        /// Name of the VM.
        vm: String,
        /// Destination of the flow.
        to: Destination,
        /// Name whose DNS answer gave the address, if known.
        name: Option<String>,
        /// Number of refused flows.
        count: u64,
    },
}

/// The fields of a line that are used. Older logs have no `event`: all of their lines are ends of
/// flows.
#[derive(Deserialize)]
struct Line {
    event: Option<String>,
    #[serde(default)]
    vm: String,
    id: Option<String>,
    proto: Option<String>,
    remote: Option<SocketAddr>,
    host: Option<SocketAddr>,
    direction: Option<String>,
    dns_name: Option<String>,
    name: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    chain: Vec<String>,
    #[serde(default)]
    answers: Vec<IpAddr>,
    reason: Option<String>,
    count: Option<u64>,
    time: Option<String>,
    started: Option<String>,
    source: Option<String>,
    rcode: Option<String>,
}

impl Seen {
    /// Returns the name of the VM.
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

/// Maximum number of VMs that an error lists.
const MOST_NAMED: usize = 16;

/// Names of the VMs that a log has records of. A mistyped name must not pass for a VM without
/// findings.
#[derive(Debug, Default)]
pub struct Recorded(BTreeSet<String>);

impl Recorded {
    /// Adds the VM of a record.
    pub fn note(&mut self, seen: &Seen) {
        if !self.0.contains(seen.vm()) {
            self.0.insert(seen.vm().to_owned());
        }
    }

    /// Checks that the log has records. `vm`: VM that must have one; `flag`: flag that gives it.
    ///
    /// # Errors
    /// The log has no record, or none of `vm`.
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

/// Reader of a flow log, line by line.
#[derive(Debug, Default)]
pub struct Reader {
    /// Last name for which a VM's DNS answers gave an address.
    names: HashMap<(String, IpAddr), String>,
    /// Ids of flows that have begun and not ended.
    live: HashSet<String>,
    /// Number of lines that were not records.
    pub foreign: u64,
    /// Number of records that the log reports as lost.
    pub lost: u64,
    /// Number of addresses in DNS answers for which there was no room.
    pub untold: u64,
}

impl Reader {
    /// Returns the event of a line; `None`: the line is not used, or its event was reported
    /// already.
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
                if self.live.len() < MOST_LIVE
                    && let Some(id) = &line.id
                {
                    self.live.insert(id.clone());
                }
                self.flow(line, false)
            }
            Some("flow_end") | None => match line.id {
                Some(id) if self.live.remove(&id) => Some(Seen::End { vm: line.vm, id }),
                _ => self.flow(line, true),
            },
            Some("dns") => {
                let lower = |name: &str| name.trim_end_matches('.').to_ascii_lowercase();
                let source = line.source.as_deref();
                // Nobody is asked about a message that is not accepted as a query.
                let failed = line
                    .rcode
                    .as_deref()
                    .is_none_or(|rcode| rcode == "SERVFAIL");
                let name = match source == Some("none") && !failed {
                    true => String::new(),
                    false => lower(&line.name?),
                };
                for addr in line.answers {
                    self.remember_name((line.vm.clone(), addr), &name);
                }
                Some(Seen::Question {
                    vm: line.vm,
                    name,
                    kind: line.kind.unwrap_or_default(),
                    chain: line.chain.iter().map(|name| lower(name)).collect(),
                    at_ns: line.time.as_deref().and_then(time_ns),
                    // An empty answer to AAAA, where the host has no IPv6, is the engine's own.
                    from_cache: source == Some("cache")
                        || source == Some("policy")
                            && matches!(line.rcode.as_deref(), Some("NOERROR" | "NXDOMAIN")),
                })
            }
            Some("lost") => {
                self.lost += line.count.unwrap_or(1);
                None
            }
            Some("refused") => {
                // Refusals by a quota are independent of the rules.
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
        // slipgate itself answers port 53, whatever the rules.
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

    fn remember_name(&mut self, to: (String, IpAddr), name: &str) {
        let has_room = self.names.len() < MOST_ADDRESSES;
        match self.names.get_mut(&to) {
            Some(known) => name.clone_into(known),
            None if has_room => drop(self.names.insert(to, name.to_owned())),
            None => self.untold += 1,
        }
    }

    fn name_of(&self, vm: &str, addr: IpAddr) -> Option<String> {
        self.names.get(&(vm.to_owned(), addr)).cloned()
    }
}

/// Parses a time of a record, `2026-01-31T12:00:00.000Z` (RFC 3339 in UTC), to ns since 1970.
fn time_ns(text: &str) -> Option<u64> {
    // jiff also reads a blank or a small letter for T and Z, and other offsets.
    if !text.ends_with('Z') || !text.contains('T') {
        return None;
    }
    let time: jiff::Timestamp = text.parse().ok()?;
    u64::try_from(time.as_nanosecond()).ok()
}

fn destination(line: &Line) -> Option<Destination> {
    let protocol = Protocol::by_name(line.proto.as_deref()?)?;
    let remote = line.remote?;
    Some(Destination {
        addr: remote.ip(),
        port: match protocol {
            Protocol::Icmp | Protocol::Icmpv6 => 0,
            _ => remote.port(),
        },
        protocol,
    })
}

#[cfg(test)]
#[path = "flow_log_test.rs"]
mod tests;
