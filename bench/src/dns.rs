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
    results::{Cell, Table},
    run::{self, Settings},
};

/// Contender that all ratios refer to.
const REFERENCE: &str = contender::DNSMASQ;

/// Measures; the cells and the tables of them.
pub(crate) fn measure(settings: &Settings, conditions: &mut Conditions) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workload::all());
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}
