//! Builds, runs, tests and measures slipgate. Depends on no crate of the workspace, so that it
//! compiles in seconds and works however broken they are.

mod bpf;
mod compile;
mod privilege;
mod setup;
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
    /// Find or install all that building, testing and measuring need
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
        Task::Setup => setup::everything(&workspace),
    }
}
