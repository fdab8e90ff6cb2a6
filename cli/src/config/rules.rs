//! `--allow`, `--inspect`, `--deny` and `--deny-file`, in the order typed across all of them.
use std::path::PathBuf;

use clap::ArgMatches;
use slipgate_policy::document::RuleFlag;

/// The rule flags of a subcommand's matches, as typed: first match wins, so order is meaning,
/// and clap sorts values by flag.
pub(crate) fn rule_flags(matches: &ArgMatches) -> Vec<RuleFlag> {
    let mut rules: Vec<(usize, RuleFlag)> = Vec::new();
    let mut collect = |flag: &str, make: &dyn Fn(&str) -> RuleFlag| {
        let values = matches.get_many::<String>(flag).into_iter().flatten();
        let indices = matches.indices_of(flag).into_iter().flatten();
        rules.extend(indices.zip(values).map(|(i, v)| (i, make(v))));
    };
    collect("allow", &|v| RuleFlag::Allow(v.to_owned()));
    collect("inspect", &|v| RuleFlag::Inspect(v.to_owned()));
    collect("deny", &|v| RuleFlag::Deny(v.to_owned()));
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
