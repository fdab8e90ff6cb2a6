//! Other packet processing of the host, for `doctor` and the warnings at start: filters that
//! slipgate bypasses, and ports that its own must not overlap.

use std::{fs, io};

use netlink_sys::protocols::NETLINK_XFRM;

use self::nfnetlink::{find, number, text};
use crate::netlink::raw;

mod nfnetlink;
mod source_nat;

pub use source_nat::SourceNat;

/// Facts about the calling thread's network namespace. `None`: it could not be determined.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostFacts {
    /// Whether the host routes IPv4 between its interfaces.
    pub ip_forward: Option<bool>,
    /// Base chains at the forward hook, which slipgate's packets never pass.
    pub forward_chains: Option<Vec<ForwardChain>>,
    /// Tables of legacy iptables, whose rules are not listed among the chains.
    pub legacy_tables: Vec<String>,
    /// Chains of the host's own source NAT, which may choose the same tuple as a guest's flow.
    pub source_nat: Option<Vec<SourceNat>>,
    /// Number of IPsec policies, which slipgate's packets never pass.
    pub xfrm_policies: Option<usize>,
    /// Ephemeral ports of the host's own sockets, first and last. Translated ports must not overlap
    /// them.
    pub local_ports: Option<(u16, u16)>,
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
        let sysctl = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
        Self {
            ip_forward: sysctl("ip_forward").map(|value| value.trim() != "0"),
            forward_chains: nfnetlink::dump(nfnetlink::GET_CHAIN, forward_chain).ok(),
            legacy_tables: fs::read_to_string("/proc/net/ip_tables_names")
                .map(|names| names.lines().map(Into::into).collect())
                .unwrap_or_default(),
            source_nat: source_nat::find().ok(),
            xfrm_policies: xfrm_policies().ok(),
            local_ports: sysctl("ip_local_port_range").and_then(|range| {
                let mut ports = range.split_whitespace().map(str::parse);
                Some((ports.next()?.ok()?, ports.next()?.ok()?))
            }),
        }
    }

    /// Returns warnings for the start of `slipgate attach`, each with its consequence.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.bypassed();
        warnings.extend(self.translates_too());
        warnings
    }

    /// Returns warnings about the host's own source NAT, which does not see guests' flows.
    pub fn translates_too(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for SourceNat { table, chain } in self.source_nat.iter().flatten() {
            warnings.push(format!(
                "the chain {table} {chain} translates source addresses: where it picks a port that \
                 a guest's flow to the same server has, the answers go to the guest and the \
                 connection breaks; give it ports outside --nat-ports, as `masquerade to \
                 :1024-60999` does, or slipgate an address of its own by --nat-address"
            ));
        }
        warnings
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
