//! `cargo xtask build`: the BPF object and the built-in guest, then the binary that embeds both.

use anyhow::Result;

use crate::{
    bpf, guest, setup,
    workspace::{Workspace, run},
};

/// What of the product to build.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Build {
    /// Only the BPF objects, target/bpf/slipgate.o and slipgate-log.o
    #[arg(long)]
    bpf_only: bool,
    /// Only the built-in guest, target/guest/slipgate-guest
    #[arg(long, conflicts_with = "bpf_only")]
    guest_only: bool,
    /// The binary unoptimised, in target/debug
    #[arg(long)]
    debug: bool,
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
