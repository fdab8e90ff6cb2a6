//! Builds, runs, tests and measures slipgate. It depends on no crate of the workspace, so it
//! compiles in seconds, and also when those crates do not.

mod bench;
mod bpf;
mod check;
mod compile;
mod dist;
mod elf;
mod fuzz;
mod guest;
mod metadata;
mod own_namespaces;
mod privilege;
mod run;
mod rustc_version;
mod setup;
mod summary;
mod test;
mod test_binaries;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::workspace::Workspace;

fn main() -> ExitCode {
    match perform(&command().get_matches()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // Not `Debug`: a stack of xtask's own calls says nothing about what went wrong.
            eprintln!("xtask: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn command() -> Command {
    Command::new("cargo xtask")
        .bin_name("cargo xtask")
        .about("Builds, runs, tests and measures slipgate")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands([
            compile::Build::command(),
            run::Run::command(),
            test::Test::command(),
            fuzz::Fuzz::command(),
            Command::new("check")
                .about("Check formatting, lints, the direction of dependencies and the version of the ABI")
                .arg(flag("cycles").help("Only whether modules depend on each other in a circle")),
            Command::new("abi")
                .about("Say whether ebpf/abi/layout.txt is what ABI_VERSION stands for, or write it")
                .args([
                    flag("write").help("Write it, when the version was raised"),
                    flag("unreleased")
                        .requires("write")
                        .help("Write it for the same version: no release has it yet"),
                ]),
            Command::new("bench")
                .about("Measure slipgate and its peers")
                .arg(
                    Arg::new("args")
                        .value_name("ARGS")
                        .help("What to give to the benchmark program")
                        .num_args(0..)
                        .trailing_var_arg(true)
                        .allow_hyphen_values(true),
                ),
            Command::new("dist")
                .about("Build a release into target/dist: static binaries, packages, bills of materials, digests")
                .args([
                    flag("binary-only").help("Only this machine's binary: needs no packaging tools"),
                    flag("try")
                        .conflicts_with("binary-only")
                        .help("Then install the packages in a Debian under QEMU, and use and remove them there"),
                ]),
            Command::new("setup").about("Find or install all that the others need"),
        ])
}

/// Returns an option without a value.
fn flag(name: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue)
}

/// Returns all values of an option or of a list of arguments.
fn words(matches: &ArgMatches, name: &str) -> Vec<String> {
    matches
        .get_many(name)
        .into_iter()
        .flatten()
        .cloned()
        .collect()
}

fn perform(matches: &ArgMatches) -> Result<()> {
    let workspace = Workspace::find()?;
    let Some((task, matches)) = matches.subcommand() else {
        unreachable!("clap requires one");
    };
    match task {
        "build" => compile::build(&workspace, &compile::Build::of(matches)),
        "run" => match run::run(&workspace, &run::Run::of(matches))? {},
        "test" => test::test(&workspace, &test::Test::of(matches)),
        "fuzz" => fuzz::fuzz(&workspace, &fuzz::Fuzz::of(matches)),
        "check" => check::check(&workspace, matches.get_flag("cycles")),
        "abi" if matches.get_flag("write") => {
            check::abi::write(&workspace, matches.get_flag("unreleased"))
        }
        "abi" => check::abi::check(&workspace),
        "bench" => match bench::bench(&workspace, &words(matches, "args"))? {},
        "dist" => dist::dist(
            &workspace,
            dist::Dist {
                binary_only: matches.get_flag("binary-only"),
                try_it: matches.get_flag("try"),
            },
        ),
        "setup" => setup::everything(&workspace),
        task => unreachable!("clap knows no {task}"),
    }
}

#[cfg(test)]
#[path = "main_test.rs"]
mod tests;
