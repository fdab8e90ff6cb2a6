//! The host's own source NAT: rules that masquerade or change the source address of packets.
//!
//! It picks a port from the whole range if the packet's own is taken. Neither it nor slipgate sees
//! the other's flows. If both have the same tuple, the guest's flow wins: the answers to the host's
//! connection go to the guest.

use std::{fs, io};

use super::nfnetlink::{self, number, text};
use crate::netlink::raw;

/// A chain with a rule that translates source addresses.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SourceNat {
    /// Table of the chain.
    pub table: String,
    /// Name of the chain.
    pub chain: String,
}

/// Files with the legacy tables, and with the targets that their rules may have.
const LEGACY_TABLES: &str = "/proc/net/ip_tables_names";
const LEGACY_TARGETS: &str = "/proc/net/ip_tables_targets";
const TARGETS: [&str; 3] = ["MASQUERADE", "SNAT", "NETMAP"];

/// Returns all such chains of nftables, and an entry for legacy iptables if it may have some: the
/// kernel does not list the rules of its tables as text.
pub(super) fn find() -> io::Result<Vec<SourceNat>> {
    let mut found = nfnetlink::dump(nfnetlink::GET_RULE, of_rule)?;
    let lines = |path| fs::read_to_string(path).unwrap_or_default();
    found.extend(of_legacy(&lines(LEGACY_TABLES), &lines(LEGACY_TARGETS)));
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn of_legacy(tables: &str, targets: &str) -> Option<SourceNat> {
    let has_table = tables.lines().any(|table| table == "nat");
    let has_target = targets.lines().any(|target| TARGETS.contains(&target));
    (has_table && has_target).then(|| SourceNat {
        table: "nat".into(),
        chain: "of legacy iptables".into(),
    })
}

/// Returns the chain of a rule of IPv4 or both families that translates source addresses.
fn of_rule(family: u8, attributes: &[u8]) -> Option<SourceNat> {
    const NFTA_RULE_TABLE: u16 = 1;
    const NFTA_RULE_CHAIN: u16 = 2;
    const NFTA_RULE_EXPRESSIONS: u16 = 4;
    if !nfnetlink::sees_ipv4(family) {
        return None;
    }
    let expressions = nfnetlink::find(attributes, NFTA_RULE_EXPRESSIONS)?;
    let translates = raw::attributes(expressions).any(|(_, expression)| is_source_nat(expression));
    translates.then(|| SourceNat {
        table: nfnetlink::find(attributes, NFTA_RULE_TABLE).map_or_else(String::new, text),
        chain: nfnetlink::find(attributes, NFTA_RULE_CHAIN).map_or_else(String::new, text),
    })
}

/// Whether an expression is `masquerade`, `snat`, or one of the targets of iptables-nft.
fn is_source_nat(expression: &[u8]) -> bool {
    const NFTA_EXPR_NAME: u16 = 1;
    const NFTA_EXPR_DATA: u16 = 2;
    const NFTA_NAT_TYPE: u16 = 1;
    const NFT_NAT_SNAT: u32 = 0;
    const NFTA_TARGET_NAME: u16 = 1;
    let Some(name) = nfnetlink::find(expression, NFTA_EXPR_NAME) else {
        return false;
    };
    let data = nfnetlink::find(expression, NFTA_EXPR_DATA).unwrap_or_default();
    match text(name).as_str() {
        "masq" => true,
        "nat" => nfnetlink::find(data, NFTA_NAT_TYPE).and_then(number) == Some(NFT_NAT_SNAT),
        "target" => nfnetlink::find(data, NFTA_TARGET_NAME)
            .is_some_and(|target| TARGETS.contains(&text(target).as_str())),
        _ => false,
    }
}

#[cfg(test)]
#[path = "source_nat_test.rs"]
mod tests;
