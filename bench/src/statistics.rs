//! Medians, percentiles and spread of a few numbers.

use serde::{Deserialize, Serialize};

/// Summary of repeated measurements of one value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Number of measured values.
    pub(crate) count: usize,
}

impl Summary {
    /// Summarises the values; `None` if there are none.
    pub(crate) fn of(values: &[f64]) -> Option<Summary> {
        if values.is_empty() {
            return None;
        }
        Some(Summary {
            median: percentile(values, 50.0),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            count: values.len(),
        })
    }
}

/// Returns the value below which `percent` of the values lie, interpolated linearly; NaN if there
/// are none.
pub(crate) fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = last as f64 * percent / 100.0;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
#[path = "statistics_test.rs"]
mod tests;
