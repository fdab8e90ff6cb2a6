//! What needs root is run as it is when we are root, else through sudo.

use std::{ffi::OsStr, process::Command};

use anyhow::{Result, bail};

use crate::workspace::on_path;

/// Whether this process has root's effective user id.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A command that will run as root.
pub(crate) fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    if on_path("sudo").is_none() {
        bail!(
            "`{}` needs root, and there is no sudo: run `cargo xtask` as root",
            program.as_ref().display()
        );
    }
    let mut command = Command::new("sudo");
    command.arg(program);
    Ok(command)
}
