//! The order of measurements.
//!
//! In each round every contender is set up anew, so a favourable memory placement or hash seed
//! affects one round only. Then each workload runs on all contenders before the next one starts, so
//! compared values are measured seconds apart. Ratios are taken within a round.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::{
    conditions::Conditions,
    contender::{Contender, Stand},
    family::is_ipv6,
    machine::Pinning,
    results::{self, Cell, Table},
    workload::{Limits, Sample, Workload},
};

/// Settings of a run.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) rounds: usize,
    pub(crate) limits: Limits,
    pub(crate) pinning: Pinning,
    pub(crate) congestion_control: String,
    /// Time limit. No round is started that would not end in time, judged by the longest round so
    /// far.
    pub(crate) budget: Duration,
}

/// Contenders and workloads to run, with settings.
pub(crate) struct Plan {
    pub(crate) contenders: Vec<Box<dyn Contender>>,
    pub(crate) workloads: Vec<Box<dyn Workload>>,
    pub(crate) settings: Settings,
}

impl Plan {
    /// Runs all rounds and returns their results.
    pub(crate) fn run(&self) -> Vec<Cell> {
        let (started, mut longest) = (Instant::now(), Duration::ZERO);
        let mut cells = Vec::new();
        let Settings { rounds, budget, .. } = self.settings;
        for round in 1..=rounds {
            if started.elapsed() + longest > budget {
                let done = round - 1;
                eprintln!("the time is up after {done} of {rounds} rounds");
                break;
            }
            let began = Instant::now();
            self.round(round, &mut cells);
            longest = longest.max(began.elapsed());
            eprintln!(
                "round {round} of {rounds}: {:.0} s",
                began.elapsed().as_secs_f64()
            );
        }
        cells
    }

    /// Returns a table per metric, in the order of the workloads. Contenders that cannot run a
    /// workload have no row.
    pub(crate) fn tables(&self, reference: &'static str, cells: &[Cell]) -> Vec<Table> {
        let mut tables = Vec::new();
        for workload in &self.workloads {
            let contenders = self.contenders.iter();
            let names: Vec<_> = contenders
                .filter(|contender| contender.takes_part(workload.name()))
                .map(|contender| contender.name())
                .collect();
            let measured = [workload.measured()];
            tables.extend(results::tables(&measured, &names, reference, cells));
        }
        tables
    }

    /// Whether a workload is one in IPv6.
    fn has_ipv6(&self) -> bool {
        let mut workloads = self.workloads.iter();
        workloads.any(|workload| is_ipv6(workload.name()))
    }

    fn round(&self, round: usize, cells: &mut Vec<Cell>) {
        let set_up = |contender: &dyn Contender| {
            let ipv6 = contender.has_ipv6() && self.has_ipv6();
            let stand = contender.set_up(self.settings.pinning, ipv6)?;
            // Where it can't be, the conditions say so.
            stand
                .set_congestion_control(&self.settings.congestion_control)
                .ok();
            stand.hold(true)?;
            Ok(stand)
        };
        let mut stands: Vec<Result<Stand>> = self
            .contenders
            .iter()
            .map(|contender| set_up(contender.as_ref()))
            .collect();
        for workload in &self.workloads {
            for (contender, stand) in self.contenders.iter().zip(&mut stands) {
                if !contender.takes_part(workload.name()) {
                    continue;
                }
                let outcome = match stand {
                    Ok(stand) => measure(workload.as_ref(), stand, self.settings.limits),
                    Err(error) => Err(anyhow::anyhow!("set-up: {error:#}")),
                };
                let outcome = outcome.map_err(|error| told_once(&error));
                if let Err(why) = &outcome {
                    let (name, what) = (contender.name(), workload.name());
                    eprintln!("round {round}: {name}: {what}: {why}");
                }
                cells.push(Cell {
                    round,
                    contender: contender.name(),
                    workload: workload.name(),
                    outcome,
                });
            }
        }
        for (contender, stand) in self.contenders.iter().zip(stands) {
            if let Err(why) = stand.map_or(Ok(()), Stand::tear_down) {
                eprintln!("round {round}: {}: tear-down: {why:#}", contender.name());
            }
        }
    }
}

/// Runs a separate comparison. Contenders that cannot run on this machine have a row too, which
/// shows that the comparison is incomplete.
pub(crate) fn compare(
    reference: &'static str,
    contenders: Vec<Box<dyn Contender>>,
    workloads: Vec<Box<dyn Workload>>,
    settings: &Settings,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let missing_before = conditions.missing.len();
    let plan = Plan {
        contenders: crate::present(contenders, conditions),
        workloads,
        settings: settings.clone(),
    };
    let cells = plan.run();
    let mut tables = plan.tables(reference, &cells);
    results::add_missing(&mut tables, &conditions.missing[missing_before..]);
    (cells, tables)
}

/// Runs a workload on one contender while the others are stopped. Returns its sample.
fn measure(workload: &dyn Workload, stand: &Stand, limits: Limits) -> Result<Sample> {
    stand.hold(false)?;
    let outcome = workload.run(stand, limits);
    stand.hold(true)?;
    outcome
}

/// Formats an error with its causes, except those whose text it already has.
fn told_once(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if told.is_empty() {
            told = cause;
        } else if !told.contains(&cause) {
            told = format!("{told}: {cause}");
        }
    }
    told
}
