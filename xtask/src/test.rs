//! `cargo xtask test`: runs every test of the workspace as root, the fast ones first.
//!
//! The calling user compiles everything; only the test binaries run through sudo, so no file in the
//! target directory is owned by root. They are started here and not by `cargo test`, which would compile
//! libraries anew for each selection of crates that it is given.

use std::{
    env,
    io::{BufRead, BufReader, pipe},
    num::NonZero,
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches};

use crate::{
    bpf::Objects,
    compile, flag, fuzz, metadata, privilege, run, setup,
    summary::Summary,
    test_binaries::{self, Binary},
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

/// Crates that are tested after all others, in this order. The tests of most need the kernel or the
/// network testbed.
const LATE: [&str; 4] = [
    GUEST,
    "slipgate-control",
    "slipgate-testbed",
    "slipgate-bench",
];

/// The crate that is compiled by a cargo call of its own. It uses features of smoltcp that the engine
/// does not: in one call cargo would enable them for both, and the tested engine would differ from the
/// shipped one. All others are compiled by one call, or each call would compile most libraries anew,
/// with other features.
const GUEST: &str = "slipgate-guest";

/// The crate of the binary. Its tests are compiled together with an unoptimised build of it.
const BINARY: &str = "slipgate";

/// Crates whose tests run the binary.
const OF_THE_BINARY: [&str; 2] = ["slipgate-testbed", "slipgate-bench"];

/// The crate whose tests boot kernels and call CNI's clients. Each test has networks of its own and
/// waits for others most of the time, so more run at once than there are CPUs; those that must not
/// say so (`slipgate_testbed::turns`).
const END_TO_END: &str = "slipgate-testbed";

/// The root of its end-to-end tests.
const END_TO_END_TESTS: &str = "tests/e2e/main.rs";

/// Variable with the number of the testbed's tests that run at once, twice that of CPUs by default.
const AT_ONCE: &str = "SLIPGATE_TESTS_AT_ONCE";

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
    let wanted: Vec<&str> = rounds.iter().flatten().copied().collect();
    let (slipgate, binaries) = thread::scope(|scope| {
        // What takes a network and no CPU goes on beside the compiler.
        let fetching = scope.spawn(|| {
            if !what.no_setup && wanted.contains(&END_TO_END) {
                fetch(workspace);
            }
        });
        let built = build(workspace, &wanted);
        fetching.join().unwrap_or_else(|panic| resume_unwind(panic));
        built
    })?;

    privilege::ask_for_tests()?;
    let mut summary = Summary::default();
    let mut all_ended_well = true;
    for round in &rounds {
        for package in round {
            for binary in binaries.iter().filter(|binary| binary.package == *package) {
                let tested = Tested {
                    slipgate: slipgate.as_deref(),
                    end_to_end: Binary::path_of(&binaries, END_TO_END, END_TO_END_TESTS),
                };
                all_ended_well &= run_binary(workspace, binary, what, tested, &mut summary)?;
            }
        }
    }
    for together in compiled_together(&wanted) {
        all_ended_well &= run_examples(workspace, &together, what, &mut summary)?;
    }
    // It has no tests by name, and is no member of the workspace.
    if what.package.is_empty() && what.filters.is_empty() {
        fuzz::as_tests(workspace, &mut summary)?;
    }
    println!("\n{summary}");
    verdict(&summary, all_ended_well)
}

/// Fetches what the end-to-end tests boot and call.
fn fetch(workspace: &Workspace) {
    if let Err(why) = setup::kernels(workspace) {
        say(format!("tests on other kernels will be skipped: {why:#}"));
    }
    if let Err(why) = setup::cni_clients(workspace) {
        say(format!("tests by CNI's clients will be skipped: {why:#}"));
    }
    if let Err(why) = setup::stun_client(workspace) {
        say(format!(
            "tests by a foreign STUN client will be skipped: {why:#}"
        ));
    }
}

