//! The readable report: conditions, a table per metric, the programs' cost, the goals.

use std::fmt::Write;

use serde::Serialize;

use crate::{
    conditions::Conditions,
    goals::Goal,
    program_cost::Cost,
    results::{Cell, Row, Table},
    statistics::Summary,
};

/// Results of a run, as written to the JSON file.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) conditions: Conditions,
    pub(crate) tables: Vec<Table>,
    pub(crate) goals: Vec<Goal>,
    pub(crate) programs: Vec<Cost>,
    pub(crate) cells: Vec<Cell>,
}

impl Report {
    /// Formats the report as text.
    pub(crate) fn text(&self) -> String {
        let mut out = tables(&self.conditions, &self.tables);
        out += &programs(&self.programs);
        out += &goals(&self.goals);
        out
    }
}

/// Returns the conditions and a table per metric as text.
pub(crate) fn tables(of: &Conditions, tables: &[Table]) -> String {
    let metrics = tables.iter().map(metric);
    conditions(of) + &metrics.collect::<String>()
}

fn conditions(c: &Conditions) -> String {
    let cpu = |cpu: Option<usize>| cpu.map_or("not pinned".into(), |cpu| format!("CPU {cpu}"));
    let kind = if c.virtual_machine { ", virtual" } else { "" };
    let mut lines = vec![
        ("date", format!("{} UTC, commit {}", c.date, c.commit)),
        ("kernel", c.kernel.clone()),
        (
            "machine",
            format!(
                "{} × {}{kind}; load before {:.2}",
                c.cpus, c.cpu, c.load_before
            ),
        ),
        (
            "pinned",
            format!(
                "client, server, generator: {}; VMM's stand-in and NAT processes: {}",
                cpu(c.pinning.ends),
                cpu(c.pinning.middle)
            ),
        ),
        (
            "MTU",
            format!("{}, but for the rows named after theirs", c.mtu),
        ),
        ("offloads", c.offloads.to_owned()),
        (
            "congestion",
            format!("{}, {}", c.congestion_control, c.congestion_control_set),
        ),
        (
            "time",
            format!("bulk {:?}, others {:?} each", c.limits.bulk, c.limits.short),
        ),
    ];
    let sysctl: Vec<_> = c
        .sysctl
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    lines.push(("sysctl", sysctl.join(" ")));
    lines.extend(
        c.versions
            .iter()
            .map(|(name, version)| (*name, version.clone())),
    );
    lines.extend(
        c.missing
            .iter()
            .map(|(name, why)| (*name, format!("not measured: {why}"))),
    );
    let width = width_of(lines.iter().map(|(name, _)| *name));
    let mut out = String::new();
    for (name, value) in lines {
        let _ = writeln!(out, "{name:<width$} {value}");
    }
    out
}

fn metric(table: &Table) -> String {
    let unit = table.metric.unit;
    let sense = if unit.more_is_better() {
        "more"
    } else {
        "less"
    };
    let mut out = format!(
        "\n{}, {} ({sense} is better)\n",
        table.metric.name,
        unit.symbol()
    );
    let width = width_of(table.rows.iter().map(|row| row.contender));
    let _ = writeln!(
        out,
        "  {:<width$} {:>9}  {:<19} {:>8}  {:<13}",
        "",
        "median",
        "min – max",
        "ratio",
        format!("to {}", table.reference)
    );
    for row in &table.rows {
        let _ = writeln!(out, "  {:<width$} {}", row.contender, cells(row));
    }
    // A row without any value says why in its place.
    for row in table.rows.iter().filter(|row| row.summary.is_some()) {
        if let Some(why) = &row.failure {
            let _ = writeln!(out, "  {} failed: {why}", row.contender);
        }
    }
    out
}

/// Returns the width of a column of names.
fn width_of<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(str::len).max().unwrap_or_default().max(18)
}

fn cells(row: &Row) -> String {
    let Some(summary) = row.summary else {
        let why = row.failure.as_deref().unwrap_or("not measured");
        return format!("{:>9}  {why}", "–");
    };
    let mut out = format!("{:>9}  {:<19}", number(summary.median), spread(summary));
    if let Some(ratio) = row.ratio {
        let _ = write!(out, " {:>7.2}×  {:<13}", ratio.median, spread(ratio));
    }
    if row.stalled > 0 {
        let _ = write!(out, "  {} stalled", row.stalled);
    }
    if row.failures > 0 {
        let _ = write!(out, "  {} failed", row.failures);
    }
    out
}

fn programs(costs: &[Cost]) -> String {
    if costs.is_empty() {
        return String::new();
    }
    let mut out = String::from("\nBPF programs, ns per packet by PROG_TEST_RUN\n");
    for cost in costs {
        let _ = writeln!(
            out,
            "  {:<18} {:<4} {:<32} {:>7.0}  {:<13}",
            cost.program,
            cost.protocol,
            cost.what,
            cost.ns.median,
            spread(cost.ns)
        );
    }
    out += "  (over an empty run, which is the harness's own cost)\n";
    out
}

fn goals(goals: &[Goal]) -> String {
    if goals.is_empty() {
        return String::new();
    }
    let mut out = String::from("\nslipgate's goals\n");
    for goal in goals {
        let _ = writeln!(
            out,
            "  {:<60} {:>10}  {:>8}  {:<15} {}",
            goal.what,
            goal.wanted,
            number(goal.measured.median),
            spread(goal.measured),
            match goal.met {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "",
            }
        );
    }
    out
}

fn spread(summary: Summary) -> String {
    format!("{} – {}", number(summary.min), number(summary.max))
}

/// Formats a number with three significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
