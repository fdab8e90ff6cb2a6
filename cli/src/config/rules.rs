//! `--allow`, `--inspect`, `--deny` and `--deny-file`, in the order typed across all of them, and
//! policies as the engine is sent them.
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use serde::{Deserialize, Serialize};
use userspace_nat::rules::{
    Action, DenyFile, DenyFileError, Note, Policy, PolicySet, Rule, Settings, Written,
};

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
        let (flag, action, text) = match rule {
            RuleFlag::Allow(text) => ("--allow", Action::Allow, text),
            RuleFlag::Inspect(text) => ("--inspect", Action::Inspect, text),
            RuleFlag::Deny(text) => ("--deny", Action::Deny, text),
            RuleFlag::DenyFile(_) => continue,
        };
        parse(flag, action, text)?;
    }
    Ok(())
}

/// The policies of a process, every file read: what the engine is sent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LoadedPolicies {
    /// A VM names its own by its place here.
    pub(crate) policies: Vec<LoadedPolicy>,
}

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LoadedPolicy {
    pub(crate) settings: Settings,
    pub(crate) default: Action,
    pub(crate) rules: Vec<LoadedRule>,
}

/// One rule, as it was written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LoadedRule {
    pub(crate) rule: RuleText,
    pub(crate) note: Note,
}

/// What was written of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum RuleText {
    Match(Action, String),
    DenyFile { name: String, text: String },
}

impl LoadedPolicies {
    /// Reads the deny files of what was typed: one policy, for all VMs.
    pub(crate) fn load(rules: &[RuleFlag], default_allow: bool) -> Result<Self, ConfigError> {
        let rules = rules.iter().map(|rule| {
            Ok(LoadedRule {
                rule: match rule {
                    RuleFlag::Allow(text) => RuleText::Match(Action::Allow, text.clone()),
                    RuleFlag::Inspect(text) => RuleText::Match(Action::Inspect, text.clone()),
                    RuleFlag::Deny(text) => RuleText::Match(Action::Deny, text.clone()),
                    RuleFlag::DenyFile(path) => read_deny_file(path)?,
                },
                note: Note::default(),
            })
        });
        let policy = LoadedPolicy {
            settings: Settings::default(),
            default: match default_allow {
                true => Action::Allow,
                false => Action::Deny,
            },
            rules: rules.collect::<Result<_, _>>()?,
        };
        Ok(Self {
            policies: vec![policy],
        })
    }

    /// Compiles them.
    pub(crate) fn compile(&self) -> Result<PolicySet, ConfigError> {
        let policies = self.policies.iter().map(LoadedPolicy::compile);
        Ok(PolicySet::new(policies.collect::<Result<_, _>>()?))
    }
}

impl LoadedPolicy {
    fn compile(&self) -> Result<Policy, ConfigError> {
        let rules = self.rules.iter().map(|LoadedRule { rule, note }| {
            let rule = match rule {
                RuleText::Match(action, text) => parse(flag_of(*action), *action, text)?,
                RuleText::DenyFile { name, text } => {
                    let parsed = DenyFile::parse(name, text);
                    Rule::DenyFile(parsed.map_err(|e| bad_line(name, &e))?)
                }
            };
            let note = note.clone();
            Ok(Written { rule, note })
        });
        let rules: Vec<Written> = rules.collect::<Result<_, _>>()?;
        Ok(Policy::new(self.default, rules).with(self.settings.clone()))
    }
}

fn read_deny_file(path: &Path) -> Result<RuleText, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        ConfigError::new(
            DENY_FILE,
            path.display(),
            format!("it can't be read ({e})"),
            "give a text file with one RULE a line",
        )
    })?;
    let name = path.to_string_lossy().into_owned();
    Ok(RuleText::DenyFile { name, text })
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
        Action::Inspect => "--inspect",
        Action::Deny => "--deny",
    }
}

fn parse(flag: &'static str, action: Action, text: &str) -> Result<Rule, ConfigError> {
    let parsed = Rule::parse(action, text);
    parsed.map_err(|e| ConfigError::new(flag, text, e.to_string(), REMEDY))
}
