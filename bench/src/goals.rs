//! What slipgate sets out to reach. Goals are shown beside what was measured, and never asserted:
//! a loaded machine is no failure of the program's.

use serde::Serialize;

use crate::{contender::REFERENCE, results::Table, statistics::Summary};

const OURS: &str = "slipgate";

/// What is held against the goal.
#[derive(Clone, Copy)]
enum Measure {
    /// Our ratio to another contender.
    To(&'static str),
    /// Our own value.
    Own,
}

/// On which side of the goal we want to be.
#[derive(Clone, Copy)]
enum Side {
    AtLeast(f64),
    AtMost(f64),
}

const GOALS: [(&str, Measure, Side); 15] = [
    ("bulk-up", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    ("bulk-down", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    ("bulk-up", Measure::To("pasta"), Side::AtLeast(3.0)),
    ("bulk-down", Measure::To("pasta"), Side::AtLeast(3.0)),
    ("bulk-up", Measure::To("pasta-65520"), Side::AtLeast(3.0)),
    ("bulk-down", Measure::To("pasta-65520"), Side::AtLeast(3.0)),
    (
        "bulk-up",
        Measure::To("slirp4netns-65520"),
        Side::AtLeast(2.0),
    ),
    (
        "bulk-down",
        Measure::To("slirp4netns-65520"),
        Side::AtLeast(2.0),
    ),
    (
        "connect-close p50",
        Measure::To(REFERENCE),
        Side::AtMost(1.2),
    ),
    ("udp-64 rate", Measure::To(REFERENCE), Side::AtLeast(1.3)),
    ("udp-64 rate", Measure::To("forwarding"), Side::AtLeast(1.0)),
    ("new-flows-udp", Measure::Own, Side::AtLeast(120.0)),
    (
        "new-flows-udp per CPU second",
        Measure::Own,
        Side::AtLeast(120.0),
    ),
    (
        "new-flows-tcp per CPU second",
        Measure::Own,
        Side::AtLeast(120.0),
    ),
    ("new-flows-tcp", Measure::Own, Side::AtLeast(120.0)),
];

/// A goal and what came of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) wanted: String,
    pub(crate) measured: Summary,
    /// Whether the median is on the right side.
    pub(crate) met: bool,
}

/// The goals about which something was measured.
pub(crate) fn judge(tables: &[Table]) -> Vec<Goal> {
    GOALS
        .iter()
        .filter_map(|goal| judge_one(tables, *goal))
        .collect()
}

fn judge_one(tables: &[Table], (metric, measure, side): (&str, Measure, Side)) -> Option<Goal> {
    let table = tables.iter().find(|table| table.metric.name == metric)?;
    let (what, unit, measured) = match measure {
        Measure::To(other) => (
            format!("{metric} to {other}"),
            "×",
            table.ratio(OURS, other)?,
        ),
        Measure::Own => (
            metric.to_owned(),
            table.metric.unit.symbol(),
            table.row(OURS)?.summary?,
        ),
    };
    let (wanted, met) = match side {
        Side::AtLeast(least) => (format!("≥ {least} {unit}"), measured.median >= least),
        Side::AtMost(most) => (format!("≤ {most} {unit}"), measured.median <= most),
    };
    Some(Goal {
        what,
        wanted,
        measured,
        met,
    })
}
