//! Rule flags of a command line: `--allow`, `--inspect`, `--deny`, `--deny-file`.
use std::path::PathBuf;

use super::error::ConfigError;
use crate::{Action, Rule};

pub(super) const DENY_FILE: &str = "--deny-file";
/// Form of a rule, in errors.
const REMEDY: &str = "give CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp], like 192.0.2.0/24:80-90/tcp \
                      or *.example.com:443";

/// One rule flag of the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleFlag {
    /// `--allow RULE`, `--inspect RULE` or `--deny RULE`: the rule as given.
    Match(Action, String),
    /// `--deny-file F`: the path of the file.
    DenyFile(PathBuf),
}

/// Checks each pattern. Deny files are read later.
///
/// # Errors
/// A pattern cannot be parsed.
pub fn check_rules(rules: &[RuleFlag]) -> Result<(), ConfigError> {
    for rule in rules {
        if let RuleFlag::Match(action, text) = rule {
            parse(*action, text)?;
        }
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

/// Parses the value of a rule flag.
pub(super) fn parse(action: Action, text: &str) -> Result<Rule, ConfigError> {
    let parsed = Rule::parse(action, text);
    parsed.map_err(|e| ConfigError::new(flag_of(action), text, e.to_string(), REMEDY))
}
