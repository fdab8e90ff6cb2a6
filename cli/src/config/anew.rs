//! The command line read again while slipgate runs.
use std::path::Path;

use super::{Config, ConfigError};

impl Config {
    /// The same, with its files read again: what the policy file says of resolvers and forwards
    /// included. An error leaves everything as it was.
    pub(crate) fn reread(&self) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.settle()?;
        Ok(new)
    }

    /// The same with another policy file.
    pub(crate) fn with_policy_file(&self, file: &Path) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.typed.file = Some(file.to_owned());
        new.settle()?;
        Ok(new)
    }

    /// What is in force, for people.
    pub(crate) fn policy_name(&self) -> String {
        match &self.policy_file {
            Some(file) => file.name(),
            None => "the rules of the command line".to_owned(),
        }
    }
}
