//! `slipgate policy check`, `explain` and `diff`, which read files alone.
use std::process::ExitCode;

use slipgate_policy::tools::{self, diff::Diff, flow_log::Recorded};

use super::{compile, flow_log};
use crate::{
    args::{CheckArgs, DEFAULT_GATEWAY, DiffArgs, ExplainArgs},
    show::print_once,
};

/// Exit status of `diff` if the policies decide differently.
const EXIT_DIFFERENT: u8 = 1;
/// Exit status of `explain` if the flow is refused, as that of `slipgate why`.
const EXIT_REFUSED: u8 = 3;

/// Prints the errors of a policy file, and rules that are probably mistakes.
pub(super) fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let compiled = compile(&args.file)?;
    let warnings = tools::check::warnings(&compiled, DEFAULT_GATEWAY.into());
    let name = compiled.file.name();
    let mut text = String::new();
    for warning in &warnings {
        text.push_str(&format!("{warning}\n"));
    }
    text.push_str(&format!(
        "{name}: {}\n",
        tools::check::summary(&compiled, warnings.len())
    ));
    print_once(&text)?;
    Ok(match args.strict && !warnings.is_empty() {
        true => ExitCode::from(slipgate_broker::EXIT_USAGE),
        false => ExitCode::SUCCESS,
    })
}

/// Prints the decision of a policy file about a flow.
pub(super) fn explain(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let compiled = compile(&args.file)?;
    let policy = compiled.named(args.policy.as_deref())?;
    let (passes, text) = tools::explain(
        policy,
        &args.destination,
        args.proto.into(),
        DEFAULT_GATEWAY.into(),
    )?;
    print_once(&text)?;
    Ok(match passes {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_REFUSED),
    })
}

/// Prints the decisions that a candidate policy would have changed, by the records of a flow log.
pub(super) fn diff(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (compile(&args.before)?, compile(&args.after)?);
    let mut difference = Diff::new(&before, &after, args.policy.as_deref());
    let mut failed = None;
    let mut recorded = Recorded::default();
    let reader = flow_log::read(&args.flow_log, &mut |seen| {
        recorded.note(&seen);
        if args.vm.as_deref().is_some_and(|only| only != seen.vm()) {
            return;
        }
        if let Err(e) = difference.take(&seen) {
            failed.get_or_insert(e);
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    recorded.has(args.vm.as_deref(), "--vm", &args.flow_log)?;
    print_once(&difference.text())?;
    if reader.foreign > 0 {
        crate::log::say(format_args!(
            "{} lines of {} are no records and were left out",
            reader.foreign,
            args.flow_log.display()
        ));
    }
    Ok(match difference.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_DIFFERENT),
    })
}
