//! `cargo xtask check`: static checks of the source.

pub(crate) mod abi;
mod cycles;
mod documents;
mod layers;
mod length;

use anyhow::{Context, Result, bail};

use crate::{
    bpf,
    dist::AARCH64,
    guest, metadata, setup,
    workspace::{Workspace, capture, run, say},
};

/// Checks formatting, lints, layers, module cycles, documents, the ABI version, that each crate compiles
/// by itself, and that the binary compiles for aarch64. All checks run, even if one fails. File lengths
/// are reported, but never fail.
pub(crate) fn check(workspace: &Workspace, only_cycles: bool) -> Result<()> {
    if only_cycles {
        return cycles::check(workspace);
    }
    components(workspace)?;
    length::report(workspace)?;
    let checks: [(&str, Check); 11] = [
        ("formatting", formatting),
        ("layers", layers::check),
        ("cycles of modules", cycles::check),
        ("what documents name", documents::check),
        ("the version of the ABI", abi::check),
        ("lints of the BPF programs", lint_programs),
        ("lints of the built-in guest", guest::lint),
        ("lints of the workspace", lint_workspace),
        ("each crate by itself", compile_each_alone),
        ("the binary for aarch64", compile_for_other_machine),
        ("lints of the fuzz targets", lint_fuzz_targets),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        say(name);
        if let Err(why) = check(workspace) {
            say(format!("{why:#}"));
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("not in order: {}", failed.join(", "));
    }
    Ok(())
}

type Check = fn(&Workspace) -> Result<()>;

/// Lists the files that `cargo fmt` would change.
fn formatting(workspace: &Workspace) -> Result<()> {
    for (what, manifest) in [
        ("--all", "Cargo.toml"),
        ("--package=slipgate-programs", "ebpf/programs/Cargo.toml"),
        ("--package=slipgate-fuzz", "fuzz/Cargo.toml"),
    ] {
        run(workspace.cargo().args([
            "fmt",
            what,
            "--check",
            "--manifest-path",
            manifest,
            "--",
            "-l",
        ]))
        .with_context(|| format!("run `cargo fmt {what} --manifest-path {manifest}`"))?;
    }
    Ok(())
}

/// Runs clippy on the workspace. Builds the guest's image first, because `cli` embeds it.
fn lint_workspace(workspace: &Workspace) -> Result<()> {
    guest::build(workspace)?;
    run(workspace.cargo().args([
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--",
        "-Dwarnings",
    ]))
}

/// Compiles each crate with no other features of its dependencies than those that it asks for. In the
/// whole workspace it has those of all crates, so what it forgot to ask for shows only where it is built
/// alone, as the tests of some are.
fn compile_each_alone(workspace: &Workspace) -> Result<()> {
    let members = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    for package in members.iter().filter(|it| it.name != guest::NAME) {
        run(workspace
            .cargo()
            .args(["check", "--quiet"])
            .arg(format!("--package={}", package.name)))
        .with_context(|| format!("{} does not compile by itself", package.name))?;
    }
    Ok(())
}

/// Compiles the binary for the other machine that releases are for, which has no VMM, as far as needs
/// no linker. Without clippy: types of C differ between machines, and with them what it advises.
fn compile_for_other_machine(workspace: &Workspace) -> Result<()> {
    setup::cross_library(workspace, AARCH64)?;
    run(workspace
        .cargo()
        .args(["check", "--quiet", "--package=slipgate"])
        .args(["--target", AARCH64]))
}

/// Runs clippy on the fuzz targets without libFuzzer, whose C++ code takes minutes to compile. Uses
/// the workspace's target directory, where most dependencies have been checked already.
fn lint_fuzz_targets(workspace: &Workspace) -> Result<()> {
    run(workspace
        .cargo()
        .args(["clippy", "--quiet", "--no-default-features"])
        .args(["--manifest-path", "fuzz/Cargo.toml", "--", "-Dwarnings"])
        .env("CARGO_TARGET_DIR", &workspace.target))
}

/// Installs rustfmt and clippy if the toolchain lacks them.
fn components(workspace: &Workspace) -> Result<()> {
    let missing: Vec<&str> = [("fmt", "rustfmt"), ("clippy", "clippy")]
        .into_iter()
        .filter(|(verb, _)| capture(workspace.cargo().args([verb, "--version"])).is_err())
        .map(|(_, component)| component)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    say(format!("adding to the toolchain: {}", missing.join(" ")));
    run(std::process::Command::new("rustup")
        .args(["component", "add"])
        .args(&missing))
    .with_context(|| format!("the Rust toolchain lacks {}", missing.join(" and ")))
}

/// Lints the BPF programs with clippy if their compiler has one (Debian's does not), else with
/// rustc. Also builds them, because the other crates embed them.
fn lint_programs(workspace: &Workspace) -> Result<()> {
    let toolchain = &setup::bpf(workspace)?;
    bpf::build(workspace, toolchain, bpf::Objects::Both)?;
    let has_clippy = toolchain
        .compiler
        .cargo
        .with_file_name("cargo-clippy")
        .is_file();
    for features in [&[][..], &["--features=log"]] {
        if has_clippy {
            run(bpf::cargo(workspace, toolchain, "clippy")?
                .args(features)
                .args(["--", "-Dwarnings"]))?;
        } else {
            // `cargo check` repeats the warnings of what it has checked before.
            let output = bpf::cargo(workspace, toolchain, "check")?
                .args(features)
                .output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            if !output.status.success() || said.contains("warning") {
                bail!("the BPF programs do not compile without a warning:\n{said}");
            }
        }
    }
    Ok(())
}
