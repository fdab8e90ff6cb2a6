//! `cargo xtask bench`: builds and runs the benchmarks of slipgate and its peers.

use std::convert::Infallible;

use anyhow::Result;

use crate::{
    compile, privilege,
    run::become_program,
    setup,
    workspace::{Workspace, say},
};

/// Installs the tools, builds, then replaces this process with the benchmark program.
pub(crate) fn bench(workspace: &Workspace, args: &[String]) -> Result<Infallible> {
    setup::test_tools()?;
    // Without them the rest is still measured, and the report says who is missing.
    if let Err(why) = setup::resolvers() {
        say(format!("{why:#} (left out of the comparison)"));
    }
    compile::build(workspace, &compile::Build::default())?;
    let mut cargo = workspace.cargo();
    cargo
        .args([
            "run",
            "--quiet",
            "--release",
            "--package=slipgate-bench",
            "--",
        ])
        .args(args)
        .env("SLIPGATE_BIN", workspace.target.join("release/slipgate"));
    privilege::run_binaries_as_root(workspace, &mut cargo)?;
    become_program(&mut cargo)
}
