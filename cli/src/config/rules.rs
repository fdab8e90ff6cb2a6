//! `--allow`, `--inspect`, `--deny` and `--deny-file`, in the order typed across all of them.
use std::path::PathBuf;

use clap::ArgMatches;
use slipgate_policy::{Action, document::RuleFlag};

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