/// Compiles the binary, if tests of these crates need it, and their tests. Returns the path of the
/// binary and the test binaries.
fn build(workspace: &Workspace, wanted: &[&str]) -> Result<(Option<PathBuf>, Vec<Binary>)> {
    let needs_binary = wanted.iter().any(|name| OF_THE_BINARY.contains(name));
    let slipgate = match needs_binary {
        true => {
            say("building the binary, another build of it, and the tests");
            Some(run::build_quick(workspace, Objects::Both)?)
        }
        false => None,
    };
    // Upgrades go to it.
    if needs_binary && !wanted.contains(&BINARY) {
        run_to_end(
            workspace
                .cargo()
                .arg("build")
                .arg(format!("--package={BINARY}")),
        )?;
    }
    let mut binaries = Vec::new();
    for together in compiled_together(wanted) {
        binaries.extend(test_binaries::build(workspace, &together)?);
    }
    Ok((slipgate, binaries))
}

/// Binaries of this build that tests start.
#[derive(Clone, Copy)]
struct Tested<'a> {
    slipgate: Option<&'a Path>,
    /// The end-to-end tests, some of which run on other kernels too.
    end_to_end: Option<&'a Path>,
}

/// Runs a test binary as root, and records its results. Returns whether it exits with 0.
fn run_binary(
    workspace: &Workspace,
    binary: &Binary,
    what: &Test,
    tested: Tested<'_>,
    summary: &mut Summary,
) -> Result<bool> {
    let mut command = binary.command()?;
    command.args(&what.filters);
    if let Some(threads) = test_threads(&binary.package) {
        command.arg(format!("--test-threads={threads}"));
    }
    if let Some(tests) = tested.end_to_end {
        command.env("SLIPGATE_E2E_TESTS", tests);
    }
    if let Some(slipgate) = tested.slipgate {
        let other = workspace.target.join("debug/slipgate");
        command
            .env("SLIPGATE_BIN", slipgate)
            .env("SLIPGATE_OTHER_BIN", other)
            .env("SLIPGATE_XTASK", env::current_exe()?);
    }
    if may_not_skip() {
        command.env("SLIPGATE_NO_SKIP", "1");
    }
    let title = binary.title();
    println!("{title}");
    summary.read_line(&title);
    follow(command, summary)
}

/// Runs the examples in the documentation of these crates, if one of them is a library.
fn run_examples(
    workspace: &Workspace,
    packages: &[&str],
    what: &Test,
    summary: &mut Summary,
) -> Result<bool> {
    let members = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let is_library = |package: &metadata::Package| {
        packages.contains(&package.name.as_str()) && package.folder.join("src/lib.rs").is_file()
    };
    if !members.iter().any(is_library) {
        return Ok(true);
    }
    let mut cargo = workspace.cargo();
    cargo
        .args(["test", "--doc", "--no-fail-fast"])
        .args(test_binaries::selection(packages))
        .arg("--")
        .args(&what.filters)
        // The lines are parsed.
        .env("CARGO_TERM_COLOR", "never");
    follow(cargo, summary)
}

/// Whether this is a CI machine that can run every test, so that none may be skipped. This process
/// is root by then.
fn may_not_skip() -> bool {
    Path::new("/dev/net/tun").exists() && env::var("CI").is_ok_and(|ci| ci == "true")
}

/// The crates to test, in the order in which they are tested: the quick ones, then each that is late.
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

/// The crates divided into the cargo calls that compile their tests.
fn compiled_together<'a>(wanted: &[&'a str]) -> Vec<Vec<&'a str>> {
    let (guest, others) = wanted.iter().partition(|name| **name == GUEST);
    let mut calls: Vec<Vec<&str>> = vec![others, guest];
    calls.retain(|call| !call.is_empty());
    calls
}

/// Number of tests of this crate that run at once; `None`: libtest's choice, one for each CPU.
fn test_threads(package: &str) -> Option<usize> {
    if package == END_TO_END {
        let wanted = env::var(AT_ONCE).ok().and_then(|text| text.parse().ok());
        let wanted = wanted.filter(|number| *number > 0);
        let cpus = || thread::available_parallelism().map_or(1, NonZero::get);
        return Some(wanted.unwrap_or_else(|| 2 * cpus()));
    }
    OF_THE_BINARY.contains(&package).then_some(1)
}

/// Runs a command, prints its output line by line, and records the results. Returns whether it exits
/// with 0.
fn follow(mut command: Command, summary: &mut Summary) -> Result<bool> {
    // One pipe for both: a skipped test says so on stderr, and the suite reports on stdout.
    let (reader, writer) = pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("could not start the tests")?;
    // Our copies of the writing end, without which the loop would not end.
    drop(command);
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
