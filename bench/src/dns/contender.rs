//! Resolvers that are compared.

use std::{fmt::Write as _, fs, process::Command};

use anyhow::{Context, Result};
use slipgate_testbed::{Guest, World, baseline, world::SERVER};

use crate::{
    contender::{Contender, NatProcess, Stand, guest, own_version, version, world},
    machine::Pinning,
};

pub(super) const DNSMASQ: &str = "dnsmasq";
/// Maximum number of answers in dnsmasq's cache: more than the workload of cached names needs, and
/// no more, because a new name costs dnsmasq the more the larger its full cache is.
const KEPT: u32 = 1_000;

pub(super) fn all() -> Vec<Box<dyn Contender>> {
    vec![
        Box::new(Resolver::Slipgate { rules: false }),
        Box::new(Resolver::Slipgate { rules: true }),
        Box::new(Resolver::Dnsmasq),
        Box::new(Resolver::Unbound),
    ]
}

enum Resolver {
    /// slipgate, with or without rules by name. With them each answer is judged and opens its
    /// addresses.
    Slipgate {
        rules: bool,
    },
    Dnsmasq,
    Unbound,
}

impl Contender for Resolver {
    fn name(&self) -> &'static str {
        match self {
            Self::Slipgate { rules: false } => "slipgate",
            Self::Slipgate { rules: true } => "slipgate-by-name",
            Self::Dnsmasq => DNSMASQ,
            Self::Unbound => "unbound",
        }
    }

    fn version(&self) -> Result<String> {
        match self {
            Self::Slipgate { .. } => own_version(),
            Self::Dnsmasq => version("dnsmasq", "dnsmasq-base"),
            Self::Unbound => version("unbound", "unbound"),
        }
    }

    fn set_up(&self, pinning: Pinning, _ipv6: bool) -> Result<Stand> {
        if let Self::Slipgate { rules } = self {
            return by_slipgate(*rules, pinning);
        }
        let world = World::with(world(true))?;
        let guest = Guest::new(&world, guest(pinning))?;
        baseline::plain_forwarding(&world, &guest)?;
        let gateway = guest.config().gateway;
        let scratch = tempfile::tempdir().context("make a directory for a configuration")?;
        let mut command;
        if let Self::Dnsmasq = self {
            command = Command::new("dnsmasq");
            command.args([
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--pid-file=",
            ]);
            command.args([
                "--no-resolv",
                "--no-hosts",
                "--bind-interfaces",
                "--user=root",
            ]);
            command.arg(format!("--listen-address={gateway}"));
            command.arg(format!("--server={SERVER}"));
            command.arg(format!("--cache-size={KEPT}"));
        } else {
            let mut text = String::new();
            // One thread as the others, no validation as the others, names asked for whole. And
            // `test.`, which is nobody's (RFC 6761 section 6.2) and by default unbound's own to
            // deny, is asked for like any other.
            writeln!(
                text,
                "server:\n interface: {gateway}\n access-control: 0.0.0.0/0 allow\n num-threads: 1\n \
                 do-daemonize: no\n chroot: \"\"\n username: \"\"\n pidfile: \"\"\n directory: \"/\"\n \
                 use-syslog: no\n module-config: \"iterator\"\n qname-minimisation: no\n \
                 do-ip6: no\n use-caps-for-id: yes\n outgoing-range: 4096\n \
                 num-queries-per-thread: 2048\n local-zone: \"test.\" nodefault\n\
                 remote-control:\n control-enable: no\n\
                 forward-zone:\n name: \".\"\n forward-addr: {SERVER}"
            )?;
            let file = scratch.path().join("unbound.conf");
            fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
            command = Command::new("unbound");
            command.arg("-d").arg("-c").arg(&file);
        }
        let process = NatProcess::start(&world.host, command, pinning)?;
        let mut stand = Stand::in_kernel(world, guest).served_by(process)?;
        stand.keep(scratch);
        Ok(stand)
    }
}

fn by_slipgate(rules: bool, pinning: Pinning) -> Result<Stand> {
    let world = World::with(world(false))?;
    let guest = Guest::new(&world, guest(pinning))?;
    let upstream = SERVER.to_string();
    let mut args = vec!["--dns", &upstream];
    if rules {
        // Each name is judged, each answer followed to its end and searched for protected addresses.
        args.extend(["--deny", "*.denied.test", "--deny", "denied.test"]);
    }
    Stand::attached(world, guest, &args, pinning)
}
