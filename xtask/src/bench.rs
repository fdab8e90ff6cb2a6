//! `cargo xtask bench`: builds and runs the benchmarks of slipgate and its peers.

use std::convert::Infallible;

use anyhow::Result;

use crate::{
    compile, privilege,
    run::become_program,
    setup,
    workspace::{Workspace, run, say},
};

/// Part of the benchmarks that boots Debian's kernel, and the init of its guest.
const DISK_DEBIAN: &str = "disk-debian";
const INIT: &str = "slipgate-rig-init";

/// Installs the tools, builds, then replaces this process with the benchmark program.
pub(crate) fn bench(workspace: &Workspace, args: &[String]) -> Result<Infallible> {
    setup::test_tools()?;
    // Without them the rest is still measured, and the report says who is missing.
    if let Err(why) = setup::benchmarked_programs() {
        say(format!("{why:#} (left out of the comparison)"));
    }
    compile::build(workspace, &compile::Build::default())?;
    let mut init = None;
    if args.iter().any(|arg| arg.contains(DISK_DEBIAN)) {
        setup::kernels(workspace)?;
        let mut cargo = workspace.cargo();
        cargo.args([
            "build",
            "--release",
            "--package=slipgate-testbed",
            "--bin",
            INIT,
        ]);
        run(&mut cargo)?;
        init = Some(workspace.target.join("release").join(INIT));
    }
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
    if let Some(init) = init {
        cargo.env("SLIPGATE_RIG_INIT", init);
    }
    privilege::run_binaries_as_root(workspace, &mut cargo)?;
    become_program(&mut cargo)
}
