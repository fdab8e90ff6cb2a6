//! Other packet processing of the host, for `doctor` and the warnings at start: filters that
//! slipgate bypasses, and ports that its own must not overlap.

use std::{fs, io, ops::RangeInclusive};

use netlink_sys::protocols::NETLINK_XFRM;

use self::nfnetlink::{find, number, text};
use crate::netlink::raw;

mod nat_rule;
mod nfnetlink;
mod rule_watch;
mod source_nat;
mod tracked;

pub use rule_watch::RuleWatch;
pub use source_nat::{Addresses, Device, GuestsTuples, SourceNat, Sources};
pub use tracked::translated_ports;

/// Facts about the calling thread's network namespace. `None`: it could not be determined.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostFacts {
    /// Whether the host routes IPv4 between its interfaces.
    pub ip_forward: Option<bool>,
    /// Base chains at the forward hook, which slipgate's packets never pass.
    pub forward_chains: Option<Vec<ForwardChain>>,
    /// Tables of legacy iptables, whose rules are not listed among the chains.
    pub legacy_tables: Vec<String>,
    /// Rules of the host's own source NAT, which may choose the same tuple as a guest's flow.
    pub source_nat: Option<Vec<SourceNat>>,
    /// Number of IPsec policies, which slipgate's packets never pass.
    pub xfrm_policies: Option<usize>,
    /// Ephemeral ports of the host's own sockets, first and last. Translated ports must not overlap
    /// them.
    pub local_ports: Option<(u16, u16)>,
    /// Ports among these that the host gives to no socket by itself
    /// (`net.ipv4.ip_local_reserved_ports`).
    pub reserved_ports: Vec<RangeInclusive<u16>>,
}

/// An nftables base chain at the forward hook.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForwardChain {
    /// Table of the chain.
    pub table: String,
    /// Name of the chain.
    pub chain: String,
    /// Whether its policy is to drop.
    pub drops: bool,
    /// Number of its rules.
    pub rules: u32,
}

impl HostFacts {
    /// Reads the facts of the calling thread's network namespace.
    pub fn read() -> Self {
        Self {
            ip_forward: sysctl("ip_forward").map(|value| value.trim() != "0"),
            forward_chains: nfnetlink::dump(nfnetlink::GET_CHAIN, forward_chain).ok(),
            legacy_tables: fs::read_to_string("/proc/net/ip_tables_names")
                .map(|names| names.lines().map(Into::into).collect())
                .unwrap_or_default(),
            xfrm_policies: xfrm_policies().ok(),
            ..Self::read_about_tuples()
        }
    }

    /// Reads those facts alone that [`Self::meets`] looks at.
    pub fn read_about_tuples() -> Self {
        Self {
            source_nat: source_nat::find().ok(),
            ..Self::default()
        }
        .with_ports_read()
    }

    /// Reads those of these facts again of which the kernel gives no notice: the ports of the
    /// host's sockets, and whether legacy iptables may translate sources. Takes some file reads, however many
    /// rules there are.
    #[must_use]
    pub fn with_unnoticed_read(mut self) -> Self {
        if let Some(rules) = &mut self.source_nat {
            rules.retain(|rule| !rule.is_legacy());
            rules.extend(source_nat::legacy());
        }
        self.with_ports_read()
    }

    fn with_ports_read(self) -> Self {
        Self {
            local_ports: sysctl("ip_local_port_range").and_then(|range| {
                let mut ports = range.split_whitespace().map(str::parse);
                Some((ports.next()?.ok()?, ports.next()?.ok()?))
            }),
            reserved_ports: sysctl("ip_local_reserved_ports")
                .map(|ports| port_list(&ports))
                .unwrap_or_default(),
            ..self
        }
    }

    /// Returns what of the host's own may have or get the same tuples as guests' flows: source NAT,
    /// and connections of the host itself. One sentence each, with its consequence and the remedy.
    pub fn meets(&self, guests: &GuestsTuples) -> Vec<String> {
        let (first, last) = (guests.ports.start(), guests.ports.end());
        let mut met = self.translates_to(guests);
        if let Some((local_first, local_last)) = self.local_ports
            && let Some(port) = (local_first.max(*first)..=local_last.min(*last))
                .find(|port| !self.reserved_ports.iter().any(|of| of.contains(port)))
        {
            met.push(format!(
                "guests' ports {first}-{last} overlap net.ipv4.ip_local_port_range \
                 {local_first}-{local_last} (port {port}): a connection of the host's own may lose \
                 its answers to a guest's flow with the same ports; give --nat-ports and --eim-ports outside, or \
                 name them in net.ipv4.ip_local_reserved_ports"
            ));
        }
        met
    }

