//! Clients that test `slipgate cni`: CNI's `cnitool`, and a program around firecracker-go-sdk's
//! parser of results. Both are built from `tests/cni-clients`, whose `go.mod` has their versions.

use std::process::Command;

use anyhow::{Context, Result, bail};

use super::apt;
use crate::workspace::{Workspace, on_path, run, say};

/// Programs, each with the package that it is built from.
const CLIENTS: [(&str, &str); 2] = [
    ("cnitool", "github.com/containernetworking/cni/cnitool"),
    ("vmconf", "."),
];

/// Builds the clients that are not there.
///
/// # Errors
/// There is no Go, or one can't be built.
pub(super) fn find_or_build(workspace: &Workspace) -> Result<()> {
    let into = workspace.tools().join("cni-clients");
    let missing = CLIENTS
        .iter()
        .filter(|(name, _)| !into.join(name).is_file());
    let missing: Vec<_> = missing.collect();
    if missing.is_empty() {
        return Ok(());
    }
    if on_path("go").is_none() {
        if !apt::is_here() {
            bail!("there is no Go: install it");
        }
        apt::install(&["golang-go"])?;
    }
    say("building the clients that test `slipgate cni`");
    for (name, package) in missing {
        let mut go = Command::new("go");
        go.current_dir(workspace.root.join("tests/cni-clients"))
            .args(["build", "-buildvcs=false", "-mod=readonly", "-o"])
            .arg(into.join(name))
            .arg(package);
        run(&mut go).with_context(|| format!("could not build {name}"))?;
    }
    Ok(())
}
