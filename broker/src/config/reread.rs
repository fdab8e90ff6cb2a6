//! The command line read again while slipgate runs.
use std::path::Path;

use slipgate_policy::document::{ConfigError, PolicyFile};

use super::{Config, policy_flags::is_same_file};

impl Config {
    /// Returns the configuration with its files read again, including the policy file's resolvers
    /// and forwards. On error nothing changes.
    ///
    /// # Errors
    /// As [`Config::settle`].
    pub fn reread(&self) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.settle()?;
        Ok(new)
    }

    /// Settles the configuration again from the files as last read.
    pub(crate) fn settled(&self) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.settle_with(self.base_file.clone())?;
        Ok(new)
    }

    /// Returns the configuration with another policy file. Another path to the same file changes
    /// nothing.
    ///
    /// # Errors
    /// As [`Config::settle`].
    pub fn with_policy_file(&self, file: &Path) -> Result<Self, ConfigError> {
        if self
            .flags
            .file
            .as_deref()
            .is_some_and(|given| is_same_file(given, file))
        {
            return self.reread();
        }
        let mut new = self.clone();
        new.flags.file = Some(file.to_owned());
        new.settle()?;
        Ok(new)
    }

    /// Returns the configuration with another policy file that is already loaded.
    pub(crate) fn with_policy(&self, file: PolicyFile) -> Result<Self, ConfigError> {
        let mut new = self.clone();
        new.flags.file = Some(file.path().to_owned());
        new.settle_with(Some(file))?;
        Ok(new)
    }

    /// Name of the policy in force, for messages.
    pub(crate) fn policy_name(&self) -> String {
        match &self.base_file {
            Some(file) => file.name(),
            None => "the rules of the command line".to_owned(),
        }
    }
}
