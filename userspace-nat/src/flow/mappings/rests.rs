//! Mappings that have no flow: in the order in which their rests end, of all VMs and of each.
use std::collections::BTreeSet;

use slipgate_abi::VmId;

use super::{Inside, Pool};

/// The rests, one for each mapping without a flow.
#[derive(Debug, Default)]
pub(super) struct Rests {
    all: BTreeSet<(u64, Inside)>,
    own: BTreeSet<(VmId, Pool, u64, Inside)>,
}

impl Rests {
    pub(super) fn insert(&mut self, inside: Inside, ends_ns: u64) {
        self.all.insert((ends_ns, inside));
        self.own.insert((inside.vm, inside.pool(), ends_ns, inside));
    }

    pub(super) fn remove(&mut self, inside: &Inside, ends_ns: u64) {
        self.all.remove(&(ends_ns, *inside));
        let own = (inside.vm, inside.pool(), ends_ns, *inside);
        self.own.remove(&own);
    }

    /// Returns the mapping whose rest ends first, if that is over.
    pub(super) fn first_over(&self, now_ns: u64) -> Option<Inside> {
        let (ends_ns, inside) = self.all.first()?;
        (*ends_ns <= now_ns).then_some(*inside)
    }

    /// Returns a VM's resting mappings with a port of a pool, the oldest first.
    pub(super) fn of(&self, vm: VmId, pool: Pool) -> impl Iterator<Item = &Inside> {
        let first = (vm, pool, 0, Inside::first_of(VmId::new(0)));
        let own = self.own.range(first..);
        own.map_while(move |(of, at, _, inside)| ((*of, *at) == (vm, pool)).then_some(inside))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.all.len(), self.own.len());
        self.all.len()
    }
}
