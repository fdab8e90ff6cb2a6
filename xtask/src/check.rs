//! `cargo xtask check`: everything about the source that needs no running of it.

mod layers;
mod length;

use anyhow::{Context, Result, bail};

use crate::{
    bpf,
    setup::{self, BpfToolchain},
    workspace::{Workspace, capture, run, say},
};

/// Formatting, lints, layers; the lengths of files are told, not judged.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    components(workspace)?;
    say("formatting");
    run(workspace.cargo().args(["fmt", "--all", "--check"]))?;
    run(workspace.cargo().args([
        "fmt",
        "--check",
        "--manifest-path",
        "ebpf/programs/Cargo.toml",
    ]))?;
    say("layers");
    layers::check(workspace)?;
    length::report(workspace)?;
    let toolchain = setup::bpf(workspace)?;
    bpf::build(workspace, &toolchain)?;
    lint_programs(workspace, &toolchain)?;
    say("clippy");
    run(workspace.cargo().args([
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--",
        "-Dwarnings",
    ]))
}

/// Makes sure that the toolchain has rustfmt and clippy.
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

/// Lints the BPF programs by clippy if their compiler has one (Debian's has not), else by rustc.
fn lint_programs(workspace: &Workspace, toolchain: &BpfToolchain) -> Result<()> {
    let has_clippy = toolchain
        .compiler
        .cargo
        .with_file_name("cargo-clippy")
        .is_file();
    for features in [&[][..], &["--features=log"]] {
        if has_clippy {
            say("clippy on the BPF programs");
            run(bpf::cargo(workspace, toolchain, "clippy")?
                .args(features)
                .args(["--", "-Dwarnings"]))?;
        } else {
            say("rustc's lints on the BPF programs (their compiler has no clippy)");
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
