//! Guests without root: `slipgate exec` beside pasta and slirp4netns, each with the MTU of all and with
//! its largest.
//!
//! All make a TAP in the guest's namespace and read it themselves, so no stand-in for a VMM is in the
//! way. slipgate runs as a user without any privilege. A current passt is measured too where
//! `SLIPGATE_PASTA` names its `pasta`. Forwards are compared with a loop that splices between two
//! sockets, which is what a relay without a guest's link costs, and with rinetd.

mod contender;
mod echo;
mod exec_processes;
mod footprint;
mod forward;
pub(crate) mod splice_loop;
mod traffic;
mod udp;

use crate::{
    conditions::Conditions,
    results::{Cell, Table},
    run::{self, Settings},
    workload::Workload,
};

/// Contender that all ratios but those of forwards refer to.
const REFERENCE: &str = "pasta";

/// Parts that can be measured separately: of the first name all.
pub(crate) const PARTS: [&str; 4] = ["rootless", EXEC, FORWARD, VM];
/// `slipgate exec` and its peers.
pub(crate) const EXEC: &str = "rootless-exec";
/// Group of the contenders that forward a port to the guest.
pub(crate) const FORWARD: &str = "rootless-forward";
/// Whole machines: measured with the others ([`crate::microvm`]).
pub(crate) const VM: &str = "rootless-vm";

/// All workloads, in the order in which they are run.
pub(crate) fn workloads() -> Vec<Box<dyn Workload>> {
    let mut all = vec![footprint::of_a_fresh_process()];
    all.extend(traffic::all());
    all.extend(udp::all());
    all.push(footprint::after_traffic());
    all
}

/// Returns the workloads that pass a forwarded port.
pub(crate) fn forward_workloads() -> Vec<Box<dyn Workload>> {
    forward::all()
}

/// Measures all contenders. Returns the cells and their tables.
pub(crate) fn measure(settings: &Settings, conditions: &mut Conditions) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workloads());
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}

/// Measures forwards. Returns the cells and their tables.
pub(crate) fn measure_forwards(
    settings: &Settings,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::forwarding(), forward_workloads());
    run::compare(
        forward::REFERENCE,
        contenders,
        workloads,
        settings,
        conditions,
    )
}
