//! `cargo xtask dist`: what a release is made of, in the target folder's `dist`: one static binary
//! that needs no Rust, no LLVM, no source and no libc; packages for Debian and for RPM; bills of
//! materials; and the digests of all of them.
//!
//! Man pages and completions come from the binary itself. The packages take what
//! [`Workspace::package`] has and the files of `packaging/`; where each goes is in
//! `cli/Cargo.toml`.

mod packages;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    bpf, elf, guest,
    rustc_version::rustc_version,
    setup,
    workspace::{Workspace, capture, run, say},
};

/// Builds all of it, or the binary alone, which needs no further tool.
pub(crate) fn dist(workspace: &Workspace, binary_only: bool) -> Result<()> {
    bpf::build(workspace, &setup::bpf(workspace)?)?;
    guest::build(workspace)?;
    let target = rustc_version(workspace)?.host;
    let built = build_static(workspace, &target)?;
    let folder = workspace.target.join("dist");
    // What an earlier version left would be in the list of digests.
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
    let binary = folder.join("slipgate");
    copy(&built, &binary)?;
    capture(Command::new(&binary).arg("--version").env_clear())
        .context("the static binary does not start")?;
    if !binary_only {
        let staged = workspace.package();
        fs::remove_dir_all(&staged).ok();
        capture(Command::new(&binary).arg("manual").arg(&staged))
            .context("could not make man pages and completions")?;
        copy(&binary, &staged.join("slipgate"))?;
        packages::build(workspace, &target, &folder)?;
    }
    for file in packages::sum(&folder)? {
        say(file);
    }
    Ok(())
}

/// Builds the binary and looks whether it is one that needs no library.
fn build_static(workspace: &Workspace, target: &str) -> Result<PathBuf> {
    // Naming the target keeps the flags away from build scripts and procedural macros, which
    // can't be linked statically. The C library is the host's own: its `libc.a` is there wherever
    // its headers are, whereas a musl target would have to be downloaded.
    run(workspace
        .cargo()
        .args(["build", "--release", "--package=slipgate"])
        .args(["--target", target])
        .args(["--config", "profile.release.strip='symbols'"])
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static"))?;
    let built = workspace.target.join(target).join("release/slipgate");
    let bytes = fs::read(&built).with_context(|| format!("could not read {}", built.display()))?;
    if elf::interpreter(&bytes)
        .context("what was built is no ELF program")?
        .is_some()
    {
        bail!(
            "{} is linked dynamically: is the C library's libc.a missing?",
            built.display()
        );
    }
    Ok(built)
}

/// Writes a new file, for the old one may be running.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::remove_file(to).ok();
    let copied = fs::copy(from, to).map(drop);
    copied.with_context(|| format!("could not write {}", to.display()))
}
