//! `cargo xtask dist`: what a release is made of, in the target folder's `dist`: for each machine one
//! static binary that needs no Rust, no LLVM, no source and no libc, and packages for Debian and for
//! RPM; bills of materials; and the digests of all of them.
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
    bpf, elf, guest, privilege,
    rustc_version::rustc_version,
    setup,
    workspace::{Workspace, capture, on_path, run, say},
};

/// The other machine that releases are for. The BPF objects are the same; the VMM is not in it.
/// With the C library of the first one, so that the system calls are those that were tested.
pub(crate) const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Which parts of a release.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dist {
    /// This machine's binary alone, which needs no further tool.
    pub(crate) binary_only: bool,
    /// All of it; then the packages are installed in a machine and tried.
    pub(crate) try_it: bool,
}

/// Builds the distribution: static binaries, or packages.
pub(crate) fn dist(workspace: &Workspace, what: Dist) -> Result<()> {
    bpf::build(workspace, &setup::bpf(workspace)?, bpf::Objects::Both)?;
    guest::build(workspace)?;
    let host = rustc_version(workspace)?.host;
    let folder = workspace.target.join("dist");
    // What an earlier version left would be in the list of digests.
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
    let binary = build_static(workspace, &host, None, &folder)?;
    capture(Command::new(&binary).arg("--version").env_clear())
        .context("the static binary does not start")?;
    if !what.binary_only {
        let staged = workspace.package();
        fs::remove_dir_all(&staged).ok();
        capture(Command::new(&binary).arg("manual").arg(&staged))
            .context("could not make man pages and completions")?;
        packages::build(workspace, &host, &binary, &folder)?;
        if host != AARCH64 {
            let linker = setup::cross_linker(workspace, AARCH64)?;
            let binary = build_static(workspace, AARCH64, Some(&linker), &folder)?;
            packages::build(workspace, AARCH64, &binary, &folder)?;
            if let Some(emulator) = on_path("qemu-aarch64-static") {
                capture(Command::new(emulator).arg(&binary).arg("--version"))
                    .context("the binary for aarch64 does not start under QEMU")?;
            }
        }
        packages::bills(workspace, &folder)?;
    }
    for file in packages::sum(&folder)? {
        say(file);
    }
    match what.try_it {
        true => try_packages(workspace, &folder),
        false => Ok(()),
    }
}

/// Builds the binary, looks whether it is one that needs no library, and puts it into the folder.
fn build_static(
    workspace: &Workspace,
    target: &str,
    linker: Option<&Path>,
    folder: &Path,
) -> Result<PathBuf> {
    // Naming the target keeps the flags away from build scripts and procedural macros, which
    // can't be linked statically. The C library is the host's own: its `libc.a` is there wherever
    // its headers are, whereas a musl target would have to be downloaded.
    let mut cargo = workspace.cargo();
    cargo
        .args(["build", "--release", "--package=slipgate"])
        .args(["--target", target])
        .args(["--config", "profile.release.strip='symbols'"])
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static");
    if let Some(linker) = linker {
        let linker = format!("target.{target}.linker='{}'", linker.display());
        cargo.args(["--config", &linker]);
    }
    run(&mut cargo)?;
    let built = workspace.target.join(target).join("release/slipgate");
    let bytes = fs::read(&built).with_context(|| format!("could not read {}", built.display()))?;
    if elf::interpreter(&bytes)
        .context("the built binary is not an ELF program")?
        .is_some()
    {
        bail!(
            "{} is linked dynamically: is the C library's libc.a missing?",
            built.display()
        );
    }
    let machine = target.split('-').next().unwrap_or(target);
    let binary = folder.join(format!("slipgate-{machine}"));
    copy(&built, &binary)?;
    Ok(binary)
}

/// Writes a new file, for the old one may be running.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::remove_file(to).ok();
    let copied = fs::copy(from, to).map(drop);
    copied.with_context(|| format!("could not write {}", to.display()))
}

/// Runs the test that installs, uses and removes the packages in `folder`.
fn try_packages(workspace: &Workspace, folder: &Path) -> Result<()> {
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
