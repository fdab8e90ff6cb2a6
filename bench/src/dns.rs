//! Questions answered a second: slipgate's resolver beside dnsmasq and unbound, all asking the same
//! upstream.
//!
//! The guest asks its gateway, through a TAP that the testbed pumps: slipgate answers there by
//! itself; dnsmasq and unbound run on the host, whose address the gateway is. Each keeps so many
//! questions on their way that it never waits for the client, and few enough that slipgate's bound
//! per VM (64) is not met.

mod contender;
mod workload;

use crate::{
    conditions::Conditions,
    machine::Pinning,
    results::{Cell, Row, Table},
    run::Plan,
    workload::Limits,
};
use std::time::Duration;

/// All ratios are to it.
const REFERENCE: &str = contender::DNSMASQ;

/// Measures; the cells and the tables of them.
pub(crate) fn measure(
    rounds: usize,
    limits: Limits,
    pinning: Pinning,
    budget: Duration,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let missing_before = conditions.missing.len();
    let plan = Plan {
        contenders: crate::present(contender::all(), conditions),
        workloads: workload::all(),
        rounds,
        limits,
        pinning,
        congestion_control: conditions.congestion_control.clone(),
        budget,
    };
    let cells = plan.run();
    let mut tables = plan.tables(REFERENCE, &cells);
    // A comparison with two of three says that it is one.
    for table in &mut tables {
        for (name, why) in &conditions.missing[missing_before..] {
            table.rows.push(Row::missing(name, why.clone()));
        }
    }
    (cells, tables)
}
