//! Installation of Debian packages by apt.

use std::{
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result};

use crate::{
    privilege::as_root,
    workspace::{capture, on_path, say},
};

/// Whether this system has apt.
pub(crate) fn is_here() -> bool {
    on_path("apt-get").is_some()
}

/// Installs `packages` without prompts. Updates the package lists if a package is not in them.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    // apt has a lock of its own, and fails where it is held.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let names = packages.join(" ");
    apt_get().with_context(|| format!("Debian packages are missing: {names}"))?;
    say(format!("installing Debian packages: {names}"));
    // Lists that are missing or older than what the mirror still has are refreshed, once.
    if packages.iter().all(|package| is_known(package)) && install_known(packages).is_ok() {
        return Ok(());
    }
    update()?;
    install_known(packages).with_context(|| format!("could not install the packages {names}"))
}

/// Updates the package lists, which may be older than what the mirror still has.
pub(crate) fn update() -> Result<()> {
    capture(apt_get()?.arg("update"))
        .map(drop)
        .context("could not refresh Debian's package lists")
}

fn install_known(packages: &[&str]) -> Result<()> {
    // `--no-remove`: rustc-web would replace a Debian `rustc`, which is not ours to decide.
    // Captured, for dpkg reports each package's every step.
    capture(
        apt_get()?
            .args(["install", "--yes", "--no-install-recommends", "--no-remove"])
            .args(packages),
    )
    .map(drop)
}

fn apt_get() -> Result<Command> {
    // `env` because sudo does not pass variables on.
    let mut command = as_root("env")?;
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet=2"]);
    Ok(command)
}

/// Whether apt's lists have an installable version of a package.
fn is_known(package: &str) -> bool {
    Command::new("apt-cache")
        .args(["show", "--no-all-versions", package])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
