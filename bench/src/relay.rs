//! A port of the host's loopback that leads into the guest, for the host's own clients: slipgate's
//! forward, which its engine relays, beside a loop that copies through the kernel's sockets, and
//! rinetd where it is installed. For these two the host routes to the guest.

mod contender;
mod copy_loop;
mod workload;

pub(crate) use self::copy_loop::as_copy_loop;
use crate::{
    conditions::Conditions,
    results::{Cell, Table},
    run::{self, Settings},
};

/// Contender that all ratios refer to.
const REFERENCE: &str = contender::COPY_LOOP;
/// Where the host's clients connect to.
const PORT: u16 = 8080;
/// Where the guest serves.
const GUEST_PORT: u16 = 80;

/// Measures; the cells and the tables of them.
pub(crate) fn measure(settings: &Settings, conditions: &mut Conditions) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workload::all());
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}
