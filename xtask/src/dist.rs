//! `cargo xtask dist`: builds one static binary, which needs neither Rust, LLVM, the sources nor a
//! libc.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    bpf, elf, guest,
    rustc_version::rustc_version,
    setup,
    workspace::{Workspace, capture, run, say},
};

/// Builds `dist/slipgate` in the target directory and checks that it starts.
pub(crate) fn dist(workspace: &Workspace) -> Result<()> {
    bpf::build(workspace, &setup::bpf(workspace)?)?;
    guest::build(workspace)?;
    let host = rustc_version(workspace)?.host;
    // Naming the target keeps the flags away from build scripts and procedural macros, which
    // can't be linked statically. The C library is the host's own: its `libc.a` is there wherever
    // its headers are, whereas a musl target would have to be downloaded.
    run(workspace
        .cargo()
        .args([
            "build",
            "--release",
            "--package=slipgate",
            "--target",
            &host,
        ])
        .args(["--config", "profile.release.strip='symbols'"])
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static"))?;
    let built = workspace.target.join(&host).join("release/slipgate");
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
    let folder = workspace.target.join("dist");
    let binary = folder.join("slipgate");
    fs::create_dir_all(&folder)?;
    // A new file, for the old one may be running.
    fs::remove_file(&binary).ok();
    fs::copy(&built, &binary).with_context(|| format!("could not write {}", binary.display()))?;
    capture(Command::new(&binary).arg("--version").env_clear())
        .context("the static binary does not start")?;
    say(format!(
        "{} ({} KiB, static)",
        binary.display(),
        bytes.len() / 1024
    ));
    Ok(())
}
