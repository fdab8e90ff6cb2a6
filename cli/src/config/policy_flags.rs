//! The policy that the flags give: rules, in the order typed across `--allow`, `--inspect`, `--deny`
//! and `--deny-file`, and settings.
use std::path::PathBuf;

use clap::ArgMatches;
use slipgate_policy::{
    Action,
    document::{CliOverrides, ConfigError, RoutesOf, RuleFlag, parse_host_loopback},
};

use crate::args::{DefaultRule, EgressRoutes, NatArgs};

/// The rule flags of a subcommand's matches, as typed: first match wins, so order is meaning,
/// and clap sorts values by flag.
pub(crate) fn rule_flags(matches: &ArgMatches) -> Vec<RuleFlag> {
    let mut rules: Vec<(usize, RuleFlag)> = Vec::new();
    for action in [Action::Allow, Action::Inspect, Action::Deny] {
        let flag = action.name();
        let values = matches.get_many::<String>(flag).into_iter().flatten();
        let indices = matches.indices_of(flag).into_iter().flatten();
        let typed = values.map(|value| RuleFlag::Match(action, value.clone()));
        rules.extend(indices.zip(typed));
    }
    let files = matches
        .get_many::<PathBuf>("deny_file")
        .into_iter()
        .flatten();
    let indices = matches.indices_of("deny_file").into_iter().flatten();
    rules.extend(
        indices
            .zip(files)
            .map(|(i, f)| (i, RuleFlag::DenyFile(f.clone()))),
    );
    rules.sort_by_key(|(index, _)| *index);
    rules.into_iter().map(|(_, rule)| rule).collect()
}

/// Collects the policy settings of the flags. `rules`: the rule flags as typed.
pub(super) fn overrides(nat: &NatArgs, rules: Vec<RuleFlag>) -> Result<CliOverrides, ConfigError> {
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
        egress_routes: nat.egress_routes.map(|routes| match routes {
            EgressRoutes::Uplink => RoutesOf::Uplink,
            EgressRoutes::Host => RoutesOf::Host,
        }),
        file: nat.policy.clone(),
        policy_name: nat.policy_name.clone(),
    })
}
