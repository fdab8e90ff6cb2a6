//! The command line read again while slipgate runs.
use std::path::Path;

use slipgate_policy::document::{ConfigError, PolicyFile};

use super::{Config, policy_flags::is_same_file};

impl Config {
    /// The same, with its files read again: what the policy file says of resolvers and forwards
    /// included. An error leaves everything as it was.
    ///
    /// # Errors
    /// As [`Config::settle`].
    pub fn reread(&self) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.settle()?;
        Ok(new)
    }

    /// The same, worked out again from what was read last.
    pub(crate) fn settled(&self) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.settle_with(self.policy_file.clone())?;
        Ok(new)
    }

    /// The same with another policy file. By another name for the same file nothing becomes another.
    ///
    /// # Errors
    /// As [`Config::settle`].
    pub fn with_policy_file(&self, file: &Path) -> Result<Self, ConfigError> {
        if self
            .typed
            .file
            .as_deref()
            .is_some_and(|typed| is_same_file(typed, file))
        {
            return self.reread();
        }
        let mut new = self.clone();
        new.typed.file = Some(file.to_owned());
        new.settle()?;
        Ok(new)
    }

    /// The same with another policy file, which is there already.
    pub(crate) fn with_policy(&self, file: PolicyFile) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.typed.file = Some(file.path().to_owned());
        new.settle_with(Some(file))?;
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
