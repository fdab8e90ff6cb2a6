//! Policy settings of the flags.
use slipgate_policy::{
    Action,
    document::{CliOverrides, ConfigError, RuleFlag, parse_host_loopback},
};

use crate::args::{DefaultRule, NatArgs};

/// Collects the policy settings of the flags. `rules`: the rule flags as typed.
pub(super) fn of(nat: &NatArgs, rules: Vec<RuleFlag>) -> Result<CliOverrides, ConfigError> {
    Ok(CliOverrides {
        rules,
        default: nat.default.map(|default| match default {
            DefaultRule::Allow => Action::Allow,
            DefaultRule::Deny => Action::Deny,
        }),
        quotas: nat.quotas.quotas(),
        dns: nat.dns.clone(),
        forwards: nat.forward.clone(),
        host_loopback: parse_host_loopback(&nat.host_loopback)?,
        file: nat.policy.clone(),
        policy_name: nat.policy_name.clone(),
    })
}
