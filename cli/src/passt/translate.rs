//! passt's options as flags of `slipgate attach`.
use std::{ffi::OsString, net::Ipv4Addr};

use slipgate_policy::document::ConfigError;

use super::ports;
use crate::args::PasstArgs;

const ADDRESS: &str = "--address";

/// Returns the command line of `slipgate`, without the program's name. `own`: flags of slipgate's that
/// follow, and win where one is given twice.
///
/// # Errors
/// An option means something that slipgate has not.
pub(super) fn flags(args: &PasstArgs, own: &[&str]) -> Result<Vec<OsString>, ConfigError> {
    let mut flags: Vec<OsString> = vec!["attach".into()];
    let is_own = |flag: &str| own.iter().any(|word| word.split('=').next() == Some(flag));
    let mut give = |flag: &str, value: &dyn AsRef<std::ffi::OsStr>| {
        if !is_own(flag) {
            let mut word = OsString::from(format!("{flag}="));
            word.push(value);
            flags.push(word);
        }
    };
    // Of these only one can be.
    let has_own_link = ["--socket", "--vhost-user", "--fd"].into_iter().any(is_own);
    if let Some(path) = args.socket.as_ref().filter(|_| !has_own_link) {
        let flag = match args.vhost_user {
            true => "--vhost-user",
            false => "--socket",
        };
        give(flag, path);
    }
    if let Some(fd) = args.fd.filter(|_| !has_own_link) {
        give("--fd", &fd.to_string());
    }
    if let Some(file) = &args.pid {
        give("--pid-file", file);
    }
    if let Some(file) = &args.pcap {
        give("--pcap", file);
    }
    if let Some(mtu) = &args.mtu {
        give("--mtu", mtu);
    }
    if let Some(device) = &args.interface {
        give("--uplink", device);
    }
    let level = match (args.debug, args.quiet) {
        (true, _) => "debug",
        (false, true) => "warn",
        (false, false) => "info",
    };
    give("--log", &level);
    give("--ipv6", &if args.ipv4_only { "off" } else { "auto" });
    let network = network(args)?;
    for (flag, value) in [
        ("--guest-ip", network.guest),
        ("--gateway", network.gateway),
        ("--prefix", network.prefix),
    ] {
        if let Some(value) = value {
            give(flag, &value);
        }
    }
    let resolvers = args.dns.iter().map(|dns| format!("--dns={dns}").into());
    flags.extend(resolvers.filter(|_| !is_own("--dns")));
    for (flag, protocol, specs) in [
        ("--tcp-ports", "tcp", &args.tcp_ports),
        ("--udp-ports", "udp", &args.udp_ports),
    ] {
        for spec in specs {
            let forwards = ports::forwards(flag, protocol, spec)?;
            let forwards = forwards.into_iter();
            flags.extend(forwards.map(|forward| format!("--forward={forward}").into()));
        }
    }
    if args.one_off && args.fd.is_none() && !is_own("--one-off") {
        flags.push("--one-off".into());
    }
    flags.extend(own.iter().map(OsString::from));
    Ok(flags)
}

/// The guest's IPv4 network, as far as it is given.
#[derive(Default)]
struct Network {
    guest: Option<String>,
    gateway: Option<String>,
    prefix: Option<String>,
}

fn network(args: &PasstArgs) -> Result<Network, ConfigError> {
    const REMEDY: &str = "give one IPv4 address, like 10.0.2.15";
    let mut network = Network::default();
    let mut guest = None;
    for given in &args.address {
        let (address, prefix) = match given.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.to_owned())),
            None => (given.as_str(), None),
        };
        let Ok(address) = address.parse::<Ipv4Addr>() else {
            let problem =
                "the guest makes its IPv6 addresses itself, of the prefix that is announced";
            let remedy = "leave it out; --ipv6-prefix in SLIPGATE_PASST_FLAGS names the prefix";
            return Err(ConfigError::new(ADDRESS, given, problem, remedy));
        };
        if guest.replace(address).is_some() {
            return Err(ConfigError::new(ADDRESS, given, "a second one", REMEDY));
        }
        network.prefix = prefix;
    }
    let given = match (&args.netmask, &network.prefix) {
        (Some(given), _) => Some(("--netmask", given)),
        (None, Some(given)) => Some((ADDRESS, given)),
        (None, None) => None,
    };
    let prefix = given.map(|(flag, given)| prefix_len(flag, given));
    let prefix = prefix.transpose()?;
    network.prefix = prefix.map(|prefix| prefix.to_string());
    network.gateway = match args.gateway {
        Some(gateway) => Some(gateway.to_string()),
        None => guest.map(|guest| gateway_of(guest, prefix.unwrap_or(24)).to_string()),
    };
    network.guest = guest.map(|guest| guest.to_string());
    Ok(network)
}

/// Returns the prefix length that `given` is, or is the netmask of: one with hosts for the guest and its
/// gateway.
fn prefix_len(flag: &'static str, given: &str) -> Result<u32, ConfigError> {
    let prefix = given.parse().ok().or_else(|| {
        let mask: Ipv4Addr = given.parse().ok()?;
        let ones = mask.to_bits().leading_ones();
        (mask.to_bits().count_ones() == ones).then_some(ones)
    });
    prefix.filter(|prefix| *prefix <= 30).ok_or_else(|| {
        let remedy = "give a prefix length of at most 30, like 24, or a netmask";
        ConfigError::new(flag, given, "not that of a network with two hosts", remedy)
    })
}

/// A gateway for a guest's network, where none is given: its second address, or the fourth if the guest has
/// that one or the next, which is the resolver's. In a network of two hosts: the one that the guest is not.
fn gateway_of(guest: Ipv4Addr, prefix: u32) -> Ipv4Addr {
    let hosts = u32::MAX.checked_shr(prefix).unwrap_or(0);
    let network = guest.to_bits() & !hosts;
    let is_guest = |host: u32| network | host == guest.to_bits();
    let host = match (is_guest(2) || is_guest(3), is_guest(2)) {
        (true, _) if hosts > 4 => 4,
        // The first is there in every network, and neither is the guest.
        (_, true) => 1,
        _ => 2,
    };
    Ipv4Addr::from_bits(network | host)
}

#[cfg(test)]
#[path = "translate_test.rs"]
mod tests;
