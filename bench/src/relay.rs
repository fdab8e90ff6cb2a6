//! A port of the host's loopback that is forwarded to the guest, for clients on the host:
//! slipgate's forward, which its engine relays, a loop that copies through the kernel's sockets,
//! and rinetd where it is installed. For the latter two the host routes to the guest.

mod contender;
mod copy_loop;
mod workload;

pub(crate) use workload::until_it_listens;

pub(crate) use self::contender::rinetd;

pub(crate) use self::copy_loop::as_copy_loop;
use crate::{
    conditions::Conditions,
    results::{Cell, Table},
    run::{self, Settings},
};

/// Contender that all ratios refer to.
const REFERENCE: &str = contender::COPY_LOOP;
/// Port to which the host's clients connect.
const PORT: u16 = 8080;
/// Port of the guest's service.
const GUEST_PORT: u16 = 80;

/// Measures all contenders. Returns the cells and their tables.
pub(crate) fn measure(settings: &Settings, conditions: &mut Conditions) -> (Vec<Cell>, Vec<Table>) {
    let (contenders, workloads) = (contender::all(), workload::all());
    run::compare(REFERENCE, contenders, workloads, settings, conditions)
}
