//! Rules as a command line has them: `--allow`, `--inspect`, `--deny`, `--deny-file`.
use std::path::PathBuf;

use super::error::ConfigError;
use crate::{Action, Rule};

pub(super) const DENY_FILE: &str = "--deny-file";
/// What a rule looks like.
const REMEDY: &str = "give CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp], like 192.0.2.0/24:80-90/tcp \
                      or *.example.com:443";

/// One rule flag as typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleFlag {
    /// `--allow RULE`
    Allow(String),
    /// `--inspect RULE`
    Inspect(String),
    /// `--deny RULE`
    Deny(String),
    /// `--deny-file F`
    DenyFile(PathBuf),
}

/// Whether each pattern makes sense. Files are read later.
///
/// # Errors
/// One does not.
pub fn check_rules(rules: &[RuleFlag]) -> Result<(), ConfigError> {
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
