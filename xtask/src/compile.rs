//! `cargo xtask build`: the BPF object and the built-in guest, then the binary that embeds both.

use anyhow::Result;
use clap::{ArgMatches, Command};

use crate::{
    bpf, flag, guest, setup,
    workspace::{Workspace, run},
};

/// What of the product to build.
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

/// Sets up what is missing and builds.
pub(crate) fn build(workspace: &Workspace, what: &Build) -> Result<()> {
    if !what.guest_only {
        bpf::build(workspace, &setup::bpf(workspace)?)?;
    }
    if !what.bpf_only {
        guest::build(workspace)?;
    }
    if what.bpf_only || what.guest_only {
        return Ok(());
    }
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--package=slipgate"]);
    if !what.debug {
        cargo.arg("--release");
    }
    run(&mut cargo)
}
