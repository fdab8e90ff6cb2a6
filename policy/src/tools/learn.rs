//! Learning of the least policy that covers recorded flows.
//!
//! A flow gets a rule by name where its name is known, and by address otherwise; each with its port
//! and protocol. A name with an address in protected space also needs a rule by address, or its
//! answers are refused. Answers are also refused if the names of an alias chain may not be asked
//! for: these get rules like that of the name.
//!
//! A guest chooses how many destinations and names there are, so they are bounded.
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
};

use slipgate_abi::Protocol;

use super::flow_log::Seen;
use crate::{Action, Policy, Rule, wire};

/// Maximum number of distinct destinations: nobody reads a policy with more rules.
const MOST_SEEN: usize = 16_384;
/// Maximum number of aliases per name.
const MOST_ALIASES: usize = 256;
/// Number of names beneath one parent that become one rule with `--generalise`.
const MIN_FAMILY: usize = 2;

/// Host of a rule.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Host {
    /// One exact DNS name.
    Name(String),
    /// All names beneath a parent, which is given without `*.`.
    Beneath(String),
    Address(IpAddr),
}

/// Recorded destinations, each with its number of flows.
#[derive(Debug, Default)]
pub struct Learnt {
    /// Number of flows by host, port and protocol.
    seen: BTreeMap<(Host, u16, &'static str), u64>,
    /// Aliases (CNAME chain) of each name, from its answers.
    aliases: BTreeMap<String, BTreeSet<String>>,
    /// Number of flows to the host's loopback by destination address, port, protocol, and the
    /// host's port.
    loopback: BTreeMap<(IpAddr, u16, &'static str, u16), u64>,
    /// Number of flows taken.
    flows: u64,
    /// Number of flows to new destinations for which there was no room.
    left_out: u64,
    /// Number of aliases for which there was no room.
    aliases_left_out: u64,
}

impl Learnt {
    /// Takes a record. `only`: VM whose records are taken; `None` for all.
    pub fn take(&mut self, seen: Seen, only: Option<&str>) {
        let is_other = |vm: &str| only.is_some_and(|only| only != vm);
        let (vm, to, name) = match seen {
            Seen::Flow { vm, to, name, .. } => (vm, to, name),
            Seen::Loopback { vm, to, host_port } => {
                if !is_other(&vm) {
                    let key = (to.addr, to.port, to.protocol.name(), host_port);
                    // Bounded by the number of entries in policies.
                    *self.loopback.entry(key).or_default() += 1;
                    self.flows += 1;
                }
                return;
            }
            Seen::Question {
                vm, name, chain, ..
            } if !is_other(&vm) && !chain.is_empty() => {
                // An alias that no rule can name is not allowed by any.
                let chain = chain.into_iter().filter(|name| wire(name).is_ok());
                self.add_aliases(name, chain.collect());
                return;
            }
            _ => return,
        };
        if is_other(&vm) {
            return;
        }
        self.flows += 1;
        let mut note = |host| {
            let key = (host, to.port, to.protocol.name());
            let has_room = self.seen.len() < MOST_SEEN;
            match self.seen.get_mut(&key) {
                Some(flows) => *flows += 1,
                None if has_room => drop(self.seen.insert(key, 1)),
                None => self.left_out += 1,
            }
        };
        // A name that no rule can have is known by its address alone.
        match name.filter(|name| wire(name).is_ok()) {
            Some(name) => {
                note(Host::Name(name.to_ascii_lowercase()));
                if is_protected(to.addr) {
                    note(Host::Address(to.addr));
                }
            }
            None => note(Host::Address(to.addr)),
        }
    }

    /// Whether no flow was taken.
    pub fn is_empty(&self) -> bool {
        self.flows == 0
    }

    /// Returns how much is not covered for lack of room, in words; `None` if everything is.
    pub fn too_much(&self) -> Option<String> {
        (self.left_out + self.aliases_left_out > 0).then(|| {
            format!(
                "{} flows and {} aliases were to something new after {MOST_SEEN} destinations, and \
                 are not covered",
                self.left_out, self.aliases_left_out
            )
        })
    }

    /// Adds the aliases of a name.
    fn add_aliases(&mut self, name: String, chain: BTreeSet<String>) {
        let has_room = self.aliases.len() < MOST_SEEN;
        match self.aliases.get_mut(&name) {
            Some(known) => {
                for alias in chain {
                    match known.len() < MOST_ALIASES {
                        true => drop(known.insert(alias)),
                        false => self.aliases_left_out += u64::from(!known.contains(&alias)),
                    }
                }
            }
            None if has_room => drop(self.aliases.insert(name, chain)),
            None => self.aliases_left_out += 1,
        }
    }

    /// Returns the policy as the text of a file. `remarks` precede it as comments. `gateway`: the
    /// guests' gateway.
    pub fn toml(
        mut self,
        vm: Option<&str>,
        gateway: IpAddr,
        generalise: bool,
        remarks: &[String],
    ) -> String {
        self.add_alias_rules();
        if generalise {
            self.generalise();
        }
        let whose = vm.map(|vm| format!(" of {vm}")).unwrap_or_default();
        let mut text: String = remarks.iter().map(|r| format!("# {r}.\n")).collect();
        let _ = write!(
            text,
            "# The least policy for the recorded flows{whose}: {} flows, {} rules.\n\
             default = \"deny\"\n\
             rules = [\n",
            self.flows,
            self.seen.len()
        );
        for ((host, port, protocol), flows) in &self.seen {
            let is_icmp = *protocol == Protocol::Icmp.name();
            let host = match host {
                Host::Name(name) => name.clone(),
                Host::Beneath(parent) => format!("*.{parent}"),
                Host::Address(IpAddr::V6(addr)) if !is_icmp => format!("[{addr}]"),
                Host::Address(addr) => addr.to_string(),
            };
            let pattern = match is_icmp {
                true => format!("{host}/{protocol}"),
                false => format!("{host}:{port}/{protocol}"),
            };
            let flows = count(*flows);
            let _ = writeln!(text, "  {{ allow = \"{pattern}\" }}, # {flows}");
        }
        text.push_str("]\n");
        if !self.loopback.is_empty() {
            text.push_str("[host_loopback]\nports = [\n");
        }
        for ((addr, port, protocol, host_port), flows) in &self.loopback {
            // By IPv6 only the gateway's own address leads there, and one entry is of both families.
            let of_ipv4 = (gateway, *port, *protocol, *host_port);
            if addr.is_ipv6() && self.loopback.contains_key(&of_ipv4) {
                continue;
            }
            let addr = match *addr == gateway || addr.is_ipv6() {
                true => String::new(),
                false => format!("{addr}:"),
            };
            let host_port = match host_port {
                same if same == port => String::new(),
                other => format!(":{other}"),
            };
            let flows = count(*flows);
            let _ = writeln!(text, "  \"{addr}{port}{host_port}/{protocol}\", # {flows}");
        }
        if !self.loopback.is_empty() {
            text.push_str("]\n");
        }
        text
    }

    /// Adds a rule for each alias of a name, with the name's port and protocol.
    fn add_alias_rules(&mut self) {
        let mut more = Vec::new();
        for (host, port, protocol) in self.seen.keys() {
            if let Host::Name(name) = host {
                let aliases = self.aliases.get(name).into_iter().flatten();
                more.extend(aliases.map(|alias| (Host::Name(alias.clone()), *port, *protocol)));
            }
        }
        for key in more {
            self.seen.entry(key).or_default();
        }
    }

    /// Replaces names beneath one parent, with one port and protocol, by one rule.
    fn generalise(&mut self) {
        let mut families: BTreeMap<(String, u16, &'static str), BTreeSet<String>> = BTreeMap::new();
        for (host, port, protocol) in self.seen.keys() {
            if let Host::Name(name) = host
                && let Some((_, parent)) = name.split_once('.')
                && !is_suffix(parent)
            {
                let family = families.entry((parent.to_owned(), *port, protocol));
                family.or_default().insert(name.clone());
            }
        }
        for ((parent, port, protocol), names) in families {
            if names.len() < MIN_FAMILY {
                continue;
            }
            let mut flows = 0;
            for name in names {
                let key = (Host::Name(name), port, protocol);
                flows += self.seen.remove(&key).unwrap_or(0);
            }
            self.seen
                .insert((Host::Beneath(parent), port, protocol), flows);
        }
    }
}

fn count(flows: u64) -> String {
    match flows {
        0 => "by alias".to_owned(),
        1 => "1 flow".to_owned(),
        n => format!("{n} flows"),
    }
}

/// Whether the parent is a public suffix (`com`, `co.uk`), as far as that can be told without a
/// list.
fn is_suffix(parent: &str) -> bool {
    match parent.rsplit_once('.') {
        None => true,
        Some((second, top)) => !second.contains('.') && top.len() == 2 && second.len() <= 3,
    }
}

fn is_protected(addr: IpAddr) -> bool {
    let nothing = Policy::new(Action::Deny, Vec::<Rule>::new());
    nothing.protected(addr).is_some()
}

#[cfg(test)]
#[path = "learn_test.rs"]
mod tests;
