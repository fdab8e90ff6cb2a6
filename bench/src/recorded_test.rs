use std::time::Duration;

use super::*;
use crate::{
    goals,
    machine::Pinning,
    report::Report,
    results,
    results::Cell,
    workload::{Limits, Metric, Sample, Unit},
};

#[test]
fn a_run_is_read_back_as_it_was_written() {
    const METRICS: [Metric; 1] = [Unit::GigabitsPerSecond.of("bulk-up")];
    let cells: Vec<Cell> = [("slipgate", 42.0), ("nftables", 40.0)]
        .map(|(contender, rate)| Cell {
            round: 1,
            contender,
            workload: "bulk-up",
            outcome: Ok(Sample::of(&[("bulk-up", rate)])),
        })
        .into();
    let names = ["slipgate", "nftables", "absent"];
    let tables = results::tables(&[("bulk-up", &METRICS)], &names, "nftables", &cells);
    let limits = Limits {
        bulk: Duration::from_secs(2),
        short: Duration::from_secs(1),
    };
    let report = Report {
        conditions: Conditions::now(Pinning::none(), limits, "cubic"),
        goals: goals::judge(&tables),
        tables,
        programs: Vec::new(),
        cells,
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.json");
    fs::write(&file, serde_json::to_string_pretty(&report).unwrap()).unwrap();
    let shown = show(&file).unwrap();
    let tables = report::tables(&report.conditions, &report.tables);
    assert!(shown.starts_with(&tables), "{shown}");
    assert!(tables.contains("1.05×"), "{tables}");
    let plot = fs::read_to_string(folder.path().join("run.svg")).unwrap();
    assert!(plot.contains("bulk-up") && plot.contains("1.05×"), "{plot}");
    fs::write(&file, "{}").unwrap();
    assert!(show(&file).is_err());
}
