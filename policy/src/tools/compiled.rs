//! Policy files, compiled for tools that work without a running slipgate.
use crate::{
    Policy, PolicySet,
    document::{
        CliOverrides, ConfigError, LoadedPolicies, PolicyFile, Reader, check_file, has_top_level,
    },
};

/// A policy file with its compiled policies.
#[derive(Debug)]
pub struct Compiled {
    /// Policy file, as parsed.
    pub file: PolicyFile,
    /// Compiled policies of the file.
    pub policies: PolicySet,
}

impl Compiled {
    /// Compiles a file. `read`: function that reads the deny files it names.
    ///
    /// # Errors
    /// Something in the file cannot be used; the error gives the place and a remedy.
    pub fn new(file: PolicyFile, read: Reader<'_>) -> Result<Self, ConfigError> {
        check_file(&file)?;
        let loaded = LoadedPolicies::of(&CliOverrides::default(), Some(&file), read)?;
        let policies = loaded.compile()?;
        Ok(Self { file, policies })
    }

    /// Returns the policy of that name, or the file's top level for `None`.
    ///
    /// # Errors
    /// The file has no such policy, or no top level.
    pub fn named(&self, name: Option<&str>) -> Result<&Policy, ConfigError> {
        let all = self.policies.iter();
        let names: Vec<&str> = all.filter_map(|p| p.settings().name.as_deref()).collect();
        let Some(name) = name else {
            if has_top_level(&self.file.document) {
                return Ok(self.policies.of(Some(0)));
            }
            let problem = "it has named policies only";
            let remedy = format!("give --policy NAME, one of {}", names.join(", "));
            return Err(ConfigError::new("FILE", self.file.name(), problem, remedy));
        };
        let found = self.policies.by_name(name).map(|(_, policy)| policy);
        found.ok_or_else(|| {
            let remedy = match names[..] {
                [] => "leave it out: the file has no [policy.NAME]".to_owned(),
                _ => format!("give one of {}", names.join(", ")),
            };
            let problem = format!("{} has no such policy", self.file.name());
            ConfigError::new("--policy", name, problem, remedy)
        })
    }
}
