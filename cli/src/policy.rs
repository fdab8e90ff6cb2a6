//! `slipgate policy`: policy files and flow logs, read by people. But for `apply`, nothing here
//! needs a running slipgate or privileges.
mod check;
mod diff;
mod explain;
mod flow_log;
mod learn;

use std::{path::Path, process::ExitCode};

use userspace_nat::rules::{Policy, PolicySet};

use crate::{
    args::PolicyCommand,
    config::{ConfigError, LoadedPolicies, PolicyFile, Typed, from_disk, has_top_level, schema},
    control,
    show::print_once,
};

/// Runs `slipgate policy`.
pub(crate) fn run(command: &PolicyCommand) -> anyhow::Result<ExitCode> {
    match command {
        PolicyCommand::Apply(args) => control::apply::run(args).map(|()| ExitCode::SUCCESS),
        PolicyCommand::Check(args) => check::run(args),
        PolicyCommand::Explain(args) => explain::run(args),
        PolicyCommand::Diff(args) => diff::run(args),
        PolicyCommand::Learn(args) => learn::run(args),
        PolicyCommand::Schema => {
            print_once(&format!("{}\n", serde_json::to_string_pretty(&schema())?))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A policy file, compiled.
struct Compiled {
    file: PolicyFile,
    policies: PolicySet,
}

impl Compiled {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = PolicyFile::read(path)?;
        crate::config::check_file(&file)?;
        let loaded = LoadedPolicies::of(&Typed::default(), Some(&file), &from_disk)?;
        let policies = loaded.compile()?;
        Ok(Self { file, policies })
    }

    /// The policy of that name, or the file's top level.
    fn named(&self, name: Option<&str>) -> Result<&Policy, ConfigError> {
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
