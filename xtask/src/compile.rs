//! `cargo xtask build`: the BPF object and the built-in guest, then the binary that embeds both.

use std::{panic::resume_unwind, thread};

use anyhow::Result;
use clap::{ArgMatches, Command};

use crate::{
    bpf::{self, Objects},
    flag, guest, setup,
    workspace::{Workspace, run},
};

/// Parts of the product to build.
#[derive(Debug, Default)]
pub(crate) struct Build {
    bpf_only: bool,
    guest_only: bool,
    debug: bool,
}

impl Build {
    pub(crate) fn command() -> Command {
        Command::new("build")
            .about("Build target/release/slipgate, the BPF object embedded")
            .args([
                flag("bpf-only")
                    .help("Only the BPF objects, target/bpf/slipgate.o and slipgate-log.o")
                    .conflicts_with("guest-only"),
                flag("guest-only").help("Only the built-in guest, target/guest/slipgate-guest"),
                flag("debug").help("The binary unoptimised, in target/debug"),
            ])
    }

    pub(crate) fn of(matches: &ArgMatches) -> Self {
        Self {
            bpf_only: matches.get_flag("bpf-only"),
            guest_only: matches.get_flag("guest-only"),
            debug: matches.get_flag("debug"),
        }
    }
}

/// Installs missing tools and builds.
pub(crate) fn build(workspace: &Workspace, what: &Build) -> Result<()> {
    if what.bpf_only {
        return bpf::build(workspace, &setup::bpf(workspace)?, Objects::Both);
    }
    if what.guest_only {
        return guest::build(workspace);
    }
    artefacts(workspace, Objects::Both, || Ok(()))?;
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--package=slipgate"]);
    if !what.debug {
        cargo.arg("--release");
    }
    run(&mut cargo)
}

/// Builds the files that the binary embeds: the BPF objects, and in parallel the guest's image.
/// `meanwhile` runs after the guest's build, because on a fresh machine the download of the BPF
/// tools takes long and uses no CPU.
pub(crate) fn artefacts(
    workspace: &Workspace,
    objects: Objects,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<()> {
    thread::scope(|scope| {
        let programs = scope.spawn(|| bpf::build(workspace, &setup::bpf(workspace)?, objects));
        let others = guest::build(workspace).and_then(|()| meanwhile());
        match programs.join() {
            Ok(programs) => programs.and(others),
            Err(panic) => resume_unwind(panic),
        }
    })
}

#[cfg(test)]
#[path = "compile_test.rs"]
mod tests;
