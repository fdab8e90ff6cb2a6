//! A policy file, compiled, for tools that read it without a running slipgate.
use crate::{
    Policy, PolicySet,
    document::{
        CliOverrides, ConfigError, LoadedPolicies, PolicyFile, Reader, check_file, has_top_level,
    },
};

/// A policy file, compiled.
#[derive(Debug)]
pub struct Compiled {
    /// The file.
    pub file: PolicyFile,
    /// What it says.
    pub policies: PolicySet,
}

impl Compiled {
    /// Compiles a file. `read`: how the deny files are had that it names.
    ///
    /// # Errors
    /// Something in it cannot be used; the error says where and what would do.
    pub fn new(file: PolicyFile, read: Reader<'_>) -> Result<Self, ConfigError> {
        check_file(&file)?;
        let loaded = LoadedPolicies::of(&CliOverrides::default(), Some(&file), read)?;
        let policies = loaded.compile()?;
        Ok(Self { file, policies })
    }

    /// The policy of that name, or the file's top level.
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
