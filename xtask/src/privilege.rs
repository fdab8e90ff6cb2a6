//! Runs commands as root: directly if this process is root, else through sudo.

use std::{ffi::OsStr, fs, os::unix::fs::MetadataExt as _, process::Command};

use anyhow::{Result, bail};

use crate::{
    rustc_version::rustc_version,
    workspace::{Workspace, on_path, run},
};

/// Returns a command that runs as root, with root's environment.
pub(crate) fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    elevated(program.as_ref(), &[])
}

/// Returns a command that runs as root, with the environment that the command is given.
pub(crate) fn as_root_with_environment(program: impl AsRef<OsStr>) -> Result<Command> {
    elevated(program.as_ref(), &["--preserve-env"])
}

/// Makes a `cargo test` or `cargo run` start the compiled binaries as root.
pub(crate) fn run_binaries_as_root(workspace: &Workspace, cargo: &mut Command) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    ask_for_tests()?;
    let host = rustc_version(workspace)?
        .host
        .to_uppercase()
        .replace('-', "_");
    cargo.env(format!("CARGO_TARGET_{host}_RUNNER"), "sudo --preserve-env");
    Ok(())
}

/// Makes sure that tests and benchmarks can be run as root. Asks for the password now, while nothing
/// else is on the terminal.
pub(crate) fn ask_for_tests() -> Result<()> {
    if is_root() {
        return Ok(());
    }
    require_sudo("the tests and benchmarks")?;
    run(Command::new("sudo").arg("--validate"))
}

fn elevated(program: &OsStr, options: &[&str]) -> Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    require_sudo(&program.to_string_lossy())?;
    let mut command = Command::new("sudo");
    command.args(options).arg("--").arg(program);
    Ok(command)
}

/// Whether this process is root's.
pub(crate) fn is_root() -> bool {
    // Of our process, so of the effective user.
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn require_sudo(whom: &str) -> Result<()> {
    if on_path("sudo").is_none() {
        bail!("{whom} must run as root, and there is no sudo: run `cargo xtask` as root");
    }
    Ok(())
}
