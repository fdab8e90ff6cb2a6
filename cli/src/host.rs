//! What of this host bears on a NAT that passes the host's own routing and firewall by.
mod dump;

use std::{fs, net::SocketAddrV4, ops::RangeInclusive};

use userspace_nat::dns::parse_resolv_conf;

/// Facts as they are now. What can't be found out is left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct HostFacts {
    /// `net.ipv4.ip_forward`.
    pub(crate) ip_forward: bool,
    /// `net.ipv4.ip_local_port_range`.
    pub(crate) local_ports: Option<RangeInclusive<u16>>,
    /// nftables chains of the hook "forward" that have rules or drop by policy, and iptables' own
    /// table: packets that slipgate redirects don't pass them.
    pub(crate) forward_chains: Vec<String>,
    /// IPsec policies: redirected packets don't meet them.
    pub(crate) xfrm_policies: usize,
}

impl HostFacts {
    /// Looks.
    pub(crate) fn read() -> Self {
        let sysctl = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
        let mut forward_chains = dump::forward_chains().unwrap_or_default();
        let legacy = fs::read_to_string("/proc/net/ip_tables_names").unwrap_or_default();
        if legacy.lines().any(|table| table == "filter") {
            forward_chains.push("iptables (legacy) filter FORWARD".into());
        }
        Self {
            ip_forward: sysctl("ip_forward").is_ok_and(|text| text.trim() == "1"),
            local_ports: sysctl("ip_local_port_range")
                .ok()
                .and_then(|text| port_range(&text)),
            forward_chains,
            xfrm_policies: dump::xfrm_policies().unwrap_or_default(),
        }
    }

    /// What an operator should know before traffic passes, in sentences.
    pub(crate) fn warnings(&self, nat_ports: &RangeInclusive<u16>) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.forward_chains.is_empty() {
            warnings.push(format!(
                "guests' packets don't pass the host's firewall for forwarded traffic ({}): say \
                 what guests may reach with --allow and --deny",
                self.forward_chains.join(", ")
            ));
        }
        if self.xfrm_policies > 0 {
            warnings.push(format!(
                "guests' packets don't meet the host's {} IPsec policies: what must be encrypted \
                 needs a --deny, or a tunnel device as --uplink",
                self.xfrm_policies
            ));
        }
        if self.ip_forward {
            warnings.push(
                "net.ipv4.ip_forward is on: slipgate turns forwarding off on its TAPs and its \
                 engine port, so that nothing leaves untranslated"
                    .into(),
            );
        }
        if let Some(local) = &self.local_ports {
            let overlap = local.start().max(nat_ports.start()) <= local.end().min(nat_ports.end());
            if overlap {
                warnings.push(format!(
                    "--nat-ports {}-{} overlaps net.ipv4.ip_local_port_range {}-{}: a connection \
                     of the host's own may lose its answers to a guest's flow with the same \
                     ports; give ports outside",
                    nat_ports.start(),
                    nat_ports.end(),
                    local.start(),
                    local.end()
                ));
            }
        }
        warnings
    }
}

/// `32768\t60999`.
fn port_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut ports = text.split_whitespace().map(str::parse);
    Some(ports.next()?.ok()?..=ports.next()?.ok()?)
}

/// The host's resolvers, IPv4 ones. systemd-resolved's stub is a fine one: questions go out by
/// sockets of the engine, on this host.
pub(crate) fn resolvers() -> Vec<SocketAddrV4> {
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    parse_resolv_conf(&text)
        .into_iter()
        .filter_map(|resolver| match resolver {
            std::net::SocketAddr::V4(v4) => Some(v4),
            std::net::SocketAddr::V6(_) => None,
        })
        .collect()
}

#[cfg(test)]
#[path = "host_test.rs"]
mod tests;
