//! `cargo xtask dist --try`: the packages in use, in a machine of the tests' rig.

use std::path::Path;

use anyhow::Result;

use crate::{
    privilege, setup,
    workspace::{Workspace, run},
};

/// Runs the test that installs, uses and removes the packages in `folder`.
pub(super) fn check(workspace: &Workspace, folder: &Path) -> Result<()> {
    setup::kernels(workspace)?;
    setup::debian(workspace)?;
    let mut cargo = workspace.cargo();
    cargo
        .args(["test", "--package=slipgate-testbed", "--test=kernels"])
        .args(["--", "--ignored", "--nocapture", "the_packages"])
        .env("SLIPGATE_DIST", folder);
    privilege::run_binaries_as_root(workspace, &mut cargo)?;
    run(&mut cargo)
}
