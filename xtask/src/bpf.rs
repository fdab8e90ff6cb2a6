//! Builds the BPF object, plain and with logging, into `target/bpf`.
//!
//! The programs are a cargo workspace of their own: their target has no `core`, so it is built
//! along (`-Z build-std`), by the compiler and linker that `setup` found. `ebpf/control` embeds
//! what is left here, so an object that has not changed keeps its modification time.

mod target;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    elf,
    setup::BpfToolchain,
    workspace::{Workspace, run, say},
};

/// Which of the two objects to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Objects {
    Both,
    /// The logging object only if an older one is there: it would be embedded, out of date.
    PlainUnlessBuilt,
}

/// File name of an object, and the cargo features of its programs.
type Object = (&'static str, &'static [&'static str]);

const PLAIN: Object = ("slipgate.o", &[]);
const LOGGING: Object = ("slipgate-log.o", &["--features=log"]);

impl Objects {
    fn list(self, out: &Path) -> &'static [Object] {
        match self {
            Self::PlainUnlessBuilt if !out.join(LOGGING.0).exists() => &[PLAIN],
            Self::Both | Self::PlainUnlessBuilt => &[PLAIN, LOGGING],
        }
    }
}

/// Builds the objects. Cargo skips what is up to date.
pub(crate) fn build(
    workspace: &Workspace,
    toolchain: &BpfToolchain,
    objects: Objects,
) -> Result<()> {
    let out = workspace.bpf();
    fs::create_dir_all(&out).with_context(|| format!("could not make {}", out.display()))?;
    // Both builds leave their result under one name, so nobody else may build meanwhile.
    let lock = File::create(out.join(".lock"))?;
    lock.lock().context("could not lock target/bpf/.lock")?;
    for &(name, features) in objects.list(&out) {
        if !out.join(name).exists() {
            say(format!("building the BPF object {name}"));
        }
        let built = cargo_build(workspace, toolchain, features)
            .with_context(|| format!("could not build the BPF object {name}"))?;
        let object = out.join(name);
        if place(toolchain, &built, &object)? {
            let bytes = object.metadata()?.len();
            say(format!("new {} ({bytes} bytes)", object.display()));
        }
    }
    Ok(())
}

/// Runs a cargo command that supports build-std (`build`, `check`, `clippy`) on the programs.
pub(crate) fn cargo(
    workspace: &Workspace,
    toolchain: &BpfToolchain,
    verb: &str,
) -> Result<Command> {
    let target = target::describe(&toolchain.compiler, &workspace.bpf())?;
    let mut cargo = toolchain.compiler.cargo();
    let flags = [
        // BTF is made from full debug information only.
        "-Cdebuginfo=2".to_owned(),
        format!("-Clinker={}", toolchain.linker.path.display()),
        "-Clink-arg=--btf".to_owned(),
    ];
    cargo
        .current_dir(workspace.root.join("ebpf/programs"))
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .args([
            verb,
            "--quiet",
            "--release",
            "-Zbuild-std=core",
            "-Zjson-target-spec",
            "--target",
        ])
        .arg(target)
        .arg("--target-dir")
        .arg(workspace.bpf().join("cargo"));
    Ok(cargo)
}

fn cargo_build(
    workspace: &Workspace,
    toolchain: &BpfToolchain,
    features: &[&str],
) -> Result<PathBuf> {
    run(cargo(workspace, toolchain, "build")?.args(features))?;
    let built = format!("cargo/{}/release/slipgate-programs", target::NAME);
    Ok(workspace.bpf().join(built))
}

/// Strips the debug sections, checks the object for BTF, and replaces `object` if its bytes differ.
/// Returns whether it was replaced.
fn place(toolchain: &BpfToolchain, built: &Path, object: &Path) -> Result<bool> {
    let stripped = object.with_extension("o.new");
    match &toolchain.linker.strip {
        // Not `bpftool gen object`, nor a full strip: aya needs the symbols.
        Some(strip) => run(Command::new(strip)
            .arg("-g")
            .arg(built)
            .arg("-o")
            .arg(&stripped))?,
        None => fs::copy(built, &stripped).map(drop)?,
    }
    elf::require_btf(&stripped)?;
    if fs::read(object).is_ok_and(|old| fs::read(&stripped).is_ok_and(|new| old == new)) {
        fs::remove_file(&stripped)?;
        return Ok(false);
    }
    fs::rename(&stripped, object)?;
    Ok(true)
}

#[cfg(test)]
#[path = "bpf_test.rs"]
mod tests;
