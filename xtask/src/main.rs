//! Builds, runs, tests and measures slipgate. Depends on no crate of the workspace, so that it
//! compiles in seconds and works however broken they are.

mod bench;
mod bpf;
mod check;
mod compile;
mod dist;
mod fuzz;
mod guest;
mod metadata;
mod privilege;
mod run;
mod setup;
mod test;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build target/release/slipgate, the BPF object embedded
    Build(compile::Build),
    /// Show slipgate at work in a private network; with `-- ARGS`, run `slipgate ARGS` on this machine
    Run {
        /// What the guest is: microvm, or linux (network namespaces) [default: microvm where there
        /// is KVM]
        #[arg(long, value_name = "KIND", value_parser = ["microvm", "linux"], conflicts_with = "args")]
        guest: Option<String>,
        /// What to give to slipgate
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Run all tests, as root (through sudo), the quick ones first
    Test(test::Test),
    /// Feed mutated input to everything that reads what a guest or the world wrote
    Fuzz(fuzz::Fuzz),
    /// Check formatting, lints, the direction of dependencies and the version of the ABI
    Check,
    /// Say whether ebpf/abi/layout.txt is what ABI_VERSION stands for, or write it
    Abi {
        /// Write it, when the version was raised
        #[arg(long)]
        write: bool,
        /// Write it for the same version: no release has it yet
        #[arg(long, requires = "write")]
        unreleased: bool,
    },
    /// Measure slipgate and its peers
    Bench {
        /// What to give to the benchmark program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Build target/dist/slipgate, one static binary that needs nothing else
    Dist,
    /// Find or install all that the others need
    Setup,
}

fn main() -> ExitCode {
    match perform(&Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // Not `Debug`: a stack of xtask's own calls says nothing about what went wrong.
            eprintln!("xtask: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: &Task) -> Result<()> {
    let workspace = Workspace::find()?;
    match task {
        Task::Build(what) => compile::build(&workspace, what),
        Task::Run { guest, args } => match run::run(&workspace, guest.as_deref(), args)? {},
        Task::Test(what) => test::test(&workspace, what),
        Task::Fuzz(what) => fuzz::fuzz(&workspace, what),
        Task::Check => check::check(&workspace),
        Task::Abi { write: false, .. } => check::abi::check(&workspace),
        Task::Abi { unreleased, .. } => check::abi::write(&workspace, *unreleased),
        Task::Bench { args } => match bench::bench(&workspace, args)? {},
        Task::Dist => dist::dist(&workspace),
        Task::Setup => setup::everything(&workspace),
    }
}
