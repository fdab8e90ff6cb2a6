//! Who looks on at the port: `--pcap` and captures. While nobody does, a frame costs one test.
use std::time::SystemTime;

use super::{
    capture::Captures,
    core::Core,
    pcap::{PortDump, Way},
};
use crate::{datapath::Datapath, poll::Poller};

/// Those who do.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) dump: Option<PortDump>,
    pub(super) captures: Captures,
}

impl Watch {
    /// Whether anybody does.
    pub(super) fn is_on(&self) -> bool {
        self.dump.is_some() || !self.captures.is_empty()
    }

    /// A frame came over the port.
    pub(super) fn read<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        if let Some(dump) = &mut self.dump {
            dump.add(core, bytes, Way::Read, at);
        }
        if !self.captures.is_empty() {
            self.captures.read(core, bytes, at);
        }
    }

    /// A frame is written to it.
    pub(super) fn written<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        if let Some(dump) = &mut self.dump {
            dump.add(core, bytes, Way::Written, at);
        }
        if !self.captures.is_empty() {
            self.captures.written(core, bytes, at);
        }
    }

    /// At the end of a turn: what was taken is written.
    pub(super) fn work<D: Datapath>(
        &mut self,
        core: &mut Core<D>,
        poller: &Poller,
        now_ns: u64,
        wall: SystemTime,
    ) {
        if let Some(dump) = &mut self.dump {
            dump.flush();
        }
        self.captures.work(core, poller, now_ns, wall);
    }
}
