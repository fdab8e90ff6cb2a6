//! Mappings that may have to be opened or closed, in order; each is listed once.
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    ops::Bound,
};

use slipgate_abi::VmId;

use super::{Inside, Mapping};

/// Queue of mappings to look at, each of them once, with the VMs of which all are.
#[derive(Debug, Default)]
pub(super) struct Changes {
    order: VecDeque<Inside>,
    listed: HashSet<Inside>,
    /// VMs of which each mapping is to be looked at, with the last one that was.
    vms: BTreeMap<VmId, Inside>,
}

impl Changes {
    pub(super) fn insert(&mut self, inside: Inside) {
        if self.listed.insert(inside) {
            self.order.push_back(inside);
        }
    }

    /// Has each mapping of a VM looked at.
    pub(super) fn insert_all_of(&mut self, vm: VmId) {
        self.vms.insert(vm, Inside::first_of(vm));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty() && self.vms.is_empty()
    }

    /// Takes at most so many.
    pub(super) fn take(&mut self, most: usize, all: &BTreeMap<Inside, Mapping>) -> Vec<Inside> {
        let mut taken: Vec<_> = self.order.drain(..most.min(self.order.len())).collect();
        for inside in &taken {
            self.listed.remove(inside);
        }
        while taken.len() < most
            && let Some((vm, last)) = self.vms.pop_first()
        {
            let behind = all.range((Bound::Excluded(last), Bound::Unbounded));
            let own = behind.map_while(|(inside, _)| (inside.vm == vm).then_some(*inside));
            taken.extend(own.take(most - taken.len()));
            if taken.len() == most
                && let Some(last) = taken.last()
            {
                self.vms.insert(vm, *last);
            }
        }
        taken
    }
}
