//! `slipgate policy diff`: the decisions that a candidate policy would have changed, by the records
//! of a flow log.
use std::process::ExitCode;

use slipgate_policy::tools::{diff::Diff, flow_log::Recorded};

use super::{compile, flow_log};
use crate::{args::DiffArgs, show::print_once};

const EXIT_DIFFERENT: u8 = 1;

pub(super) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (compile(&args.before)?, compile(&args.after)?);
    let mut diff = Diff::new(&before, &after, args.policy.as_deref());
    let mut failed = None;
    let mut recorded = Recorded::default();
    let reader = flow_log::read(&args.flow_log, &mut |seen| {
        recorded.note(&seen);
        if args.vm.as_deref().is_some_and(|only| only != seen.vm()) {
            return;
        }
        if let Err(e) = diff.take(&seen) {
            failed.get_or_insert(e);
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    recorded.has(args.vm.as_deref(), "--vm", &args.flow_log)?;
    print_once(&diff.text())?;
    if reader.foreign > 0 {
        crate::log::say(format_args!(
            "{} lines of {} are no records and were left out",
            reader.foreign,
            args.flow_log.display()
        ));
    }
    Ok(match diff.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_DIFFERENT),
    })
}
