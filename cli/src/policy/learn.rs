//! `slipgate policy learn`: the least policy that covers what was seen.
//!
//! By name where the flow's name is known, by address elsewhere; each with its port and protocol. A
//! name whose address is in protected space needs a rule by address too, or its answers are
//! refused; and so they are if the names that an alias leads through may not be asked for: these
//! get a rule like that of the name.
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::Ipv4Addr,
    os::fd::AsFd as _,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use slipgate_abi::Protocol;
use userspace_nat::rules::{Action, Policy, Rule, wire};

use super::flow_log::{Follower, Seen};
use crate::{
    args::{DEFAULT_GATEWAY, LearnArgs},
    show::print_once,
};

/// How often a log that is followed is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// So many names beneath one parent become one rule, with `--generalise`.
const ENOUGH: usize = 2;

pub(super) fn run(args: &LearnArgs) -> anyhow::Result<ExitCode> {
    let mut learnt = Learnt::default();
    let mut follower = Follower::open(&args.flow_log)?;
    let mut each = |seen| learnt.take(seen, args.vm.as_deref());
    follower.more(&mut each)?;
    if args.follow {
        follow(args, &mut follower, &mut each)?;
    }
    if follower.reader.foreign > 0 {
        crate::log::say(format_args!(
            "{} lines of {} are no records and were left out",
            follower.reader.foreign,
            args.flow_log.display()
        ));
    }
    if learnt.flows == 0 {
        let whose = args
            .vm
            .as_ref()
            .map(|vm| format!(" of {vm}"))
            .unwrap_or_default();
        crate::log::say(format_args!(
            "{} has no flow{whose} that a guest opened: nothing was learnt",
            args.flow_log.display()
        ));
    }
    print_once(&learnt.toml(args.vm.as_deref(), args.generalise))?;
    Ok(ExitCode::SUCCESS)
}

fn follow(
    args: &LearnArgs,
    follower: &mut Follower,
    each: &mut dyn FnMut(Seen),
) -> anyhow::Result<()> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    let signals = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC).context("waiting for ^C")?;
    let end = args
        .seconds
        .map(|s| Instant::now() + Duration::from_secs(s));
    crate::log::say(format_args!(
        "following {}; ^C prints what was learnt",
        args.flow_log.display()
    ));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let wait = left.unwrap_or(LOOK_EVERY).min(LOOK_EVERY);
        let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let asked = poll(&mut fds, timeout).context("waiting for ^C")? > 0;
        follower.more(each)?;
        if asked || left.is_some_and(|left| left.is_zero()) {
            return Ok(());
        }
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Host {
    /// Without `*.`.
    Name(String),
    Beneath(String),
    Address(Ipv4Addr),
}

/// What was seen, each with its flows.
#[derive(Debug, Default)]
struct Learnt {
    seen: BTreeMap<(Host, u16, &'static str), u64>,
    /// Names that answers for a name led through.
    aliases: BTreeMap<String, BTreeSet<String>>,
    /// What was led to the host's loopback: where to, by which protocol, and to which port.
    led: BTreeMap<(Ipv4Addr, u16, &'static str, u16), u64>,
    flows: u64,
}

impl Learnt {
    fn take(&mut self, seen: Seen, only: Option<&str>) {
        let is_other = |vm: &str| only.is_some_and(|only| only != vm);
        let (vm, to, name) = match seen {
            Seen::Flow { vm, to, name } => (vm, to, name),
            Seen::Loopback { vm, to, host_port } => {
                if !is_other(&vm) {
                    let key = (to.addr, to.port, to.protocol.name(), host_port);
                    *self.led.entry(key).or_default() += 1;
                    self.flows += 1;
                }
                return;
            }
            Seen::Question {
                vm, name, chain, ..
            } if !is_other(&vm) && !chain.is_empty() => {
                // One that no rule can have leads nowhere, whatever is allowed.
                let chain = chain.into_iter().filter(|name| wire(name).is_ok());
                self.aliases.entry(name).or_default().extend(chain);
                return;
            }
            _ => return,
        };
        if is_other(&vm) {
            return;
        }
        self.flows += 1;
        let mut note = |host| {
            *self
                .seen
                .entry((host, to.port, to.protocol.name()))
                .or_default() += 1;
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

    fn toml(mut self, vm: Option<&str>, generalise: bool) -> String {
        self.lead_on();
        if generalise {
            self.generalise();
        }
        let whose = vm.map(|vm| format!(" of {vm}")).unwrap_or_default();
        let mut text = format!(
            "# The least policy for what was seen{whose}: {} flows, {} rules.\n\
             default = \"deny\"\n\
             rules = [\n",
            self.flows,
            self.seen.len()
        );
        for ((host, port, protocol), flows) in &self.seen {
            let host = match host {
                Host::Name(name) => name.clone(),
                Host::Beneath(parent) => format!("*.{parent}"),
                Host::Address(addr) => addr.to_string(),
            };
            let pattern = match *protocol {
                icmp if icmp == Protocol::Icmp.name() => format!("{host}/{icmp}"),
                protocol => format!("{host}:{port}/{protocol}"),
            };
            let flows = count(*flows);
            let _ = writeln!(text, "  {{ allow = \"{pattern}\" }}, # {flows}");
        }
        text.push_str("]\n");
        if !self.led.is_empty() {
            text.push_str("[host_loopback]\nports = [\n");
        }
        for ((addr, port, protocol, host_port), flows) in &self.led {
            let addr = match addr.to_string() {
                gateway if gateway == DEFAULT_GATEWAY => String::new(),
                addr => format!("{addr}:"),
            };
            let host_port = match host_port {
                same if same == port => String::new(),
                other => format!(":{other}"),
            };
            let flows = count(*flows);
            let _ = writeln!(text, "  \"{addr}{port}{host_port}/{protocol}\", # {flows}");
        }
        if !self.led.is_empty() {
            text.push_str("]\n");
        }
        text
    }

    /// What is asked for on the way to a name is let in as the name is.
    fn lead_on(&mut self) {
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

    /// Names beneath one parent, at one port, become one rule.
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
            if names.len() < ENOUGH {
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

/// Whether anybody can have a name beneath it, as far as can be told without a list: `com`,
/// `co.uk`.
fn is_suffix(parent: &str) -> bool {
    match parent.rsplit_once('.') {
        None => true,
        Some((second, top)) => !second.contains('.') && top.len() == 2 && second.len() <= 3,
    }
}

fn is_protected(addr: Ipv4Addr) -> bool {
    let nothing = Policy::new(Action::Deny, Vec::<Rule>::new());
    nothing.protected(addr).is_some()
}
