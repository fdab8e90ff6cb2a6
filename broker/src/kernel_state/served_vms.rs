//! The served VMs, found by name, by TAP and by row in the same time however many there are.
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::{Deref, DerefMut},
};

use slipgate_abi::{VmId, VmRow};

use super::ServedVm;
use crate::config::VmConfig;

/// The served VMs, in an order of their own. Name, TAP, row, uplink and policy of one change
/// by [`ServedVms::replace`] and [`ServedVms::configure`] only.
#[derive(Debug, Default)]
pub(crate) struct ServedVms {
    vms: Vec<ServedVm>,
    by_name: HashMap<String, usize>,
    by_tap: HashMap<String, usize>,
    by_row: HashMap<VmRow, usize>,
    by_id: HashMap<VmId, usize>,
    /// Number of VMs of each worker.
    by_worker: HashMap<usize, usize>,
    /// Number of VMs with each uplink of their own.
    by_uplink: BTreeMap<String, usize>,
    /// VMs by the name of their policy, whether it is in force or they are learning another.
    by_policy: HashMap<Option<String>, HashSet<usize>>,
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

    /// Returns the index of the VM with this id.
    pub(crate) fn with_id(&self, id: VmId) -> Option<usize> {
        self.by_id.get(&id).copied()
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

    /// Returns the indexes of the VMs with a policy.
    pub(crate) fn with_policy(&self, name: &Option<String>) -> impl Iterator<Item = usize> {
        self.by_policy.get(name).into_iter().flatten().copied()
    }

    /// Gives a VM another configuration, of the same name.
    pub(crate) fn configure(&mut self, at: usize, config: VmConfig) {
        self.forget(at);
        self.vms[at].config = config;
        self.enter(at);
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
        self.by_id.insert(vm.open.id, at);
        *self.by_worker.entry(vm.worker).or_default() += 1;
        let policy = vm.config.policy.clone();
        self.by_policy.entry(policy).or_default().insert(at);
        if let Some(uplink) = &vm.config.uplink {
            *self.by_uplink.entry(uplink.clone()).or_default() += 1;
        }
    }

    fn forget(&mut self, at: usize) {
        let vm = &self.vms[at];
        self.by_name.remove(&vm.config.name);
        self.by_tap.remove(&vm.config.tap);
        self.by_row.remove(&vm.open.row);
        self.by_id.remove(&vm.open.id);
        if let Some(all) = self.by_policy.get_mut(&vm.config.policy) {
            all.remove(&at);
            if all.is_empty() {
                self.by_policy.remove(&vm.config.policy);
            }
        }
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
