//! DNS questions answered per second, by slipgate's resolver, dnsmasq and unbound, all with the
//! same upstream resolver.
//!
//! The guest sends questions to its gateway, through a TAP that the testbed pumps. slipgate answers
//! there itself; dnsmasq and unbound run on the host, which has the gateway's address. The number
//! of questions in flight is high enough that no resolver waits for the client, and below
//! slipgate's limit per VM (64).

mod contender;
mod workload;

use crate::{
    conditions::Conditions,
    results::{Cell, Table},
    run::{self, Settings},
};

/// Contender that all ratios refer to.
const REFERENCE: &str = contender::DNSMASQ;

/// Measures all contenders. Returns the cells and their tables.
pub(crate) fn measure(settings: &Settings, conditions: &mut Conditions) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workload::all());
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}
