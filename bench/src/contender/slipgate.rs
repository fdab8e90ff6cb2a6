//! slipgate in hybrid mode, without quotas: plain, and with features that may slow down an
//! admission or a packet.
//!
//! | | what is measured by it |
//! | --- | --- |
//! | `slipgate` | no rules, no records |
//! | `slipgate-policy` | 1,000 rules by address and 10,000 names in a deny file, all to be passed by |
//! | `slipgate-log` | a record of each flow, of its start and of its end |
//! | `slipgate-spread` | as `slipgate`, and new flows go to 10,000 addresses instead of one |
//! | `slipgate-names` | the same 10,000 addresses, open only because DNS said that they are 10,000 names', which 3,000 rules allow; 1,000 rules by address besides |

use std::{fmt::Write, fs, net::Ipv4Addr, process::Command};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use slipgate_testbed::{slipgate, world::SERVER};

use super::{Contender, Stand, make_guest, make_world};
use crate::{
    dns_exchange::{Client, Upstream},
    machine::Pinning,
    workload_names::{ADMISSION, ESTABLISHED, SMALL_PACKETS},
};

/// Arguments that raise all quotas, so that none limits a measurement.
const QUOTAS: [&str; 6] = [
    "--flow-table",
    "262144",
    "--max-flows",
    "262144",
    "--new-flows-per-second",
    "100000000",
];

/// Number of rules by address. None matches a destination of the workloads, so their cost is the
/// look-up.
const RULES: u32 = 1_000;
/// Number of names that are denied, or that are allowed and resolved.
const NAMES: u32 = 10_000;
/// Number of zones of the allowed names. Each has a rule for all names beneath it. A guest may ask
/// for a limited number of octets of such names, so each also has a rule for the zone itself and
/// one for `www` beneath it.
const ZONES: u32 = 1_000;
/// First address of the names, in the range for benchmarks (RFC 2544), beside the uplink's network.
/// The addresses are behind the router, which drops packets to them.
const FIRST_NAMED: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 0);

/// Variant of slipgate, by the additional work that it does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Slipgate {
    Plain,
    Policy,
    Log,
    Spread,
    Names,
}

impl Slipgate {
    pub(super) const ALL: [Slipgate; 5] = [
        Slipgate::Plain,
        Slipgate::Policy,
        Slipgate::Log,
        Slipgate::Spread,
        Slipgate::Names,
    ];
}

impl Contender for Slipgate {
    fn name(&self) -> &'static str {
        match self {
            Slipgate::Plain => "slipgate",
            Slipgate::Policy => "slipgate-policy",
            Slipgate::Log => "slipgate-log",
            Slipgate::Spread => "slipgate-spread",
            Slipgate::Names => "slipgate-names",
        }
    }

    fn version(&self) -> Result<String> {
        own_version()
    }

    fn takes_part(&self, workload: &str) -> bool {
        let admission = ADMISSION.contains(&workload);
        match self {
            Slipgate::Plain => true,
            Slipgate::Policy | Slipgate::Names => {
                admission || [ESTABLISHED, SMALL_PACKETS].contains(&workload)
            }
            Slipgate::Log | Slipgate::Spread => admission,
        }
    }

    fn has_ipv6(&self) -> bool {
        // The variants' policies are judged once, when a flow begins, whatever its family.
        *self == Slipgate::Plain
    }

    fn set_up(&self, pinning: Pinning, ipv6: bool) -> Result<Stand> {
        let world = make_world(false, ipv6)?;
        let guest = make_guest(&world, pinning, ipv6)?;
        let scratch = tempfile::tempdir().context("make a directory for policy and records")?;
        let file = |name: &str| scratch.path().join(name).display().to_string();
        let upstream = SERVER.to_string();
        let mut args = QUOTAS.to_vec();
        if ipv6 {
            args.extend(["--ipv6", "nat"]);
        }
        let (policy, denied, records) =
            (file("policy.toml"), file("names.txt"), file("flows.jsonl"));
        match self {
            Slipgate::Plain | Slipgate::Spread => {}
            Slipgate::Policy => {
                let rules = deny_rules() + "  { deny_file = \"names.txt\" },\n";
                write(&policy, &with_default("allow", &rules))?;
                write(&denied, &denied_names())?;
                args.extend(["--policy", &policy]);
            }
            Slipgate::Names => {
                let rules = deny_rules() + &allow_rules();
                write(&policy, &with_default("deny", &rules))?;
                args.extend(["--policy", &policy, "--dns", &upstream]);
            }
            Slipgate::Log => {
                args.extend(["--flow-log", &records]);
                args.extend(["--flow-log-events", "flow_start,flow_end"]);
            }
        }
        let mut stand = Stand::attached(world, guest, &args, pinning)?;
        stand.keep(scratch);
        if [Slipgate::Spread, Slipgate::Names].contains(self) {
            stand = stand.with_new_flows_to((0..NAMES).map(address_of).collect());
        }
        if *self == Slipgate::Names {
            learn_names(&stand)?;
        }
        Ok(stand)
    }
}

