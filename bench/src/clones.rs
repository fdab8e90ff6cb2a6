//! Clones: `slipgate run --restore` of one warm snapshot, beside a daemon.
//!
//! The saved guest is the built-in one, with its lease, and waits; then it asks a resolver in the
//! world for a name. The time of the wait is the snapshot's, so it is taken off: each clone's report
//! says how long it was from the first instruction to the first line, which is the wait's. What
//! remains is the time from the start of the command, its process included.
use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use slipgate_testbed::{
    MicroVm, MicroVmEnd, PinDir, Slipgate, World, requirements,
    servers::{Answer, DnsServer},
    signal, slipgate,
    world::{SERVER, UPLINK},
};

use crate::{
    contender::world,
    results::{Cell, Table, tables},
    run::Settings,
    statistics::percentile,
    workload::{Measured, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const CLONE: &str = "clone";
const NAME: &str = "slipgate";

pub(crate) const FIRST_P50: &str = "clone first instruction p50";
const FIRST_P99: &str = "clone first instruction p99";
pub(crate) const ANSWER_P50: &str = "clone first answer p50";
const ANSWER_P99: &str = "clone first answer p99";
const MEMORY: &str = "clone memory";
/// Parts of the time to the first instruction, medians: those of the report's `stages`, and what passed
/// before the command's own first instruction.
const EXEC: &str = "clone stage: exec, flags, looking for the daemon";
const STAGES: [(&str, &str); 6] = [
    (
        "clone stage: process started, files opened, TAP made",
        "opened_us",
    ),
    ("clone stage: of that, VMM's process started", "started_us"),
    ("clone stage: VMM confined", "confined_us"),
    ("clone stage: machine made", "made_us"),
    ("clone stage: VMM from its start to ready", "ready_us"),
    ("clone stage: served by the daemon, meanwhile", "served_us"),
];
const AT_ONCE_EACH: &str = "clones at once, 8: each";
const HUNDRED_P50: &str = "clones at once, 100: first answer p50";
const HUNDRED_P99: &str = "clones at once, 100: first answer p99";
const HUNDRED_EACH: &str = "clones at once, 100: each answered after";
const HUNDRED_MEMORY: &str = "clones at once, 100: memory of one";
pub(crate) const MEASURED: Measured = (
    CLONE,
    &[
        Unit::Milliseconds.of(FIRST_P50),
        Unit::Milliseconds.of(FIRST_P99),
        Unit::Milliseconds.of(ANSWER_P50),
        Unit::Milliseconds.of(ANSWER_P99),
        Unit::Mebibytes.of(MEMORY),
        Unit::Milliseconds.of(AT_ONCE_EACH),
        Unit::Milliseconds.of(HUNDRED_P50),
        Unit::Milliseconds.of(HUNDRED_P99),
        Unit::Milliseconds.of(HUNDRED_EACH),
        Unit::Mebibytes.of(HUNDRED_MEMORY),
        Unit::Milliseconds.of(EXEC),
        Unit::Milliseconds.of(STAGES[0].0),
        Unit::Milliseconds.of(STAGES[1].0),
        Unit::Milliseconds.of(STAGES[2].0),
        Unit::Milliseconds.of(STAGES[3].0),
        Unit::Milliseconds.of(STAGES[4].0),
        Unit::Milliseconds.of(STAGES[5].0),
    ],
);

/// Number of clones, one after the other, and in a quick run.
const CLONES: usize = 40;
const FEW_CLONES: usize = 5;
/// Number of clones that are started at once.
const AT_ONCE: usize = 8;
/// Number that is a fleet's.
const HUNDRED: usize = 100;
const WAIT: Duration = Duration::from_secs(30);
/// Work of the saved guest: the wait in which it is saved, the question, and a wait for the memory
/// to be looked at.
const WORK: &str = "wait 700ms; dns a.test; wait 20s";

/// Measures all rounds. Returns the cells and their table.
pub(crate) fn measure(settings: &Settings, quick: bool) -> (Vec<Cell>, Vec<Table>) {
    let round = |round| {
        let outcome = one_round(quick).map_err(|why| format!("{why:#}"));
        if let Err(why) = &outcome {
            eprintln!("round {round}: {CLONE}: {why}");
        }
        Cell {
            round,
            contender: NAME,
            workload: CLONE,
            outcome,
        }
    };
    let cells: Vec<_> = (1..=settings.rounds.min(3)).map(round).collect();
    let tables = tables(&[MEASURED], &[NAME], NAME, &cells);
    (cells, tables)
}

fn one_round(quick: bool) -> Result<Sample> {
    requirements::kvm().map_err(anyhow::Error::msg)?;
    let world = World::with(world(false))?;
    let zone = [("a.test".to_owned(), Answer::a(SERVER, 60))].into();
    let names = DnsServer::start(&world.net, (SERVER, 53), zone)?;
    let resolver = names.address().to_string();
    let pins = PinDir::new()?;
    let flags = ["--uplink", UPLINK, "--dns", &resolver, "--log", "warn"];
    let _daemon = Slipgate::serve(&world.host, &pins, &flags)?;
    let scratch = tempfile::tempdir().context("make a directory for a snapshot")?;
    let dir = scratch.path().join("warm");
    let start = |flags: &[&str]| MicroVm::start(&world.host, &pins, flags);

    let mut base = start(&["--memory", "128", "--cmdline", WORK, "--name", "base"])?;
    base.await_line("\"lease\"", WAIT)?;
    save(&world, &base, &dir, None)?;
    end(base)?;

    let restore = dir.display().to_string();
    let clone = |name: &str| start(&["--restore", &restore, "--name", name]);
    let (mut firsts, mut answers, mut execs) = (Vec::new(), Vec::new(), Vec::new());
    let mut stages = STAGES.map(|_| Vec::new());
    for number in 0..if quick { FEW_CLONES } else { CLONES } {
        let mut vm = clone(&format!("one{number}"))?;
        vm.await_line("\"dns\"", WAIT)?;
        let times = Times::of(vm)?;
        firsts.push(times.first_ms);
        answers.push(times.answer_ms);
        execs.push(times.exec_ms);
        for (all, took_ms) in stages.iter_mut().zip(times.stages_ms) {
            all.push(took_ms);
        }
    }
    let eight = Together::start(AT_ONCE, "of-eight", clone)?;
    let hundred = Together::start(HUNDRED, "of-hundred", clone)?;
    let medians = STAGES.iter().zip(&stages);
    let medians = medians.map(|((name, _), all)| (*name, percentile(all, 50.0)));
    let mut measured = vec![
        (FIRST_P50, percentile(&firsts, 50.0)),
        (FIRST_P99, percentile(&firsts, 99.0)),
        (ANSWER_P50, percentile(&answers, 50.0)),
        (ANSWER_P99, percentile(&answers, 99.0)),
        (MEMORY, eight.memory_mib),
        (AT_ONCE_EACH, eight.slowest_first_ms / AT_ONCE as f64),
        (HUNDRED_P50, percentile(&hundred.answers_ms, 50.0)),
        (HUNDRED_P99, percentile(&hundred.answers_ms, 99.0)),
        (HUNDRED_EACH, hundred.took_ms / HUNDRED as f64),
        (HUNDRED_MEMORY, hundred.memory_mib),
        (EXEC, percentile(&execs, 50.0)),
    ];
    measured.extend(medians);
    Ok(Sample::of(&measured).with("clones", firsts.len() as f64))
}

/// Clones that were started without a wait between them, and were alive together.
struct Together {
    /// The latest first instruction, from the start of that clone's command.
    slowest_first_ms: f64,
    /// Each one's first answer, from the start of its command.
    answers_ms: Vec<f64>,
    /// From the start of the first command to the last answer.
    took_ms: f64,
    /// PSS of the processes of one.
    memory_mib: f64,
}

impl Together {
    /// Starts `number` clones, waits for the answer of each, and ends them.
    fn start(
        number: usize,
        name: &str,
        clone: impl Fn(&str) -> Result<MicroVm, slipgate_testbed::Error>,
    ) -> Result<Self> {
        let started = Instant::now();
        let mut all = Vec::new();
        for number in 0..number {
            all.push((started.elapsed(), clone(&format!("{name}{number}"))?));
        }
        for (_, vm) in &mut all {
            vm.await_line("\"dns\"", WAIT)?;
        }
        let memory = all.iter().map(|(_, vm)| vm.memory_kib());
        let memory_kib = memory.sum::<Result<u64, _>>()?;
        let mut together = Self {
            slowest_first_ms: 0.0,
            answers_ms: Vec::new(),
            took_ms: 0.0,
            memory_mib: memory_kib as f64 / 1024.0 / number as f64,
        };
        for (after, vm) in all {
            let times = Times::of(vm)?;
            together.slowest_first_ms = together.slowest_first_ms.max(times.first_ms);
            together.answers_ms.push(times.answer_ms);
            let answered_ms = after.as_secs_f64() * 1e3 + times.answer_ms;
            together.took_ms = together.took_ms.max(answered_ms);
        }
        Ok(together)
    }
}

/// Has the machine saved, whole or what differs from a base.
pub(crate) fn save(world: &World, vm: &MicroVm, dir: &Path, base: Option<&Path>) -> Result<()> {
    let mut command = Command::new(slipgate::binary()?);
    command
        .args(["snapshot", &vm.broker_pid().to_string()])
        .arg(dir);
    if let Some(base) = base {
        command.arg("--diff").arg(base);
    }
    world.host.output(command)?;
    Ok(())
}

/// Times of a clone from the start of its command, without the guest's wait.
struct Times {
    first_ms: f64,
    answer_ms: f64,
    exec_ms: f64,
    stages_ms: [f64; STAGES.len()],
}

impl Times {
    /// Ends a machine that has its answer.
    fn of(vm: MicroVm) -> Result<Self> {
        let end = end(vm)?;
        let (waited, answered) = (said_ms(&end, "wait")?, said_ms(&end, "dns")?);
        let first_ms = first_instruction_ms(&end)?;
        let of = |value: &serde_json::Value| Some(value.as_f64()? / 1e3);
        let prepared_ms = of(&end.report["prepared_us"]).context("it has no prepared_us")?;
        let stage = |(_, key): (&str, &str)| of(&end.report["stages"][key]).unwrap_or(f64::NAN);
        Ok(Self {
            first_ms,
            answer_ms: first_ms + answered - waited,
            exec_ms: first_ms - prepared_ms,
            stages_ms: STAGES.map(stage),
        })
    }
}

/// Ends a machine in order.
pub(crate) fn end(vm: MicroVm) -> Result<MicroVmEnd> {
    signal(vm.broker_pid(), libc::SIGTERM);
    Ok(vm.finish(WAIT)?)
}

/// Returns when a machine's guest told of its first workload of a kind, ms from the start of the command.
fn said_ms(end: &MicroVmEnd, what: &str) -> Result<f64> {
    let said =
        |line: &&slipgate_testbed::Line| line.json().is_some_and(|json| json["workload"] == what);
    let line = end.lines.iter().find(said);
    let line = line.with_context(|| format!("it did not say {what}: {:?}", end.lines))?;
    Ok(line.after.as_secs_f64() * 1e3)
}

/// Returns when the first instruction ran of a machine that was restored in a wait, ms from the start of
/// the command. The end of the wait is the guest's first line.
pub(crate) fn first_instruction_ms(end: &MicroVmEnd) -> Result<f64> {
    let first_line = end.report["first_line_us"].as_f64();
    let first_line = first_line.context("its report has no first_line_us")? / 1e3;
    let first_ms = said_ms(end, "wait")? - first_line;
    ensure!(first_ms > 0.0, "its first line came before it ran");
    Ok(first_ms)
}
