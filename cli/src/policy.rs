//! `slipgate policy`: policy files and flow logs, read by people. But for `apply`, nothing here
//! needs a running slipgate or privileges.
mod flow_log;
mod learn;
mod offline;
mod put;

use std::{path::Path, process::ExitCode};

use slipgate_broker::config::{from_disk, read_policy_file};
use slipgate_policy::{
    document::{ConfigError, schema},
    tools::Compiled,
};

use crate::{args::PolicyCommand, control, show::print_once};

/// Runs the command `slipgate policy`.
pub(crate) fn run(command: &PolicyCommand) -> anyhow::Result<ExitCode> {
    match command {
        PolicyCommand::Put(args) => put::run(args).map(|()| ExitCode::SUCCESS),
        PolicyCommand::Rm(args) => put::remove(args).map(|()| ExitCode::SUCCESS),
        PolicyCommand::Apply(args) => control::apply::run(args).map(|()| ExitCode::SUCCESS),
        PolicyCommand::Check(args) => offline::check(args),
        PolicyCommand::Explain(args) => offline::explain(args),
        PolicyCommand::Diff(args) => offline::diff(args),
        PolicyCommand::Learn(args) => learn::run(args),
        PolicyCommand::Schema => {
            print_once(&format!("{}\n", serde_json::to_string_pretty(&schema())?))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Reads and compiles a policy file.
fn compile(path: &Path) -> Result<Compiled, ConfigError> {
    Compiled::new(read_policy_file(path)?, &from_disk)
}
