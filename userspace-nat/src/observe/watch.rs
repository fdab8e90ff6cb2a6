//! Who looks on at the port: `--pcap` and captures. While nobody does, a frame costs one test.
use std::time::SystemTime;

use crate::{
    datapath::Datapath,
    observe::{
        capture::Captures,
        pcap::{PortDump, Way},
    },
    poll::Poller,
    state::Core,
};

/// Those who do.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(crate) dump: Option<PortDump>,
    pub(crate) captures: Captures,
}

impl Watch {
    /// Whether anybody does.
    pub(crate) fn is_on(&self) -> bool {
        self.dump.is_some() || !self.captures.is_empty()
    }

    /// A frame came over the port.
    pub(crate) fn read<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        if let Some(dump) = &mut self.dump {
            dump.add(core, bytes, Way::Read, at);
        }
        if !self.captures.is_empty() {
            self.captures.read(core, bytes, at);
        }
    }

    /// A frame is written to it.
    pub(crate) fn written<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        if let Some(dump) = &mut self.dump {
            dump.add(core, bytes, Way::Written, at);
        }
        if !self.captures.is_empty() {
            self.captures.written(core, bytes, at);
        }
    }

    /// At the end of a turn: what was taken is written.
    pub(crate) fn work<D: Datapath>(
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
