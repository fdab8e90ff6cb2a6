//! Observers of the port: `--pcap`, and captures of flows. Without an observer a frame costs one
//! test.
use std::time::SystemTime;

use crate::{
    clock::Clock,
    datapath::Datapath,
    poll::Poller,
    state::{Core, Nat, VmTable},
};

pub(crate) mod capture;
mod pcap;
pub mod pcapng;

use self::capture::Captures;
pub(crate) use self::pcap::{Direction, PortDump};
pub use capture::{CaptureRequest, MOST_CAPTURES, NotCaptured};

/// The observers of the port.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(crate) dump: Option<PortDump>,
    pub(crate) captures: Captures,
}

impl Watch {
    /// Whether there is an observer.
    pub(crate) fn is_on(&self) -> bool {
        self.dump.is_some() || !self.captures.is_empty()
    }

    /// Observes a frame that was read from the port, or is written to it.
    #[inline]
    pub(crate) fn passed<D: Datapath>(
        &mut self,
        core: &Core<D>,
        clock: &impl Clock,
        bytes: &[u8],
        direction: Direction,
    ) {
        if self.is_on() {
            self.observe(core, bytes, direction, clock.wall());
        }
    }

    #[cold]
    fn observe<D: Datapath>(
        &mut self,
        core: &Core<D>,
        bytes: &[u8],
        direction: Direction,
        at: SystemTime,
    ) {
        let Core { nat, vms, .. } = core;
        if let Some(dump) = &mut self.dump {
            dump.add(nat, vms, bytes, direction, at);
        }
        if !self.captures.is_empty() {
            match direction {
                Direction::Read => self.captures.read(&nat.flows, vms, bytes, at),
                Direction::Written => self.captures.written(&nat.flows, vms, bytes, at),
            }
        }
    }

    /// Writes the observed frames, at the end of a turn.
    pub(crate) fn work<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        now_ns: u64,
        wall: SystemTime,
    ) {
        if let Some(dump) = &mut self.dump {
            dump.flush();
        }
        self.captures.work(nat, vms, poller, now_ns, wall);
    }
}
