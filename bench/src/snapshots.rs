//! Snapshots: a whole one, differences on it after the guest has written to so much memory, and restores
//! of the whole one and of a difference, beside a daemon.
//!
//! The time of a snapshot is that of the command, its process and fsync included. The bytes are those
//! that the files take on the disk.
use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use slipgate_testbed::{MicroVm, PinDir, Slipgate, World, requirements, world::UPLINK};

use crate::{
    clones::{end, first_instruction_ms, save},
    contender::world,
    results::{Cell, Table, tables},
    run::Settings,
    statistics::percentile,
    workload::{Measured, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const SNAPSHOT: &str = "snapshot";
const NAME: &str = "slipgate";

const MIB: u64 = 1 << 20;
const MEMORY_MIB: &str = "256";
/// Memory that the guest fills before the whole snapshot, and more of it before each difference.
const WHOLE_MIB: u64 = 64;
const FEW_MIB: u64 = 1;
const MANY_MIB: u64 = 15;
/// Most that a snapshot has besides what was filled: the guest's own memory and the state.
const BESIDES_MIB: u64 = 8;

const WHOLE: [&str; 2] = ["snapshot, 64 MiB written", "snapshot, 64 MiB written: size"];
const FEW: [&str; 2] = [
    "difference, 1 MiB written",
    "difference, 1 MiB written: size",
];
const MANY: [&str; 2] = [
    "difference, 16 MiB written",
    "difference, 16 MiB written: size",
];
const RESTORE: &str = "restore of the whole, first instruction";
const RESTORE_DIFFERENCE: &str = "restore of the difference of 16 MiB, first instruction";
const MEASURED: Measured = (
    SNAPSHOT,
    &[
        Unit::Milliseconds.of(WHOLE[0]),
        Unit::Mebibytes.of(WHOLE[1]),
        Unit::Milliseconds.of(FEW[0]),
        Unit::Mebibytes.of(FEW[1]),
        Unit::Milliseconds.of(MANY[0]),
        Unit::Mebibytes.of(MANY[1]),
        Unit::Milliseconds.of(RESTORE),
        Unit::Milliseconds.of(RESTORE_DIFFERENCE),
    ],
);

/// Number of restores of each, and in a quick run.
const RESTORES: usize = 10;
const FEW_RESTORES: usize = 2;
const WAIT: Duration = Duration::from_secs(30);

/// Measures all rounds. Returns the cells and their table.
pub(crate) fn measure(settings: &Settings, quick: bool) -> (Vec<Cell>, Vec<Table>) {
    let round = |round| {
        let outcome = one_round(quick).map_err(|why| format!("{why:#}"));
        if let Err(why) = &outcome {
            eprintln!("round {round}: {SNAPSHOT}: {why}");
        }
        Cell {
            round,
            contender: NAME,
            workload: SNAPSHOT,
            outcome,
        }
    };
    let cells: Vec<_> = (1..=settings.rounds).map(round).collect();
    let tables = tables(&[MEASURED], &[NAME], NAME, &cells);
    (cells, tables)
}

fn one_round(quick: bool) -> Result<Sample> {
    requirements::kvm().map_err(anyhow::Error::msg)?;
    let world = World::with(world(false))?;
    let pins = PinDir::new()?;
    let flags = ["--uplink", UPLINK, "--log", "warn"];
    let _daemon = Slipgate::serve(&world.host, &pins, &flags)?;
    let scratch = tempfile::tempdir().context("make a directory for snapshots")?;
    let dir = |name: &str| scratch.path().join(name);
    let start = |flags: &[&str]| MicroVm::start(&world.host, &pins, flags);

    // It is saved in the waits.
    let work = format!(
        "fill {WHOLE_MIB}; wait 2s; fill {FEW_MIB}; wait 2s; fill {MANY_MIB}; wait 2s; wait 60s"
    );
    let image = slipgate_testbed::builtin_guest::image()?
        .display()
        .to_string();
    let flags = [
        "--memory",
        MEMORY_MIB,
        "--cmdline",
        &work,
        "--kernel",
        &image,
    ];
    let mut vm = start(&[&flags[..], &["--name", "saved"]].concat())?;
    let (whole, few, many) = (dir("whole"), dir("few"), dir("many"));
    let mut measured = Vec::new();
    let saves = [
        (WHOLE, &whole, None, WHOLE_MIB),
        (FEW, &few, Some(&whole), FEW_MIB),
        (MANY, &many, Some(&whole), FEW_MIB + MANY_MIB),
    ];
    for ([time, size], dir, base, mib) in saves {
        vm.await_line("\"fill\"", WAIT)?;
        let begin = Instant::now();
        save(&world, &vm, dir, base.map(|base| base.as_path()))?;
        measured.push((time, begin.elapsed().as_secs_f64() * 1e3));
        let bytes = bytes_of(dir)?;
        // With more the guest has gone on before it was saved, which a slow machine does.
        let due = mib * MIB..=(mib + BESIDES_MIB) * MIB;
        ensure!(
            due.contains(&bytes),
            "{time}: {bytes} bytes are on the disk"
        );
        measured.push((size, bytes as f64 / MIB as f64));
    }
    end(vm)?;

    let mut firsts = [Vec::new(), Vec::new()];
    for number in 0..if quick { FEW_RESTORES } else { RESTORES } {
        for (firsts, dir) in firsts.iter_mut().zip([&whole, &many]) {
            let (dir, name) = (dir.display().to_string(), format!("one{number}"));
            let mut vm = start(&["--restore", &dir, "--name", &name])?;
            vm.await_line("\"wait\"", WAIT)?;
            firsts.push(first_instruction_ms(&end(vm)?)?);
        }
    }
    for (name, firsts) in [RESTORE, RESTORE_DIFFERENCE].into_iter().zip(&firsts) {
        measured.push((name, percentile(firsts, 50.0)));
    }
    Ok(Sample::of(&measured).with("restores", firsts[0].len() as f64))
}

/// Returns the bytes that the files of a directory take on the disk.
fn bytes_of(dir: &Path) -> Result<u64> {
    let files = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    let mut bytes = 0;
    for file in files {
        // Blocks of 512 bytes, whatever the file system's are (stat(2)).
        bytes += file?.metadata()?.blocks() * 512;
    }
    Ok(bytes)
}

#[cfg(test)]
#[path = "snapshots_test.rs"]
mod tests;
