//! Reads an earlier run from its JSON file, and makes its tables and plot again.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{conditions::Conditions, plot, report, results::Table};

/// Parts of the results file from which tables and plot are made.
#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'static"))]
struct Recorded {
    conditions: Conditions,
    tables: Vec<Table>,
}

/// Draws the plot next to the file, and returns the tables as text.
pub(crate) fn show(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    // Names are static where they are measured, and live as long where they are read.
    let text: &'static str = Box::leak(text.into_boxed_str());
    let recorded: Recorded = serde_json::from_str(text)
        .with_context(|| format!("{} is no report of this program's", file.display()))?;
    let plot = file.with_extension("svg");
    plot::draw(&recorded.conditions, &recorded.tables, &plot)
        .with_context(|| format!("draw {}", plot.display()))?;
    let tables = report::tables(&recorded.conditions, &recorded.tables);
    Ok(format!("{tables}\nplot  {}\n", plot.display()))
}

#[cfg(test)]
#[path = "recorded_test.rs"]
mod tests;
