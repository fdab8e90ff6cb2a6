//! Uplinks that VMs name for themselves, or by their policies.
//!
//! A VM's flows leave by its own uplink or not at all: while that device does not exist, the engine
//! is told so, and refuses new flows. When it comes, possibly again and with another index, it is
//! attached to, and the engine is told the VMs that name it. Programs stay attached to a device that
//! no VM names any more, until nothing of slipgate is left: they let pass what is no flow's, and
//! another process's flows may use them.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;
use slipgate_abi::IfIndex;
use slipgate_ipc::engine::VmSpec;

use super::{Attached, ServedVm};

/// Present devices that VMs name as their own uplinks, with their programs attached.
#[derive(Debug, Default)]
pub(crate) struct VmUplinks {
    /// All that VMs and policies name.
    named: BTreeSet<String>,
    attached: BTreeMap<String, IfIndex>,
}

impl VmUplinks {
    /// Whether VMs or policies name this device.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.named.contains(name)
    }

    /// Returns the names of those that are present.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.attached.keys().map(String::as_str)
    }

    /// Returns their interface indexes.
    pub(crate) fn ifindexes(&self) -> BTreeSet<IfIndex> {
        self.attached.values().copied().collect()
    }
}

impl Attached {
    /// Checks a device against others' use of it, if it exists. `tap`: the TAP of the VM that names it.
    ///
    /// # Errors
    /// It leads nowhere, or is the TAP of a VM.
    pub(crate) fn check_vm_uplink(&self, name: &str) -> anyhow::Result<()> {
        let link = self.watch.network().link_by_name(name);
        let is_tap = self.vms.on_tap(name).is_some()
            || link.is_some_and(|link| self.is_served(link.ifindex));
        if is_tap {
            bail!("uplink {name}: it is the TAP of a VM: give the device that leads to the world");
        }
        if link.is_some_and(|link| link.loopback) {
            bail!(
                "uplink {name}: it is the loopback device, which leads nowhere: give the device \
                 that leads to the world"
            );
        }
        Ok(())
    }

    /// Attaches to the uplinks that VMs name, those that exist, and forgets the others. Returns the
    /// names of those that changed. One that can't be attached to is as if it did not exist, and
    /// tried again every few seconds.
    pub(crate) fn follow_vm_uplinks(&mut self) -> BTreeSet<String> {
        let mut present = BTreeMap::new();
        self.vm_uplinks.named = self.named_uplinks();
        self.vm_uplinks.named.extend(self.domain_devices());
        for name in &self.vm_uplinks.named {
            let Some(link) = self.watch.network().link_by_name(name) else {
                continue;
            };
            let attached = match self.vm_uplinks.attached.get(name) {
                Some(ifindex) if *ifindex == link.ifindex => Ok(()),
                _ => self
                    .check_vm_uplink(name)
                    .and_then(|()| self.attach_to(name, link.ifindex, link.has_l2)),
            };
            match attached {
                Ok(()) => drop(present.insert(name.clone(), link.ifindex)),
                Err(e) => tracing::warn!("{e:#}: the VMs that name it can't leave by it"),
            }
        }
        let before = std::mem::replace(&mut self.vm_uplinks.attached, present);
        let now = &self.vm_uplinks.attached;
        let names = before.keys().chain(now.keys());
        let changed = names.filter(|name| before.get(*name) != now.get(*name));
        changed.cloned().collect()
    }

    /// Whether an uplink that VMs name exists and could not be attached to when it came.
    pub(crate) fn misses_vm_uplinks(&self) -> bool {
        let links = self.watch.network();
        let mut names = self.vm_uplinks.named.iter();
        names.any(|name| {
            links.link_by_name(name).is_some() && !self.vm_uplinks.attached.contains_key(name)
        })
    }

    /// Returns the VMs that name one of these uplinks, for the engines, each with its worker.
    pub(crate) fn vms_by_uplinks(&self, names: &BTreeSet<String>) -> Vec<(usize, VmSpec)> {
        let is_meant = |vm: &&ServedVm| {
            let uplink = self.uplink_named_by(&vm.config);
            vm.is_up && uplink.is_some_and(|uplink| names.contains(uplink))
        };
        let vms = self.vms.iter().filter(is_meant);
        vms.map(|vm| (vm.worker, self.vm_spec(vm))).collect()
    }

    /// Returns the uplink that a VM names for itself, [`IfIndex::NONE`] if it does not exist.
    pub(super) fn own_uplink(&self, vm: &ServedVm) -> Option<IfIndex> {
        let name = self.uplink_named_by(&vm.config)?;
        let attached = self.vm_uplinks.attached.get(name);
        Some(attached.copied().unwrap_or(IfIndex::NONE))
    }

    /// Whether the uplink that a VM names for itself does not exist.
    pub(super) fn lacks_uplink(&self, vm: &ServedVm) -> bool {
        self.own_uplink(vm) == Some(IfIndex::NONE)
    }
}
