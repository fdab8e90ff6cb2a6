//! How many ports are open, of each VM, and which are to be closed.
//!
//! Half of `FORWARDS` is left to forwards. The other half is divided among the processes, and of a
//! process's part a quarter is kept for VMs that have few ports open.
use std::collections::BTreeMap;

use hashbrown::HashMap;
use slipgate_abi::{VmId, maps::MAX_FORWARDS};

use super::{Closed, Pool, decrement};
use crate::quota::Reserve;

/// Most mappings of all processes that are open at once.
const MOST_OPEN: usize = MAX_FORWARDS as usize / 2;

/// The books of the open ports.
#[derive(Debug)]
pub(super) struct OpenPorts {
    /// Most ports of this process.
    most: usize,
    reserve: Reserve,
    all: usize,
    of: HashMap<VmId, usize, foldhash::fast::RandomState>,
    /// Ports of mappings that are gone and were open.
    closed: BTreeMap<(Pool, u16), VmId>,
}

impl OpenPorts {
    pub(super) fn new() -> Self {
        Self {
            most: MOST_OPEN,
            reserve: Reserve::new(MOST_OPEN, 1),
            all: 0,
            of: HashMap::default(),
            closed: BTreeMap::new(),
        }
    }

    pub(super) fn share_among(&mut self, processes: usize, vms: usize) {
        self.most = MOST_OPEN / processes.max(1);
        self.reserve = Reserve::new(self.most, vms);
    }

    /// Whether a VM may have another port open.
    pub(super) fn may_open(&self, vm: VmId) -> bool {
        let free = self.most.saturating_sub(self.all);
        let held = || self.of.get(&vm).copied().unwrap_or(0);
        free > 0 && self.reserve.allows(free, held)
    }

    /// Returns how many ports a VM has open.
    pub(super) fn count(&self, vm: VmId) -> usize {
        self.of.get(&vm).copied().unwrap_or(0)
    }

    pub(super) fn opened(&mut self, vm: VmId) {
        self.all += 1;
        *self.of.entry(vm).or_default() += 1;
    }

    pub(super) fn closed(&mut self, vm: VmId) {
        self.all -= 1;
        decrement(&mut self.of, vm);
    }

    /// Notes that a mapping is gone whose port was open.
    pub(super) fn gone(&mut self, closed: Closed) {
        self.closed(closed.vm);
        self.closed.insert((closed.pool, closed.port), closed.vm);
    }

    pub(super) fn has_gone(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Takes a port that is to be closed.
    pub(super) fn take_gone(&mut self) -> Option<Closed> {
        let ((pool, port), vm) = self.closed.pop_first()?;
        Some(Closed { vm, pool, port })
    }

    /// Takes this port, if it is to be closed.
    pub(super) fn take_gone_at(&mut self, pool: Pool, port: u16) -> Option<Closed> {
        let vm = self.closed.remove(&(pool, port))?;
        Some(Closed { vm, pool, port })
    }
}
