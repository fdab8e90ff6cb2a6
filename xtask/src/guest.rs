//! Builds the built-in guest into `target/guest`, from where `cli/build.rs` embeds it.
//!
//! The guest is a boot payload for the host's own target, without a standard library, so stable
//! Rust builds it. `guest/build.rs` makes it bootable; the flags here are those that a build script
//! cannot set. An image that has not changed keeps its modification time.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    elf,
    rustc_version::rustc_version,
    workspace::{Workspace, run, say},
};

/// Name of the package and of the image.
pub(crate) const NAME: &str = "slipgate-guest";

/// Compiler flags: a fixed load address, because nothing relocates the image, and no unwinding.
const FLAGS: [&str; 2] = ["-Crelocation-model=static", "-Cpanic=abort"];

/// Builds the image. Cargo skips what is up to date.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    let out = workspace.guest();
    fs::create_dir_all(&out).with_context(|| format!("could not make {}", out.display()))?;
    let lock = File::create(out.join(".lock"))?;
    lock.lock().context("could not lock target/guest/.lock")?;
    let host = rustc_version(workspace)?.host;
    run(cargo(workspace, "build", &host).arg("--release"))
        .context("could not build the built-in guest")?;
    let built = out.join("cargo").join(&host).join("release").join(NAME);
    if place(&built, &out.join(NAME))? {
        let bytes = built.metadata()?.len();
        say(format!("new {} ({bytes} bytes)", out.join(NAME).display()));
    }
    Ok(())
}

/// Runs clippy on the image. The workspace's lints leave it out, because it cannot be built
/// together with `std`.
pub(crate) fn lint(workspace: &Workspace) -> Result<()> {
    let host = rustc_version(workspace)?.host;
    run(cargo(workspace, "clippy", &host).args(["--quiet", "--", "-Dwarnings"]))
}

/// Returns a cargo command for the image. The target is explicit, so that the flags do not apply to
/// build scripts and procedural macros.
fn cargo(workspace: &Workspace, verb: &str, host: &str) -> Command {
    let mut cargo = workspace.cargo();
    cargo
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
        .args([verb, "--package", NAME, "--bin", NAME, "--features=image"])
        .args(["--target", host])
        .arg("--target-dir")
        .arg(workspace.guest().join("cargo"));
    cargo
}

/// Replaces `image` if `built` differs. Returns whether it was replaced.
fn place(built: &Path, image: &Path) -> Result<bool> {
    let new = fs::read(built).with_context(|| format!("could not read {}", built.display()))?;
    match elf::interpreter(&new) {
        Some(None) => {}
        Some(Some(loader)) => bail!("{} asks for {loader}: it can't boot", built.display()),
        None => bail!("{} is not a 64-bit little-endian ELF file", built.display()),
    }
    if fs::read(image).is_ok_and(|old| old == new) {
        return Ok(false);
    }
    let temporary = image.with_extension("new");
    fs::write(&temporary, new)?;
    fs::rename(&temporary, image)?;
    Ok(true)
}
