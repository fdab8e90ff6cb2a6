//! `--allow`, `--inspect`, `--deny` and `--deny-file`, in the order typed across all of them.
use std::path::PathBuf;

use clap::ArgMatches;
use userspace_nat::rules::{Action, Rule};

use super::ConfigError;

pub(super) const DENY_FILE: &str = "--deny-file";
/// What a rule looks like.
const REMEDY: &str = "give CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp], like 192.0.2.0/24:80-90/tcp \
                      or *.example.com:443";

/// One rule flag as typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RuleFlag {
    /// `--allow RULE`
    Allow(String),
    /// `--inspect RULE`
    Inspect(String),
    /// `--deny RULE`
    Deny(String),
    /// `--deny-file F`
    DenyFile(PathBuf),
}

impl RuleFlag {
    /// The rule flags of a subcommand's matches, as typed: first match wins, so order is meaning,
    /// and clap sorts values by flag.
    pub(crate) fn in_order(matches: &ArgMatches) -> Vec<Self> {
        let mut rules: Vec<(usize, Self)> = Vec::new();
        let mut collect = |flag: &str, make: &dyn Fn(&str) -> Self| {
            let values = matches.get_many::<String>(flag).into_iter().flatten();
            let indices = matches.indices_of(flag).into_iter().flatten();
            rules.extend(indices.zip(values).map(|(i, v)| (i, make(v))));
        };
        collect("allow", &|v| Self::Allow(v.to_owned()));
        collect("inspect", &|v| Self::Inspect(v.to_owned()));
        collect("deny", &|v| Self::Deny(v.to_owned()));
        let files = matches
            .get_many::<PathBuf>("deny_file")
            .into_iter()
            .flatten();
        let indices = matches.indices_of("deny_file").into_iter().flatten();
        rules.extend(
            indices
                .zip(files)
                .map(|(i, f)| (i, Self::DenyFile(f.clone()))),
        );
        rules.sort_by_key(|(index, _)| *index);
        rules.into_iter().map(|(_, rule)| rule).collect()
    }
}

/// Whether each pattern makes sense. Files are read later.
pub(super) fn check(rules: &[RuleFlag]) -> Result<(), ConfigError> {
    for rule in rules {
        let (action, text) = match rule {
            RuleFlag::Allow(text) => (Action::Allow, text),
            RuleFlag::Inspect(text) => (Action::Inspect, text),
            RuleFlag::Deny(text) => (Action::Deny, text),
            RuleFlag::DenyFile(_) => continue,
        };
        parse(action, text)?;
    }
    Ok(())
}

fn flag_of(action: Action) -> &'static str {
    match action {
        Action::Allow => "--allow",
        Action::Inspect => "--inspect",
        Action::Deny => "--deny",
    }
}

/// What was written behind a flag.
pub(super) fn parse(action: Action, text: &str) -> Result<Rule, ConfigError> {
    let parsed = Rule::parse(action, text);
    parsed.map_err(|e| ConfigError::new(flag_of(action), text, e.to_string(), REMEDY))
}
