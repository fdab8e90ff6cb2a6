//! The served VMs, found by name, by TAP and by row in the same time however many there are.
use std::{
    collections::{BTreeMap, HashMap},
    ops::{Deref, DerefMut},
};

use slipgate_abi::VmRow;

use super::ServedVm;

/// The served VMs, in an order of their own. Name, TAP, row and uplink of one change by
/// [`ServedVms::replace`] only.
#[derive(Debug, Default)]
pub(crate) struct ServedVms {
    vms: Vec<ServedVm>,
    by_name: HashMap<String, usize>,
    by_tap: HashMap<String, usize>,
    by_row: HashMap<VmRow, usize>,
    /// Number of VMs of each worker.
    by_worker: HashMap<usize, usize>,
    /// Number of VMs with each uplink of their own.
    by_uplink: BTreeMap<String, usize>,
}

impl ServedVms {
    /// Returns the index of the VM of this name.
    pub(crate) fn named(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns the index of the VM whose TAP has this name.
    pub(crate) fn on_tap(&self, tap: &str) -> Option<usize> {
        self.by_tap.get(tap).copied()
    }

    /// Returns the index of the VM in this row.
    pub(crate) fn in_row(&self, row: VmRow) -> Option<usize> {
        self.by_row.get(&row).copied()
    }

    /// Returns how many VMs a worker has.
    pub(crate) fn of_worker(&self, worker: usize) -> usize {
        self.by_worker.get(&worker).copied().unwrap_or_default()
    }

    /// Returns the uplinks that VMs name for themselves.
    pub(crate) fn uplinks(&self) -> impl Iterator<Item = &str> {
        self.by_uplink.keys().map(String::as_str)
    }

    /// Whether a VM names this uplink for itself.
    pub(crate) fn has_uplink(&self, name: &str) -> bool {
        self.by_uplink.contains_key(name)
    }

    /// Adds a VM at the end.
    pub(crate) fn push(&mut self, vm: ServedVm) {
        self.vms.push(vm);
        self.enter(self.vms.len() - 1);
    }

    /// Puts a VM in the place of another.
    pub(crate) fn replace(&mut self, at: usize, vm: ServedVm) {
        self.forget(at);
        self.vms[at] = vm;
        self.enter(at);
    }

    /// Removes a VM. The last one takes its place.
    pub(crate) fn swap_remove(&mut self, at: usize) -> ServedVm {
        self.forget(at);
        let last = self.vms.len() - 1;
        if last != at {
            self.forget(last);
        }
        let gone = self.vms.swap_remove(at);
        if last != at {
            self.enter(at);
        }
        gone
    }

    fn enter(&mut self, at: usize) {
        let vm = &self.vms[at];
        self.by_name.insert(vm.config.name.clone(), at);
        self.by_tap.insert(vm.config.tap.clone(), at);
        self.by_row.insert(vm.open.row, at);
        *self.by_worker.entry(vm.worker).or_default() += 1;
        if let Some(uplink) = &vm.config.uplink {
            *self.by_uplink.entry(uplink.clone()).or_default() += 1;
        }
    }

    fn forget(&mut self, at: usize) {
        let vm = &self.vms[at];
        self.by_name.remove(&vm.config.name);
        self.by_tap.remove(&vm.config.tap);
        self.by_row.remove(&vm.open.row);
        if let Some(count) = self.by_worker.get_mut(&vm.worker) {
            *count -= 1;
        }
        if let Some(uplink) = &vm.config.uplink
            && let Some(count) = self.by_uplink.get_mut(uplink)
        {
            *count -= 1;
            if *count == 0 {
                self.by_uplink.remove(uplink);
            }
        }
    }
}

impl Deref for ServedVms {
    type Target = [ServedVm];

    fn deref(&self) -> &[ServedVm] {
        &self.vms
    }
}

impl DerefMut for ServedVms {
    fn deref_mut(&mut self) -> &mut [ServedVm] {
        &mut self.vms
    }
}

#[cfg(test)]
#[path = "served_vms_test.rs"]
mod tests;
