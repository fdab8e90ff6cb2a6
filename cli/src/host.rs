//! What of this host bears on a NAT that passes the host's own routing and firewall by.
use std::{
    fs,
    net::{SocketAddr, SocketAddrV4},
    ops::RangeInclusive,
};

use slipgate_control::host::HostFacts;
use userspace_nat::dns::parse_resolv_conf;

/// What an operator should know before traffic passes, in sentences.
pub(crate) fn warnings(facts: &HostFacts, nat_ports: &RangeInclusive<u16>) -> Vec<String> {
    let mut warnings = facts.warnings();
    if facts.ip_forward == Some(true) {
        warnings.push(
            "net.ipv4.ip_forward is on: slipgate turns forwarding off on its TAPs and its engine \
             port, so that nothing leaves untranslated"
                .into(),
        );
    }
    let (first, last) = (*nat_ports.start(), *nat_ports.end());
    if let Some((local_first, local_last)) = facts.local_ports
        && local_first.max(first) <= local_last.min(last)
    {
        warnings.push(format!(
            "--nat-ports {first}-{last} overlaps net.ipv4.ip_local_port_range \
             {local_first}-{local_last}: a connection of the host's own may lose its answers to \
             a guest's flow with the same ports; give ports outside"
        ));
    }
    warnings
}

/// The host's resolvers, IPv4 ones. systemd-resolved's stub is a fine one: questions go out by
/// sockets of the engine, on this host.
pub(crate) fn resolvers() -> Vec<SocketAddrV4> {
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    parse_resolv_conf(&text)
        .into_iter()
        .filter_map(|resolver| match resolver {
            SocketAddr::V4(v4) => Some(v4),
            SocketAddr::V6(_) => None,
        })
        .collect()
}

#[cfg(test)]
#[path = "host_test.rs"]
mod tests;