    /// The same of source NAT alone.
    pub fn translates_to(&self, guests: &GuestsTuples) -> Vec<String> {
        let GuestsTuples { uplink, ports, .. } = guests;
        let by_routes = guests.by_routes.as_ref().map(|whose| format!(" ({whose})"));
        let by_routes = by_routes.as_deref().unwrap_or_default();
        let (first, last) = (ports.start(), ports.end());
        let mut met = Vec::new();
        for nat in self.source_nat.iter().flatten() {
            if !nat.may_meet(guests) {
                continue;
            }
            let SourceNat { table, chain, .. } = nat;
            let (flows, by) = match nat.may_meet_ipv6_only(guests) {
                true => ("IPv6 flows", "nat_addresses"),
                false => ("flows", "--nat-address"),
            };
            let sentence = format!(
                "the chain {table} {chain} translates sources at {uplink}{by_routes} to the address of guests' \
                 {flows}, and may use ports of theirs ({first}-{last}): a connection with the port of \
                 a guest's flow to the same server gets no answer; give the chain other ports, as \
                 `masquerade to :1024-60999` does (iptables: --to-ports), or guests another \
                 address by {by}"
            );
            if !met.contains(&sentence) {
                met.push(sentence);
            }
        }
        met
    }

    /// Returns warnings about filters and IPsec policies that slipgate's packets bypass.
    pub fn bypassed(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let chains = self.forward_chains.iter().flatten();
        for chain in chains.filter(|chain| chain.rules > 0 || chain.drops) {
            warnings.push(format!(
                "the nftables chain {} {} ({} rules) does not see slipgate's packets: give its \
                 rules to slipgate as --allow and --deny",
                chain.table, chain.chain, chain.rules
            ));
        }
        if !self.legacy_tables.is_empty() {
            warnings.push(format!(
                "legacy iptables rules (tables {}) do not see slipgate's packets",
                self.legacy_tables.join(", ")
            ));
        }
        if let Some(policies) = self.xfrm_policies.filter(|policies| *policies > 0) {
            warnings.push(format!(
                "the host has {policies} IPsec policies: slipgate's packets leave without IPsec"
            ));
        }
        warnings
    }
}

fn sysctl(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()
}

/// Reads a list of ports and ranges as sysctls print it: `1-3,8`.
fn port_list(list: &str) -> Vec<RangeInclusive<u16>> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).collect()
}

/// Replaces the error of a kernel without the feature by an empty result.
fn none_when_unsupported<T: Default>(result: io::Result<T>) -> io::Result<T> {
    match result {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EPROTONOSUPPORT | libc::EINVAL | libc::EOPNOTSUPP)
            ) =>
        {
            Ok(T::default())
        }
        other => other,
    }
}

/// Returns the chain if it is a base chain at the forward hook of IPv4 or of both families.
fn forward_chain(family: u8, attributes: &[u8]) -> Option<ForwardChain> {
    const NF_INET_FORWARD: u32 = 2;
    const NF_DROP: u32 = 0;
    const NFTA_CHAIN_TABLE: u16 = 1;
    const NFTA_CHAIN_NAME: u16 = 3;
    const NFTA_CHAIN_HOOK: u16 = 4;
    const NFTA_CHAIN_POLICY: u16 = 5;
    const NFTA_CHAIN_USE: u16 = 6;
    const NFTA_HOOK_HOOKNUM: u16 = 1;
    let hook = find(find(attributes, NFTA_CHAIN_HOOK)?, NFTA_HOOK_HOOKNUM)?;
    if !nfnetlink::sees_ipv4(family) || number(hook)? != NF_INET_FORWARD {
        return None;
    }
    Some(ForwardChain {
        table: text(find(attributes, NFTA_CHAIN_TABLE)?),
        chain: text(find(attributes, NFTA_CHAIN_NAME)?),
        drops: find(attributes, NFTA_CHAIN_POLICY).and_then(number) == Some(NF_DROP),
        rules: find(attributes, NFTA_CHAIN_USE)
            .and_then(number)
            .unwrap_or(0),
    })
}

fn xfrm_policies() -> io::Result<usize> {
    const XFRM_MSG_NEWPOLICY: u16 = 0x13;
    const XFRM_MSG_GETPOLICY: u16 = 0x15;
    /// A zeroed `struct xfrm_userpolicy_id`: any policy.
    const ANY_POLICY: [u8; 64] = [0; 64];
    let mut policies = 0;
    let dumped = raw::dump(NETLINK_XFRM, XFRM_MSG_GETPOLICY, &ANY_POLICY, |kind, _| {
        policies += usize::from(kind == XFRM_MSG_NEWPOLICY);
    });
    none_when_unsupported(dumped.map(|()| policies))
}

#[cfg(test)]
#[path = "host_test.rs"]
mod tests;