fn write(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {path}"))
}

fn with_default(default: &str, rules: &str) -> String {
    format!("default = \"{default}\"\nrules = [\n{rules}]\n")
}

fn deny_rules() -> String {
    (0..RULES).fold(String::new(), |mut text, i| {
        let (b, c, port) = (i / 250, i % 250, 1 + i);
        let _ = writeln!(text, "  {{ deny = \"100.{b}.{c}.0/24:{port}\" }},");
        text
    })
}

fn denied_names() -> String {
    (0..NAMES).fold(String::new(), |mut text, i| {
        let _ = writeln!(text, "n{i}.denied{}.test", i % 100);
        text
    })
}

/// Returns the allow rules, including one by address: the workloads talk to the server before they
/// begin.
fn allow_rules() -> String {
    let server = format!("  {{ allow = \"{SERVER}\" }},\n");
    (0..ZONES).fold(server, |mut text, i| {
        let zone = name(i);
        let _ = writeln!(
            text,
            "  {{ allow = [\"{zone}\", \"www.{zone}\", \"*.{zone}\"] }},"
        );
        text
    })
}

/// Returns the name of an index; the first indexes are the zones themselves.
fn name(i: u32) -> String {
    let (zone, name) = (i % ZONES, i / ZONES);
    match name {
        0 => format!("z{zone}.test"),
        1 => format!("www.z{zone}.test"),
        _ => format!("{name}.z{zone}.test"),
    }
}

/// Returns the index of a generated name: the inverse of [`name`].
fn number(name: &str) -> Option<u32> {
    let (first, zone) = match name.strip_suffix(".test")?.split_once(".z") {
        Some(("www", zone)) => (1, zone),
        Some((first, zone)) => (first.parse().ok()?, zone),
        None => (0, name.strip_suffix(".test")?.strip_prefix('z')?),
    };
    Some(first * ZONES + zone.parse::<u32>().ok()?)
}

fn address_of(i: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FIRST_NAMED.to_bits() + i)
}

/// Resolves all names in the guest, which opens their addresses to it. All openings are live at
/// once.
fn learn_names(stand: &Stand) -> Result<()> {
    let upstream = Upstream::start(&stand.world.net, |name| Some(address_of(number(name)?)))?;
    let client = stand.in_guest(Client::new)?;
    client.ask_each((0..NAMES).map(name))?;
    drop(upstream);
    let stats = stand.slipgate_stats()?.unwrap_or_default();
    let vms = stats.pointer("/vms").and_then(Value::as_array);
    let open = vms
        .and_then(|vms| vms.first()?.pointer("/names/open"))
        .and_then(Value::as_u64);
    ensure!(
        open == Some(u64::from(NAMES)),
        "{open:?} of {NAMES} addresses are open by name"
    );
    Ok(())
}

/// Returns the version of slipgate.
pub(crate) fn own_version() -> Result<String> {
    let output = Command::new(slipgate::binary()?)
        .arg("--version")
        .output()
        .context("run `slipgate --version`")?;
    if !output.status.success() {
        bail!("`slipgate --version` ended with {}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
#[path = "slipgate_test.rs"]
mod tests;
