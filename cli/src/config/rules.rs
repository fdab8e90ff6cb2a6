//! `--allow`, `--deny` and `--deny-file`, in the order typed across all three.
use std::path::PathBuf;

use anyhow::Context as _;
use clap::ArgMatches;
use serde::{Deserialize, Serialize};
use userspace_nat::rules::{Action, DenyFile, Pattern, Policy, Rule};

use super::ConfigError;

/// One rule flag as typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RuleFlag {
    /// `--allow RULE`
    Allow(String),
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
        let (flag, text) = match rule {
            RuleFlag::Allow(text) => ("--allow", text),
            RuleFlag::Deny(text) => ("--deny", text),
            RuleFlag::DenyFile(_) => continue,
        };
        if let Err(e) = text.parse::<Pattern>() {
            return Err(ConfigError::new(
                flag,
                text,
                e.to_string(),
                "give CIDR[:PORT[-PORT]][/tcp|udp|icmp], like 192.0.2.0/24:80-90/tcp",
            ));
        }
    }
    Ok(())
}

/// The rules with their files read: what the engine is sent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LoadedRules {
    pub(crate) default: Action,
    pub(crate) rules: Vec<LoadedRule>,
}

/// One rule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum LoadedRule {
    Match(Action, String),
    DenyFile { name: String, text: String },
}

impl LoadedRules {
    /// Reads the deny files.
    pub(crate) fn load(rules: &[RuleFlag], default_allow: bool) -> anyhow::Result<Self> {
        let rules = rules.iter().map(|rule| {
            Ok(match rule {
                RuleFlag::Allow(text) => LoadedRule::Match(Action::Allow, text.clone()),
                RuleFlag::Deny(text) => LoadedRule::Match(Action::Deny, text.clone()),
                RuleFlag::DenyFile(path) => LoadedRule::DenyFile {
                    name: path.to_string_lossy().into_owned(),
                    text: std::fs::read_to_string(path).with_context(|| {
                        format!(
                            "--deny-file {}: can't read it; give a text file with one RULE a line",
                            path.display()
                        )
                    })?,
                },
            })
        });
        Ok(Self {
            default: if default_allow {
                Action::Allow
            } else {
                Action::Deny
            },
            rules: rules.collect::<anyhow::Result<_>>()?,
        })
    }

    /// Compiles them.
    pub(crate) fn compile(&self) -> anyhow::Result<Policy> {
        let rules = self.rules.iter().map(|rule| {
            Ok(match rule {
                LoadedRule::Match(action, text) => Rule::Match(*action, text.parse()?),
                LoadedRule::DenyFile { name, text } => Rule::DenyFile(
                    DenyFile::parse(name, text).with_context(|| format!("--deny-file {name}"))?,
                ),
            })
        });
        Ok(Policy::new(
            self.default,
            rules.collect::<anyhow::Result<_>>()?,
        ))
    }
}
