use super::*;
use crate::{
    contender::REFERENCE,
    workload::{self, Sample},
};

fn cell(round: usize, contender: &'static str, value: Result<f64, &str>) -> Cell {
    let outcome = value
        .map(|value| Sample {
            values: [("bulk-up", value)].into(),
            details: [("bytes", value * 10.0)].into(),
        })
        .map_err(str::to_owned);
    Cell {
        round,
        contender,
        workload: "bulk-up",
        outcome,
    }
}

fn measured() -> Vec<Measured> {
    let all = workload::all();
    all.iter().map(|workload| workload.measured()).collect()
}

fn bulk_up(cells: &[Cell]) -> Table {
    let workloads = &measured()[..1];
    let mut tables = tables(workloads, &["slipgate", REFERENCE], REFERENCE, cells);
    assert_eq!(tables.len(), 1);
    tables.remove(0)
}

#[test]
fn ratios_are_taken_within_a_round() {
    let table = bulk_up(&[
        cell(1, "slipgate", Ok(2.0)),
        cell(1, REFERENCE, Ok(1.0)),
        cell(2, "slipgate", Ok(30.0)),
        cell(2, REFERENCE, Ok(10.0)),
    ]);
    let ratio = table.row("slipgate").unwrap().ratio.unwrap();
    assert_eq!((ratio.min, ratio.max), (2.0, 3.0));
    let own = table.row(REFERENCE).unwrap().ratio.unwrap();
    assert_eq!((own.min, own.max), (1.0, 1.0));
    assert_eq!(table.ratio(REFERENCE, "slipgate").unwrap().max, 0.5);
    assert_eq!(table.row("slipgate").unwrap().details, [("bytes", 160.0)]);
}

#[test]
fn a_failed_round_has_no_ratio_and_is_told() {
    let table = bulk_up(&[
        cell(1, "slipgate", Ok(2.0)),
        cell(1, REFERENCE, Err("it broke")),
        cell(2, "slipgate", Ok(6.0)),
        cell(2, REFERENCE, Ok(3.0)),
    ]);
    let ratio = table.row("slipgate").unwrap().ratio.unwrap();
    assert_eq!((ratio.count, ratio.median), (1, 2.0));
    let reference = table.row(REFERENCE).unwrap();
    assert_eq!(reference.failures, 1);
    assert_eq!(reference.failure.as_deref(), Some("it broke"));
}

#[test]
fn all_that_a_workload_comes_to_has_a_table() {
    let tables = tables(&measured(), &["slipgate"], REFERENCE, &[]);
    let names: Vec<_> = tables.iter().map(|table| table.metric.name).collect();
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len(), "{names:?}");
    assert!(
        tables
            .iter()
            .all(|table| table.row("slipgate").unwrap().summary.is_none())
    );
}

#[test]
fn nothing_has_no_ratio_to_nothing() {
    let cells = [cell(1, "slipgate", Ok(1.0)), cell(1, REFERENCE, Ok(0.0))];
    assert_eq!(bulk_up(&cells).row("slipgate").unwrap().ratio, None);
}
