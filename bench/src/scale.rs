//! A table with a thousand to a million live flows: what a packet, an admission, a pass of the
//! garbage collection, the commands and a new engine cost by their number.
//!
//! One daemon a family. First its own pinned programs are run by PROG_TEST_RUN on flows that the
//! benchmark puts into its maps, so that each run hits another flow at random
//! ([`crate::program_cost::at_sizes`]). These flows are taken out again. Then the engine admits as
//! many of 50 VMs' first packets, and the rest is measured with these ([`subject`]). The table has
//! room for two million throughout, so only the number of live flows changes.
//!
//! The floor is the time of two reads of memory, the second of which depends on the first, as a slot
//! does on the entry that names it ([`floor`]).

mod floor;
mod subject;

use std::time::{Duration, Instant};

use anyhow::Result;

use self::subject::Subject;
use crate::{
    family::{Families, Family},
    program_cost,
    results::{Cell, Table, tables},
    run::Settings,
    workload::{Metric, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const SCALE: &str = "scale";
const OF_IPV4: &str = "scale";
const OF_IPV6: &str = "scale-ipv6";

/// No further round is begun that would end later than this.
const BUDGET: Duration = Duration::from_secs(170);

/// Numbers of live flows, with the names of their rows.
const SIZES: [(&str, usize); 4] = [
    ("1,000 flows", 1_000),
    ("10,000 flows", 10_000),
    (HUNDRED_THOUSAND, 100_000),
    (MILLION, 1_000_000),
];
/// Row with which the others are compared.
pub(crate) const HUNDRED_THOUSAND: &str = "100,000 flows";
pub(crate) const MILLION: &str = "1,000,000 flows";
/// Sizes of a quick run.
const FEW: usize = 3;

/// Metrics of the programs, which a goal is about.
pub(crate) const HITS: [&str; 4] = [
    "scale guest_egress",
    "scale uplink_ingress",
    "scale-ipv6 guest_egress",
    "scale-ipv6 uplink_ingress",
];

/// Metrics of a family, in the order of [`Subject::measure`]'s values.
macro_rules! metrics {
    ($family:literal) => {
        [
            Unit::Nanoseconds.of(concat!($family, " guest_egress")),
            Unit::Nanoseconds.of(concat!($family, " uplink_ingress")),
            Unit::Nanoseconds.of(concat!($family, " floor: two dependent misses")),
            Unit::Nanoseconds.of(concat!($family, " floor, huge pages")),
            Unit::ThousandPerSecond.of(concat!($family, " new flows per CPU second")),
            Unit::ThousandPerSecond.of(concat!($family, " new flows")),
            Unit::PercentOfACore.of(concat!($family, " idle engine")),
            Unit::Mebibytes.of(concat!($family, " engine memory")),
            Unit::Milliseconds.of(concat!($family, " slipgate flows")),
            Unit::Milliseconds.of(concat!($family, " slipgate stats")),
            Unit::Milliseconds.of(concat!($family, " policy changed")),
            Unit::Milliseconds.of(concat!($family, " engine killed: new flows again")),
            Unit::Milliseconds.of(concat!($family, " engine killed: CPU time of adoption")),
        ]
    };
}

pub(crate) const IPV4: [Metric; 13] = metrics!("scale");
pub(crate) const IPV6: [Metric; 13] = metrics!("scale-ipv6");

/// Measures all sizes. Returns the cells and their tables.
pub(crate) fn measure(
    settings: &Settings,
    quick: bool,
    families: Families,
) -> (Vec<Cell>, Vec<Table>) {
    let sizes = if quick { &SIZES[..FEW] } else { &SIZES[..] };
    let (started, mut longest) = (Instant::now(), Duration::ZERO);
    let mut cells = Vec::new();
    for round in 1..=settings.rounds {
        if started.elapsed() + longest > BUDGET {
            break;
        }
        let began = Instant::now();
        for family in Family::ALL {
            if families.includes(family) {
                cells.extend(one_round(round, family, sizes, settings));
            }
        }
        longest = longest.max(began.elapsed());
        eprintln!(
            "scale, round {round}: {:.0} s",
            began.elapsed().as_secs_f64()
        );
    }
    let rows: Vec<_> = sizes.iter().map(|(name, _)| *name).collect();
    let of_family = |family: Family| {
        let measured = [(family.of(OF_IPV4, OF_IPV6), &family.of(&IPV4, &IPV6)[..])];
        tables(&measured, &rows, HUNDRED_THOUSAND, &cells)
    };
    let all = Family::ALL.into_iter();
    let all = all.filter(|family| families.includes(*family));
    let tables = all.flat_map(of_family).collect();
    (cells, tables)
}

/// Measures a family once. What fails ends the round; the sizes before it are kept.
fn one_round(
    round: usize,
    family: Family,
    sizes: &[(&'static str, usize)],
    settings: &Settings,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    let workload = family.of(OF_IPV4, OF_IPV6);
    let failed = each_size(family, sizes, settings, |contender, sample| {
        cells.push(Cell {
            round,
            contender,
            workload,
            outcome: Ok(sample),
        });
    });
    if let Err(why) = failed {
        let why = format!("{why:#}");
        let (contender, _) = sizes[cells.len().min(sizes.len() - 1)];
        eprintln!("round {round}: {workload}: {contender}: {why}");
        cells.push(Cell {
            round,
            contender,
            workload,
            outcome: Err(why),
        });
    }
    cells
}

fn each_size(
    family: Family,
    sizes: &[(&'static str, usize)],
    settings: &Settings,
    mut done: impl FnMut(&'static str, Sample),
) -> Result<()> {
    let numbers: Vec<usize> = sizes.iter().map(|(_, size)| *size).collect();
    let mut subject = Subject::new(family, settings.pinning)?;
    let pins = subject.pins()?;
    let hits = subject
        .host()
        .run(|| program_cost::at_sizes(&pins, family, &numbers))?;
    for ((name, flows), hits) in sizes.iter().zip(hits) {
        let floors = [false, true].map(|huge| floor::ns_of_two_misses(*flows, huge));
        let [small, huge] = floors;
        let measured = subject.measure(*flows)?;
        let values = hits.into_iter().chain([small?, huge?]);
        let values = values.chain(measured.values);
        let names = family.of(&IPV4, &IPV6).iter().map(|metric| metric.name);
        let values: Vec<_> = names.zip(values).collect();
        let mut sample = Sample::of(&values);
        for (name, value) in measured.details {
            sample = sample.with(name, value);
        }
        done(name, sample);
    }
    Ok(())
}
