//! Readers of the pinned maps and of the brokers' answers: `flows`, `stats`, `ps`, `why`. They change
//! nothing and do not slow packets.
pub(crate) mod flows;
pub(crate) mod names;
mod plain_output;
mod ps;
pub(crate) mod stats;
pub(crate) mod table;
pub(crate) mod why;

use std::{
    io::{self, StdoutLock, Write},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use slipgate_control::maps::ReadOnlyMaps;

use self::plain_output::PlainOutput;
use crate::{
    args::ShowCommand,
    brokers::{no_such_vm, paths},
};

/// Interval of the readings with `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Runs a command that changes nothing.
pub(crate) fn run(command: &ShowCommand) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        ShowCommand::Flows(args) => flows::run(args).map(done),
        ShowCommand::Stats(args) => stats::run(args).map(done),
        ShowCommand::Ps(args) => ps::run(args).map(done),
        ShowCommand::Why(args) => why::run(args),
    }
}

/// Opens the pinned maps for reading.
pub(crate) fn open(pin_dir: &Path) -> anyhow::Result<ReadOnlyMaps> {
    let paths = paths(pin_dir)?;
    match paths.pin_dir.try_exists() {
        Ok(true) => {}
        Ok(false) => bail!(
            "nothing is attached in this network namespace (there is no {}): start `slipgate \
             attach`, or give the --pin-dir that it was given",
            paths.pin_dir.display()
        ),
        Err(e) => {
            return Err(e).with_context(|| {
                format!(
                    "looking into {}: pins are for root",
                    paths.pin_dir.display()
                )
            });
        }
    }
    ReadOnlyMaps::open_pinned(&paths.pin_dir).context("reading the pinned maps")
}

/// Fails where a VM was named that is not served.
pub(crate) fn served(maps: &ReadOnlyMaps, vm: Option<&str>) -> anyhow::Result<()> {
    let Some(wanted) = vm else { return Ok(()) };
    let names: Vec<String> = maps.vms().map(|(_, vm)| ReadOnlyMaps::name(&vm)).collect();
    if names.iter().any(|name| name == wanted) {
        return Ok(());
    }
    match names.is_empty() {
        true => bail!("no VM {wanted:?} is served, nor any other"),
        false => Err(no_such_vm(wanted, names)),
    }
}

/// Prints once, or again every second until stopped. A reader that has gone ends it quietly.
fn print(watch: bool, text: impl Fn() -> anyhow::Result<String>) -> anyhow::Result<()> {
    let mut failed = None;
    let printed = print_as_written(watch, |out| match text() {
        Ok(text) => out.write_all(text.as_bytes()),
        Err(e) => {
            failed = Some(e);
            Err(io::ErrorKind::Other.into())
        }
    });
    failed.map_or(printed, Err)
}

/// Prints what `write` writes while it is written, once or again every second until stopped. A reader
/// that has gone ends it quietly.
fn print_as_written(
    watch: bool,
    mut write: impl FnMut(&mut PlainOutput<StdoutLock<'_>>) -> io::Result<()>,
) -> anyhow::Result<()> {
    let clear = watch && nix::unistd::isatty(io::stdout()).unwrap_or(false);
    let home = if clear { "\x1b[H\x1b[2J" } else { "" };
    loop {
        let mut out = PlainOutput::after(io::stdout().lock(), home);
        let written = write(&mut out).and_then(|()| out.finish());
        if !is_read(written)? || !watch {
            return Ok(());
        }
        thread::sleep(WATCH_EVERY);
    }
}

/// Prints. A reader that has gone is no error.
pub(crate) fn print_once(text: &str) -> anyhow::Result<()> {
    write_all(&mut std::io::stdout().lock(), &slipgate_policy::plain(text)).map(drop)
}

/// Writes the text; returns whether the reader is still there.
fn write_all(out: &mut impl Write, text: &str) -> anyhow::Result<bool> {
    is_read(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Whether the reader of what was written is still there.
fn is_read(written: io::Result<()>) -> anyhow::Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(e).context("writing to stdout"),
    }
}

/// `CLOCK_MONOTONIC`, ns: the scale of the times in slots.
pub(crate) fn now_ns() -> u64 {
    use userspace_nat::clock::{Clock as _, SystemClock};
    SystemClock.now_ns()
}
