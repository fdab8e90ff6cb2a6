//! `cargo xtask run`: the demonstration in its private world, or slipgate itself on this machine.

use std::{convert::Infallible, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{
    compile, privilege, setup,
    workspace::{Workspace, run as run_to_end},
};

/// Builds, then becomes the program, so that signals and exit status are the program's own.
pub(crate) fn run(
    workspace: &Workspace,
    guest: Option<&str>,
    args: &[String],
) -> Result<Infallible> {
    compile::build(workspace, &compile::Build::default())?;
    let slipgate = workspace.target.join("release/slipgate");
    if !args.is_empty() {
        return become_program(privilege::as_root(&slipgate)?.args(args));
    }
    setup::test_tools()?;
    run_to_end(workspace.cargo().args([
        "build",
        "--release",
        "--package=slipgate-testbed",
        "--bin=slipgate-demo",
    ]))?;
    let demo = workspace.target.join("release/slipgate-demo");
    let mut demo = privilege::as_root_with_environment(&demo)?;
    demo.env("SLIPGATE_BIN", slipgate);
    if let Some(guest) = guest {
        demo.args(["--guest", guest]);
    }
    become_program(&mut demo)
}

/// Replaces xtask.
pub(crate) fn become_program(command: &mut Command) -> Result<Infallible> {
    let why = command.exec();
    Err(why).with_context(|| format!("could not start {}", command.get_program().display()))
}
