//! `--allow`, `--deny` and `--deny-file`, in the order typed across all three.
use std::path::PathBuf;

use clap::ArgMatches;
use serde::{Deserialize, Serialize};
use userspace_nat::rules::{Action, DenyFile, DenyFileError, Policy, Rule};

use super::ConfigError;

const DENY_FILE: &str = "--deny-file";
/// What a rule looks like.
const REMEDY: &str = "give CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp], like 192.0.2.0/24:80-90/tcp \
                      or *.example.com:443";

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
        let (flag, action, text) = match rule {
            RuleFlag::Allow(text) => ("--allow", Action::Allow, text),
            RuleFlag::Deny(text) => ("--deny", Action::Deny, text),
            RuleFlag::DenyFile(_) => continue,
        };
        parse(flag, action, text)?;
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
    pub(crate) fn load(rules: &[RuleFlag], default_allow: bool) -> Result<Self, ConfigError> {
        let rules = rules.iter().map(|rule| {
            Ok(match rule {
                RuleFlag::Allow(text) => LoadedRule::Match(Action::Allow, text.clone()),
                RuleFlag::Deny(text) => LoadedRule::Match(Action::Deny, text.clone()),
                RuleFlag::DenyFile(path) => LoadedRule::DenyFile {
                    name: path.to_string_lossy().into_owned(),
                    text: std::fs::read_to_string(path).map_err(|e| {
                        ConfigError::new(
                            DENY_FILE,
                            path.display(),
                            format!("it can't be read ({e})"),
                            "give a text file with one RULE a line",
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
            rules: rules.collect::<Result<_, _>>()?,
        })
    }

    /// Compiles them.
    pub(crate) fn compile(&self) -> Result<Policy, ConfigError> {
        let rules = self.rules.iter().map(|rule| {
            Ok(match rule {
                LoadedRule::Match(action, text) => parse(flag_of(*action), *action, text)?,
                LoadedRule::DenyFile { name, text } => {
                    let parsed = DenyFile::parse(name, text);
                    Rule::DenyFile(parsed.map_err(|e| bad_line(name, &e))?)
                }
            })
        });
        Ok(Policy::new(self.default, rules.collect::<Result<_, _>>()?))
    }
}

fn bad_line(name: &str, error: &DenyFileError) -> ConfigError {
    let (given, problem) = match error {
        DenyFileError::Line { line, why, .. } => (format!("{name}:{line}"), why.to_string()),
        other => (name.to_owned(), other.to_string()),
    };
    let remedy = "correct the line, or put a # before it";
    ConfigError::new(DENY_FILE, given, problem, remedy)
}

fn flag_of(action: Action) -> &'static str {
    match action {
        Action::Allow => "--allow",
        Action::Deny => "--deny",
    }
}

fn parse(flag: &'static str, action: Action, text: &str) -> Result<Rule, ConfigError> {
    let parsed = Rule::parse(action, text);
    parsed.map_err(|e| ConfigError::new(flag, text, e.to_string(), REMEDY))
}
