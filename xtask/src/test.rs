//! `cargo xtask test`: runs every test of the workspace as root, the fast ones first.
//!
//! The calling user compiles everything; only the test binaries run through sudo, so no file in the
//! target directory is owned by root.

use std::{
    env,
    io::{BufRead, BufReader, pipe},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches};

use crate::{
    bpf::Objects,
    compile, flag, fuzz, metadata, privilege, run, setup,
    summary::Summary,
    words,
    workspace::{Workspace, run as run_to_end, say},
};

/// Selection of tests, and whether missing tools are installed first.
#[derive(Debug)]
pub(crate) struct Test {
    no_setup: bool,
    package: Vec<String>,
    filters: Vec<String>,
}

impl Test {
    pub(crate) fn command() -> clap::Command {
        clap::Command::new("test")
            .about("Run all tests, as root (through sudo), the quick ones first")
            .args([
                flag("no-setup").help("Take tools, BPF objects and the built-in guest as they are"),
                Arg::new("package")
                    .long("package")
                    .short('p')
                    .value_name("CRATE")
                    .action(ArgAction::Append)
                    .help("Only the tests of this crate (may be repeated)"),
                Arg::new("filters")
                    .value_name("NAME")
                    .action(ArgAction::Append)
                    .num_args(0..)
                    .help("Only tests whose name contains one of these"),
            ])
    }

    pub(crate) fn of(matches: &ArgMatches) -> Self {
        Self {
            no_setup: matches.get_flag("no-setup"),
            package: words(matches, "package"),
            filters: words(matches, "filters"),
        }
    }
}

/// Crates that are tested by separate cargo calls, after all others, in this order. The tests of
/// most need the kernel or the network testbed. The guest is here because it uses features of
/// smoltcp that the engine does not: in one call cargo would enable them for both, and the tested
/// engine would differ from the shipped one.
const LATE: [&str; 4] = [
    "slipgate-guest",
    "slipgate-control",
    "slipgate-testbed",
    "slipgate-bench",
];

/// Crates whose tests run the binary, and each build a network and load every core: one test at a
/// time.
const ALONE: [&str; 2] = ["slipgate-testbed", "slipgate-bench"];

/// The crate whose tests boot kernels and call CNI's clients.
const END_TO_END: &str = "slipgate-testbed";

/// Installs tools, builds, runs the tests, and prints their summary.
///
/// # Errors
/// A test failed, or could not be built.
pub(crate) fn test(workspace: &Workspace, what: &Test) -> Result<()> {
    if !what.no_setup {
        compile::artefacts(workspace, Objects::Both, setup::test_tools)?;
    }
    let members = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let members: Vec<&str> = members
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    let rounds = rounds(&members, &what.package)?;
    if !what.no_setup && rounds.iter().flatten().any(|name| *name == END_TO_END) {
        if let Err(why) = setup::kernels(workspace) {
            say(format!("tests on other kernels will be skipped: {why:#}"));
        }
        if let Err(why) = setup::cni_clients(workspace) {
            say(format!("tests by CNI's clients will be skipped: {why:#}"));
        }
    }

    let needs_binary = rounds.iter().flatten().any(|name| ALONE.contains(name));
    let slipgate = match needs_binary {
        true => {
            say("building the binary, another build of it, and the tests");
            let slipgate = run::build_quick(workspace, Objects::Both)?;
            // Upgrades go to it.
            run_to_end(workspace.cargo().args(["build", "--package=slipgate"]))?;
            Some(slipgate)
        }
        false => None,
    };
    for round in &rounds {
        run_to_end(
            workspace
                .cargo()
                .args(["test", "--no-run"])
                .args(packages(round)),
        )?;
    }

    let mut summary = Summary::default();
    let mut all_ended_well = true;
    for round in &rounds {
        let mut cargo = workspace.cargo();
        cargo
            .args(["test", "--no-fail-fast"])
            .args(packages(round))
            .arg("--")
            .args(&what.filters);
        if round.iter().any(|name| ALONE.contains(name)) {
            cargo.arg("--test-threads=1");
        }
        privilege::run_binaries_as_root(workspace, &mut cargo)?;
        if let Some(slipgate) = &slipgate {
            let other = workspace.target.join("debug/slipgate");
            cargo
                .env("SLIPGATE_BIN", slipgate)
                .env("SLIPGATE_OTHER_BIN", other);
        }
        // The lines are parsed.
        cargo.env("CARGO_TERM_COLOR", "never");
        if may_not_skip() {
            cargo.env("SLIPGATE_NO_SKIP", "1");
        }
        all_ended_well &= follow(cargo, &mut summary)?;
    }
    // It has no tests by name, and is no member of the workspace.
    if what.package.is_empty() && what.filters.is_empty() {
        fuzz::as_tests(workspace, &mut summary)?;
    }
    println!("\n{summary}");
    verdict(&summary, all_ended_well)
}

/// Whether this is a CI machine that can run every test, so that none may be skipped. This process
/// is root by then.
fn may_not_skip() -> bool {
    Path::new("/dev/net/tun").exists() && env::var("CI").is_ok_and(|ci| ci == "true")
}

/// The crates to test, divided into the cargo calls that will test them.
fn rounds<'a>(members: &[&'a str], wanted: &[String]) -> Result<Vec<Vec<&'a str>>> {
    if let Some(stranger) = wanted.iter().find(|name| !members.contains(&name.as_str())) {
        bail!(
            "--package {stranger}: no such crate here, but {}",
            members.join(", ")
        );
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let quick = members
        .iter()
        .copied()
        .filter(|name| !LATE.contains(name) && is_wanted(name));
    let late = LATE.iter().filter_map(|late| {
        members
            .iter()
            .copied()
            .find(|name| name == late && is_wanted(name))
    });
    Ok([quick.collect::<Vec<_>>()]
        .into_iter()
        .chain(late.map(|name| vec![name]))
        .filter(|round| !round.is_empty())
        .collect())
}

fn packages(round: &[&str]) -> impl Iterator<Item = String> {
    round.iter().map(|name| format!("--package={name}"))
}

/// Runs cargo, prints its output line by line, and records the results. Returns whether it exits
/// with 0.
fn follow(mut cargo: Command, summary: &mut Summary) -> Result<bool> {
    // One pipe for both, because cargo names a suite on stderr and the suite reports on stdout.
    let (reader, writer) = pipe()?;
    cargo.stdout(writer.try_clone()?).stderr(writer);
    let mut child = cargo.spawn().context("could not start cargo test")?;
    // Our copies of the writing end, without which the loop would not end.
    drop(cargo);
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        summary.read_line(&line);
    }
    Ok(child.wait()?.success())
}

fn verdict(summary: &Summary, all_ended_well: bool) -> Result<()> {
    let total = summary.total();
    if total.failed > 0 || !all_ended_well {
        bail!("tests failed");
    }
    if total.passed + total.skipped == 0 {
        bail!("no test ran");
    }
    if total.skipped > 0 && may_not_skip() {
        bail!("tests were skipped, on a CI machine that has root and TUN");
    }
    Ok(())
}

#[cfg(test)]
#[path = "test_test.rs"]
mod tests;
