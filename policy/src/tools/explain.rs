//! Explanation of a destination given as text, with the rules that match it.
use std::net::{IpAddr, Ipv6Addr};

use slipgate_abi::Protocol;

use crate::{
    DNS_PORT, Destination, Name, NamePattern, Policy, RuleId, document::ConfigError, wire,
};

/// Explains whether a destination passes, and why.
///
/// `destination`: `ADDRESS:PORT` (`[ADDRESS]:PORT` with IPv6), `NAME:PORT` or `NAME`; for ICMP the
/// host alone. `gateway`: the
/// guests' gateway.
///
/// # Errors
/// The destination has none of these forms.
pub fn explain(
    policy: &Policy,
    destination: &str,
    protocol: Protocol,
    gateway: IpAddr,
) -> Result<(bool, String), ConfigError> {
    let refused = |problem: String| {
        let remedy = "give ADDRESS:PORT, NAME:PORT or NAME; with --proto icmp the host alone";
        ConfigError::new("DESTINATION", destination, problem, remedy)
    };
    if destination.contains("://") {
        return Err(refused("a URL is none: leave the scheme out".into()));
    }
    let (host, port) = host_and_port(destination);
    let port = match port {
        None => None,
        Some(port) => {
            let number = port.parse::<u16>().ok().filter(|port| *port > 0);
            Some(number.ok_or_else(|| refused(format!("{port:?} is no port")))?)
        }
    };
    if protocol == Protocol::Icmp && port.is_some() {
        return Err(refused("ping has no ports".into()));
    }
    let (passes, sentences, rules) = if NamePattern::is_meant_by(host) {
        let wire = wire(host).map_err(|e| refused(e.to_string()))?;
        let name = Name(&wire);
        let port = match protocol {
            Protocol::Icmp | Protocol::Icmpv6 => Some((0, protocol)),
            _ => port.map(|port| (port, protocol)),
        };
        let (passes, sentences) = policy.explain_name(name, port);
        (passes, sentences, policy.speaking_of(name))
    } else {
        let addr: IpAddr = host
            .parse()
            .map_err(|_| refused(format!("{host:?} is neither an address nor a name")))?;
        let port = match (protocol, port) {
            (Protocol::Icmp | Protocol::Icmpv6, _) => 0,
            (_, Some(port)) => port,
            (_, None) => return Err(refused("no port".into())),
        };
        let to = Destination {
            addr,
            port,
            protocol,
        };
        if to.port == DNS_PORT {
            let (passes, sentences) = policy.explain_port_53();
            return Ok((passes, text(policy, passes, &sentences, &[])));
        }
        let (passes, sentences) = match loopback(policy, to, gateway) {
            Some(found) => found,
            None => {
                let explanation = policy.explain(to);
                (explanation.decision.is_allowed(), explanation.to_string())
            }
        };
        (passes, sentences, policy.matching(to))
    };
    Ok((passes, text(policy, passes, &sentences, &rules)))
}

/// Splits `HOST:PORT`, `HOST`, `[IPV6]:PORT`, `[IPV6]` or `IPV6` into the host, without brackets,
/// and the port. Neither is checked.
pub fn host_and_port(text: &str) -> (&str, Option<&str>) {
    if text.parse::<Ipv6Addr>().is_ok() {
        return (text, None);
    }
    if let Some((host, rest)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        match rest.strip_prefix(':') {
            Some(port) => return (host, Some(port)),
            None if rest.is_empty() => return (host, None),
            None => {}
        }
    }
    match text.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    }
}

/// Explains a port that leads to the host's loopback; `None` if the destination is not such a port.
fn loopback(policy: &Policy, to: Destination, gateway: IpAddr) -> Option<(bool, String)> {
    let lead = policy.host_loopback(&[], to, gateway)?;
    let sentences = policy.explain_loopback(to, &lead);
    Some((lead.decision.is_allowed(), sentences))
}

fn text(policy: &Policy, passes: bool, sentences: &str, rules: &[RuleId]) -> String {
    let mut text = format!("{}:\n", if passes { "yes" } else { "no" });
    for sentence in sentences.lines() {
        text.push_str(&format!("  {sentence}\n"));
    }
    match rules {
        [] => text.push_str("rules that match: none\n"),
        rules => {
            text.push_str("rules that match, in order:\n");
            for rule in rules {
                text.push_str(&format!("  {}\n", policy.describe(*rule)));
            }
        }
    }
    text
}
