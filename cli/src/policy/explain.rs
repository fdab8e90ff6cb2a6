//! `slipgate policy explain`: the decision of a policy file about a flow, without a running broker.
use std::process::ExitCode;

use slipgate_policy::tools::explain;

use super::compile;
use crate::{
    args::{DEFAULT_GATEWAY, ExplainArgs},
    show::print_once,
};

/// For scripts, as `slipgate why` has it.
const EXIT_REFUSED: u8 = 3;

pub(super) fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let compiled = compile(&args.file)?;
    let policy = compiled.named(args.policy.as_deref())?;
    let (passes, text) = explain(
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
