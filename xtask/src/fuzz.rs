//! `cargo xtask fuzz`: runs libFuzzer on all code that parses input of a guest or of the network.
//!
//! Calls cargo itself, with the flags that cargo-fuzz passes, so that the workspace's stable
//! compiler suffices: `RUSTC_BOOTSTRAP` allows `-Zsanitizer`. libFuzzer is C++ source in the crate
//! `libfuzzer-sys`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
    vec,
};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgMatches, value_parser};

use crate::{
    rustc_version::rustc_version,
    summary::Summary,
    workspace::{Workspace, capture, on_path, run, say},
};

/// Selection of targets, and the time for each.
#[derive(Debug)]
pub(crate) struct Fuzz {
    seconds: u32,
    target: Option<String>,
}

impl Fuzz {
    pub(crate) fn command() -> clap::Command {
        clap::Command::new("fuzz")
            .about("Feed mutated input to everything that reads what a guest or the world wrote")
            .args([
                Arg::new("seconds")
                    .long("seconds")
                    .value_name("N")
                    .default_value("60")
                    .value_parser(value_parser!(u32))
                    .help("How long each target runs, seconds"),
                Arg::new("target")
                    .value_name("TARGET")
                    .help("Only this target"),
            ])
    }

    pub(crate) fn of(matches: &ArgMatches) -> Self {
        Self {
            seconds: matches.get_one("seconds").copied().unwrap_or_default(),
            target: matches.get_one("target").cloned(),
        }
    }
}

/// Running time of each target among the tests, seconds.
const SECONDS_IN_TESTS: u32 = 5;
/// Maximum length of an input, bytes. Some targets take lists of packets, or a machine's state.
/// libFuzzer cuts what is longer, seeds too: `fuzz/src/seeds.rs` has the same.
const MAX_INPUT_LEN: u32 = 8_192;
/// Time limit for one input, seconds. Exceeding it counts as a bug.
const INPUT_TIMEOUT_S: u32 = 20;
/// Memory limit of a target, MiB, including the sanitizer's memory. Exceeding it counts as a bug.
const MEMORY_LIMIT_MIB: u32 = 2_048;

/// Compiler flags for libFuzzer's coverage and the address sanitizer.
const RUSTFLAGS: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg fuzzing",
    "-Zsanitizer=address",
    "-Ccodegen-units=1",
];

/// Builds and runs the targets, one after the other.
///
/// # Errors
/// A target cannot be built, or found a bug.
pub(crate) fn fuzz(workspace: &Workspace, what: &Fuzz) -> Result<()> {
    let all = targets(workspace)?;
    let wanted = match &what.target {
        None => all,
        Some(name) if all.contains(name) => vec![name.clone()],
        Some(name) => bail!("no fuzz target {name:?}, but {}", all.join(", ")),
    };
    let programs = build(workspace)?;
    let mut failed = Vec::new();
    for target in wanted {
        if let Err(why) = run_target(workspace, &programs, &target, what.seconds, run) {
            say(format!("{why:#}"));
            failed.push(target);
        }
    }
    if !failed.is_empty() {
        bail!("fuzzing found something: {}", failed.join(", "));
    }
    Ok(())
}

/// Runs every target for a short time, each as a suite of one test. If the targets cannot be built,
/// adds one failed suite.
pub(crate) fn as_tests(workspace: &Workspace, summary: &mut Summary) -> Result<()> {
    let programs = match build(workspace) {
        Ok(programs) => programs,
        Err(why) => {
            say(format!("{why:#}"));
            summary.add("fuzz", false, 0.0);
            return Ok(());
        }
    };
    let waiting = Mutex::new(targets(workspace)?.into_iter());
    let summary = Mutex::new(summary);
    // A target has one thread: as many at once as there are processors.
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(target) = next(&waiting) {
                    let begin = Instant::now();
                    let result =
                        run_target(workspace, &programs, &target, SECONDS_IN_TESTS, run_quietly);
                    if let Err(why) = &result {
                        say(format!("{why:#}"));
                    }
                    let seconds = begin.elapsed().as_secs_f64();
                    let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
                    summary.add(&format!("fuzz {target}"), result.is_ok(), seconds);
                }
            });
        }
    });
    Ok(())
}

/// Runs a target without output, for targets that run in parallel. The error has the whole output.
fn run_quietly(program: &mut Command) -> Result<()> {
    capture(program).map(drop)
}

/// Takes the next target; `None` if none is left.
fn next(waiting: &Mutex<vec::IntoIter<String>>) -> Option<String> {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.next()
}

/// Returns the names of the targets, from the file names of their sources.
fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let folder = folder(workspace).join("targets");
    let entries = fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if let (Some(name), Some("rs")) = (
            path.file_stem().and_then(|stem| stem.to_str()),
            path.extension().and_then(|extension| extension.to_str()),
        ) {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Builds all targets. Returns the directory of the programs.
fn build(workspace: &Workspace) -> Result<PathBuf> {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    if on_path(&compiler).is_none() && !Path::new(&compiler).is_file() {
        bail!(
            "libFuzzer is C++, and there is no compiler {compiler}: install one (Debian: g++), or \
             name it by CXX"
        );
    }
    let host = rustc_version(workspace)?.host;
    let output = workspace.target.join("fuzz");
    say("building the fuzz targets");
    run(workspace
        .cargo()
        .args(["build", "--release", "--bins", "--target", &host])
        .arg("--manifest-path")
        .arg(folder(workspace).join("Cargo.toml"))
        .env("CARGO_TARGET_DIR", &output)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", RUSTFLAGS.join(" "))
        .env_remove("CARGO_ENCODED_RUSTFLAGS"))
    .context(
        "the fuzz targets need libFuzzer and AddressSanitizer, which Rust has for Linux on x86_64 \
         and aarch64",
    )?;
    Ok(output.join(host).join("release"))
}

/// Runs one target by `how`. New corpus entries are stored in the target directory for the next
/// run; the seeds in the checkout are left unchanged.
fn run_target(
    workspace: &Workspace,
    programs: &Path,
    target: &str,
    seconds: u32,
    how: impl FnOnce(&mut Command) -> Result<()>,
) -> Result<()> {
    let learnt = workspace.target.join("fuzz/corpus").join(target);
    let found = workspace.target.join("fuzz/found").join(target);
    for folder in [&learnt, &found] {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let mut program = Command::new(programs.join(target));
    program
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={MAX_INPUT_LEN}"))
        .arg(format!("-timeout={INPUT_TIMEOUT_S}"))
        .arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"))
        .arg(format!("-artifact_prefix={}/", found.display()))
        .args(["-print_final_stats=1", "-use_value_profile=1"])
        // By default freed memory rests until there is 256 MiB of it, so each input is served by
        // fresh pages: ten times slower, to find late uses in code that is nearly all safe.
        .env("ASAN_OPTIONS", "quarantine_size_mb=4");
    let dictionary = folder(workspace).join(format!("dictionaries/{target}.dict"));
    if dictionary.is_file() {
        program.arg(format!("-dict={}", dictionary.display()));
    }
    // Written to, then read only.
    program
        .arg(&learnt)
        .arg(folder(workspace).join("corpus").join(target));
    say(format!("fuzzing {target} for {seconds} s"));
    how(&mut program).with_context(|| {
        format!(
            "{target}: the input is in {}; repeat with `{} FILE`",
            found.display(),
            programs.join(target).display()
        )
    })
}

fn folder(workspace: &Workspace) -> PathBuf {
    workspace.root.join("fuzz")
}
