//! `slipgate policy check`: errors of a policy file, and rules that are probably mistakes.
use std::process::ExitCode;

use slipgate_policy::tools::check::{summary, warnings};

use super::compile;
use crate::{
    args::{CheckArgs, DEFAULT_GATEWAY},
    show::print_once,
};

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let compiled = compile(&args.file)?;
    let warnings = warnings(&compiled, DEFAULT_GATEWAY.into());
    let name = compiled.file.name();
    let mut text = String::new();
    for warning in &warnings {
        text.push_str(&format!("{warning}\n"));
    }
    text.push_str(&format!("{name}: {}\n", summary(&compiled, warnings.len())));
    print_once(&text)?;
    Ok(match args.strict && !warnings.is_empty() {
        true => ExitCode::from(slipgate_broker::EXIT_USAGE),
        false => ExitCode::SUCCESS,
    })
}
