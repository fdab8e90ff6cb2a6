//! The host's network: the uplink, TAPs, resolvers, forwarding and firewall.

use std::{fs, net::SocketAddr};

use slipgate_abi::portframe::PORT_DEVICE;
use slipgate_broker::host::{self, offers_tso};
use slipgate_control::{Network, NetworkWatch, host::HostFacts};
use slipgate_policy::parse_resolv_conf;

use super::{Finding, State};

/// Reports on the uplink and the TAPs, by `host_nat` on the host's own NAT, and on the resolvers, forwarding and
/// firewall.
pub(super) fn found(
    uplink: Option<&str>,
    facts: &HostFacts,
    host_nat: impl FnOnce(&Network) -> Vec<Finding>,
) -> Vec<Finding> {
    let mut findings = network_found(uplink, host_nat);
    let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    findings.push(resolvers_found(&parse_resolv_conf(&resolv_conf)));
    findings.extend(host_found(facts));
    findings
}

fn network_found(
    given: Option<&str>,
    host_nat: impl FnOnce(&Network) -> Vec<Finding>,
) -> Vec<Finding> {
    let what = "uplink";
    let watch = match NetworkWatch::open() {
        Ok(watch) => watch,
        Err(e) => {
            return vec![
                Finding::ok(what, e.to_string())
                    .with(State::Missing, "give the process netlink sockets"),
            ];
        }
    };
    let network = watch.network();
    let mut findings = uplink_found(network, given);
    findings.extend(taps_found(network));
    findings.extend(host_nat(network));
    findings
}

/// Reports which VMMs can open the TAPs that are there. Engine ports are slipgate's own.
fn taps_found(network: &Network) -> impl Iterator<Item = Finding> {
    let links = network.links.values();
    let of_guests = links.filter(|link| !link.name.starts_with(PORT_DEVICE));
    let hints = host::tap_hints(of_guests).into_iter();
    hints.map(|hint| Finding::ok("TAPs", hint))
}

fn uplink_found(network: &Network, given: Option<&str>) -> Vec<Finding> {
    let what = "uplink";
    let link = match given {
        Some(name) => network.link_by_name(name),
        None => network.default_uplink(),
    };
    match (link, given) {
        (Some(link), _) if link.loopback => {
            let found = format!("{} is the loopback device, which leads nowhere", link.name);
            let remedy = "give --uplink the device that leads to the world";
            vec![Finding::ok(what, found).with(State::Missing, remedy)]
        }
        (Some(link), _) => {
            let up = if link.up { "up" } else { "down" };
            let found = format!("{}, {up}, MTU {}", link.name, link.mtu);
            let uplink = if link.up {
                Finding::ok(what, found)
            } else {
                let remedy = format!("bring it up: ip link set {} up", link.name);
                Finding::ok(what, found).with(State::Missing, remedy)
            };
            let mut findings = vec![uplink, offloads(&link.name)];
            findings.extend(host::big_tcp_problem(link).map(|problem| {
                let remedy = "of no concern to guests without IPv6";
                Finding::ok("IPv6", problem).with(State::Note, remedy)
            }));
            findings
        }
        (None, Some(name)) => vec![
            Finding::ok(what, format!("there is no device {name}")).with(
                State::Missing,
                "give --uplink a device that `ip link` shows",
            ),
        ],
        (None, None) => vec![Finding::ok(what, "no default route").with(
            State::Missing,
            "add a default route, or name the device that leads to the world with --uplink",
        )],
    }
}

/// Whether a guest's large frames leave the uplink whole.
fn offloads(device: &str) -> Finding {
    let what = "offloads";
    match offers_tso(device) {
        Ok(true) => Finding::ok(what, format!("{device} segments large frames itself")),
        Ok(false) => Finding::ok(what, format!("{device} has no TCP segmentation")).with(
            State::Note,
            format!("the kernel cuts large frames for it; try: ethtool -K {device} tso on"),
        ),
        Err(e) => Finding::ok(what, format!("{device} does not say: {e}")),
    }
}

/// Reports on the resolvers that answer guests' questions unless `--dns` names others.
fn resolvers_found(resolvers: &[SocketAddr]) -> Finding {
    let what = "resolver";
    let (mut usable, mut problems) = (Vec::new(), Vec::new());
    for resolver in resolvers {
        match host::resolver_problem(*resolver) {
            None => usable.push(resolver.to_string()),
            Some(problem) => problems.push(problem),
        }
    }
    if !usable.is_empty() {
        return Finding::ok(what, usable.join(", "));
    }
    let found = match problems.is_empty() {
        true => "/etc/resolv.conf names none that can be asked (those of a link, fe80::/10, can't)"
            .into(),
        false => problems.join("; "),
    };
    let remedy = "guests' questions will fail: give --dns a resolver that can be reached from here";
    Finding::ok(what, found).with(State::Note, remedy)
}

fn host_found(facts: &HostFacts) -> Vec<Finding> {
    let forwarding = match facts.ip_forward {
        Some(true) => "on; slipgate needs none",
        Some(false) => "off; slipgate needs none",
        None => "unknown",
    };
    let mut findings = vec![Finding::ok("forwarding", forwarding)];
    let bypassed = facts.bypassed();
    if bypassed.is_empty() {
        let found = match facts.forward_chains {
            Some(_) => "no rules for forwarded packets, no IPsec",
            None => "unknown: seeing it needs CAP_NET_ADMIN",
        };
        findings.push(Finding::ok("firewall", found));
    }
    findings.extend(bypassed.into_iter().map(|warning| {
        Finding::ok("firewall", warning).with(
            State::Note,
            "say what guests may reach with --allow and --deny",
        )
    }));
    findings
}

#[cfg(test)]
#[path = "network_test.rs"]
mod tests;
