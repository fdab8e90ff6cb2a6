//! Finds what links programs for another machine: its standard library, from rustup, and Debian's
//! cross compiler with its C library.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::apt;
use crate::workspace::{Workspace, capture, on_path, run, say};

/// Targets, each with the linker, a file of the C library, and the packages of the two.
const TARGETS: [(&str, &str, &str, [&str; 2]); 1] = [(
    "aarch64-unknown-linux-gnu",
    "aarch64-linux-gnu-gcc",
    "/usr/aarch64-linux-gnu/lib/libc.a",
    ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
)];

/// Returns the linker's path; installs what is missing.
pub(super) fn find_or_install(workspace: &Workspace, target: &str) -> Result<PathBuf> {
    let (_, linker, libc, packages) = TARGETS
        .into_iter()
        .find(|(name, ..)| *name == target)
        .with_context(|| format!("no linker is known for {target}"))?;
    standard_library(workspace, target)?;
    if on_path(linker).is_none() || !Path::new(libc).is_file() {
        if !apt::is_here() {
            bail!("there is no {linker}, or no {libc}: install them");
        }
        apt::install(&packages)?;
    }
    on_path(linker).with_context(|| format!("there is no {linker}"))
}

/// Adds the target to the toolchain if it is not there: enough to check what needs no linker.
pub(super) fn standard_library(workspace: &Workspace, target: &str) -> Result<()> {
    let library = capture(
        workspace
            .rustc()
            .args(["--print=target-libdir", "--target", target]),
    )?;
    if Path::new(library.trim()).is_dir() {
        return Ok(());
    }
    say(format!("adding to the toolchain: {target}"));
    run(Command::new("rustup")
        .current_dir(&workspace.root)
        .args(["target", "add", target]))
    .with_context(|| format!("the Rust toolchain has no standard library for {target}"))
}
