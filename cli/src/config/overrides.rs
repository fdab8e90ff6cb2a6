//! What flags say of policies.
use slipgate_policy::{
    Action,
    document::{CliOverrides, ConfigError, Quotas, RuleFlag, parse_host_loopback},
};

use crate::args::{DefaultRule, NatArgs};

/// What the flags say of policies. `rules`: the rule flags as typed.
pub(super) fn of(nat: &NatArgs, rules: Vec<RuleFlag>) -> Result<CliOverrides, ConfigError> {
    Ok(CliOverrides {
        rules,
        default: nat.default.map(|default| match default {
            DefaultRule::Allow => Action::Allow,
            DefaultRule::Deny => Action::Deny,
        }),
        quotas: Quotas {
            max_flows: nat.max_flows,
            new_flows_per_second: nat.new_flows_per_second,
            tx_bytes_per_second: nat.tx_bytes_per_second,
            rx_bytes_per_second: nat.rx_bytes_per_second,
            tx_packets_per_second: nat.tx_packets_per_second,
            rx_packets_per_second: nat.rx_packets_per_second,
            dns_per_second: nat.dns_per_second,
        },
        dns: nat.dns.clone(),
        forwards: nat.forward.clone(),
        host_loopback: parse_host_loopback(&nat.host_loopback)?,
        file: nat.policy.clone(),
        policy_name: nat.policy_name.clone(),
    })
}
