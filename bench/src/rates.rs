//! One TCP stream through a VM's rate of 100 Mb/s: its share, and the round trip of the same VM's
//! datagrams meanwhile. slipgate's shaping, its policing (as where the kernel can't shape), and a host
//! that forwards and has HTB of the same rate at both devices.

mod contender;
pub(crate) mod workload;

use crate::{
    conditions::Conditions,
    family::Families,
    results::{Cell, Table},
    run::{self, Settings},
};

/// Contender that all ratios refer to.
const REFERENCE: &str = contender::HTB;
/// The rate, L3 bytes per second.
const BYTES_PER_SECOND: u32 = 12_500_000;

/// Measures all contenders by these families. Returns the cells and their tables.
pub(crate) fn measure(
    settings: &Settings,
    families: Families,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workload::all(families));
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}
