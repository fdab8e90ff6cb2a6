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
    conditions::{Conditions, Pinning},
    results::{self, Table},
    run::{Cell, Plan},
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
    let plan = Plan {
        contenders: crate::present(contender::all(), conditions),
        workloads: workload::all(),
        rounds,
        limits,
        pinning,
        budget,
    };
    let cells = plan.run();
    let names: Vec<_> = plan.contenders.iter().map(|c| c.name()).collect();
    let workloads: Vec<_> = plan.workloads.iter().map(|w| w.measured()).collect();
    let tables = results::tables(&workloads, &names, REFERENCE, &cells);
    (cells, tables)
}
