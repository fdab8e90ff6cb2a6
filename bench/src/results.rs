//! Cells, turned into series and ratios.

use serde::{Deserialize, Serialize};

use crate::{
    statistics::Summary,
    workload::{Measured, Metric, Sample},
};

/// Result of one contender in one workload in one round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) round: usize,
    pub(crate) contender: &'static str,
    pub(crate) workload: &'static str,
    /// Measured sample, or the reason for the failure.
    pub(crate) outcome: std::result::Result<Sample, String>,
}

impl Cell {
    /// A result. Why there is none is printed at once.
    pub(crate) fn of(
        round: usize,
        contender: &'static str,
        workload: &'static str,
        outcome: anyhow::Result<Sample>,
    ) -> Self {
        let outcome = outcome.map_err(|why| format!("{why:#}"));
        if let Err(why) = &outcome {
            eprintln!("round {round}: {contender}: {workload}: {why}");
        }
        Self {
            round,
            contender,
            workload,
            outcome,
        }
    }
}

/// Values of one metric of one contender over all rounds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) contender: &'static str,
    /// Values with their rounds; failed rounds are left out.
    pub(crate) values: Vec<(usize, f64)>,
    pub(crate) summary: Option<Summary>,
    /// Ratio to the reference, computed within each round.
    pub(crate) ratio: Option<Summary>,
    /// Rounds in which the transfer stalled and the bytes until then were counted.
    pub(crate) stalled: usize,
    /// Number of rounds that failed.
    pub(crate) failures: usize,
    /// Reason for the first failure.
    pub(crate) failure: Option<String>,
    /// Medians of the details.
    pub(crate) details: Vec<(&'static str, f64)>,
}

impl Row {
    /// Makes the row of a contender that this machine does not have.
    pub(crate) fn missing(contender: &'static str, why: String) -> Row {
        Row {
            contender,
            failure: Some(why),
            ..Row::default()
        }
    }
}

/// Results of one metric over all contenders.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) metric: Metric,
    /// Contender to which the ratios refer.
    pub(crate) reference: &'static str,
    pub(crate) rows: Vec<Row>,
}

impl Table {
    /// Returns the row of a contender.
    pub(crate) fn row(&self, contender: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.contender == contender)
    }

    /// Returns the ratio of one contender to another, taken within each round.
    pub(crate) fn ratio(&self, contender: &str, to: &str) -> Option<Summary> {
        ratios(&self.row(contender)?.values, &self.row(to)?.values)
    }

    /// Returns the ratio of a contender's values to its own of another metric, taken within each
    /// round.
    pub(crate) fn ratio_to(&self, contender: &str, other: &Table) -> Option<Summary> {
        ratios(&self.row(contender)?.values, &other.row(contender)?.values)
    }
}

/// Returns a table per metric, in the order of the workloads.
pub(crate) fn tables(
    workloads: &[Measured],
    contenders: &[&'static str],
    reference: &'static str,
    cells: &[Cell],
) -> Vec<Table> {
    let of_workload = |(name, metrics): &Measured| {
        let table = |metric: &Metric| table(*metric, name, contenders, reference, cells);
        metrics.iter().map(table).collect::<Vec<_>>()
    };
    workloads.iter().flat_map(of_workload).collect()
}

/// Gives each table a row for each contender that this machine does not have, with the reason.
pub(crate) fn add_missing(tables: &mut [Table], missing: &[(&'static str, String)]) {
    for table in tables {
        let rows = missing
            .iter()
            .map(|(name, why)| Row::missing(name, why.clone()));
        table.rows.extend(rows);
    }
}

fn table(
    metric: Metric,
    workload: &str,
    contenders: &[&'static str],
    reference: &'static str,
    cells: &[Cell],
) -> Table {
    let rows = contenders.iter().map(|contender| {
        let cells = cells
            .iter()
            .filter(|cell| cell.contender == *contender && cell.workload == workload);
        row(metric, contender, cells)
    });
    let mut rows: Vec<Row> = rows.collect();
    let compared = rows.iter().find(|row| row.contender == reference);
    if let Some(compared) = compared.map(|row| row.values.clone()) {
        for row in &mut rows {
            row.ratio = ratios(&row.values, &compared);
        }
    }
    Table {
        metric,
        reference,
        rows,
    }
}

fn row<'a>(
    metric: Metric,
    contender: &'static str,
    cells: impl Iterator<Item = &'a Cell> + Clone,
) -> Row {
    let samples = cells
        .clone()
        .filter_map(|cell| Some((cell.round, cell.outcome.as_ref().ok()?)));
    let values: Vec<(usize, f64)> = samples
        .clone()
        .filter_map(|(round, sample)| Some((round, *sample.values.get(metric.name)?)))
        .collect();
    let names = samples
        .clone()
        .next()
        .map(|(_, first)| first.details.keys().copied().collect::<Vec<_>>());
    let details = names.unwrap_or_default().into_iter().filter_map(|name| {
        let all: Vec<f64> = samples
            .clone()
            .filter_map(|(_, sample)| sample.details.get(name).copied())
            .collect();
        Some((name, Summary::of(&all)?.median))
    });
    let stalled = samples.clone();
    let stalled = stalled
        .filter(|(_, sample)| sample.details.get("stalled") == Some(&1.0))
        .count();
    let mut failed = cells
        .filter_map(|cell| cell.outcome.as_ref().err())
        .peekable();
    let failure = failed.peek().map(|why| (*why).clone());
    Row {
        contender,
        summary: Summary::of(&values.iter().map(|(_, value)| *value).collect::<Vec<_>>()),
        values,
        ratio: None,
        details: details.collect(),
        stalled,
        failures: failed.count(),
        failure,
    }
}

fn ratios(values: &[(usize, f64)], reference: &[(usize, f64)]) -> Option<Summary> {
    let of = |(round, value): &(usize, f64)| {
        let (_, other) = reference.iter().find(|(other, _)| other == round)?;
        // Nothing is a multiple of nothing.
        (*other != 0.0).then(|| value / other)
    };
    Summary::of(&values.iter().filter_map(of).collect::<Vec<_>>())
}

#[cfg(test)]
#[path = "results_test.rs"]
mod tests;
