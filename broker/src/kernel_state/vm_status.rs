//! A daemon's VMs as clients see them, and as a successor finds them.
use std::collections::HashMap;

use slipgate_abi::Protocol;
use slipgate_ipc::{
    api::Event,
    client::{Filled, Room, VmState, VmStatus},
    engine::{SleepChange, VmId},
};
use slipgate_model::{Knock, Silence};

use super::{Attached, ServedVm};
use crate::persisted_vms;

impl Attached {
    /// Returns how many VMs and rules there are, and how many there can be.
    pub(crate) fn room(&self) -> Room {
        let sizes = self.datapath.maps().sizes();
        Room {
            vms: Filled {
                used: u32::try_from(self.vms.len()).unwrap_or(u32::MAX),
                most: sizes.vms,
            },
            rules: Filled {
                used: self.policies.rules_in_force(),
                most: sizes.rules,
            },
        }
    }

    /// Keeps a VM's definition for a successor.
    pub(crate) fn keep_vm(&self, vm: &ServedVm) {
        let run_dir = &self.datapath.paths().run_dir;
        let definition = vm.config.definition();
        if let Err(e) = persisted_vms::keep(run_dir, &definition) {
            tracing::warn!("a successor would not serve {}: {e:#}", definition.name);
        }
    }

    /// A VM with its present state.
    pub(crate) fn vm_status(&self, vm: &ServedVm) -> VmStatus {
        let state = match vm.tap_ifindex {
            _ if !vm.is_up => VmState::Starting,
            // Its VMM may have closed the TAP meanwhile.
            _ if self.datapath.maps().is_asleep(vm.open.row) => VmState::Asleep,
            None => VmState::Waiting,
            Some(_) if self.datapath.maps().is_frozen(vm.open.row) => VmState::Frozen,
            Some(_) => VmState::Served,
        };
        VmStatus {
            definition: vm.config.definition(),
            id: vm.open.id,
            worker: vm.worker as u32,
            generation: vm.generation,
            state,
            idle: vm.is_idle,
            lacks_uplink: self.lacks_uplink(vm),
            guest_ipv6: self.ipv6_status(vm),
            unserved_forwards: self.unserved_forwards(vm),
        }
    }

    /// The engine of a worker has found that VMs of its, by id, are idle, or are not any more.
    pub(crate) fn note_activity(
        &mut self,
        worker: usize,
        changes: Vec<(VmId, Silence)>,
        is_idle: bool,
    ) {
        let changes: HashMap<VmId, Silence> = changes.into_iter().collect();
        for vm in self.vms.iter_mut().filter(|vm| vm.worker == worker) {
            let Some(silence) = changes.get(&vm.open.id).copied() else {
                continue;
            };
            if std::mem::replace(&mut vm.is_idle, is_idle) == is_idle {
                continue;
            }
            let vm = vm.config.name.clone();
            self.events.push(match is_idle {
                true => Event::VmIdle { vm, silence },
                false => Event::VmBusy { vm, silence },
            });
        }
    }

    /// The engine of a worker says what became of VMs that sleep.
    pub(crate) fn note_sleep(&mut self, worker: usize, changes: Vec<(VmId, SleepChange)>) {
        for (id, change) in changes {
            let mut of_worker = self.vms.iter().filter(|vm| vm.worker == worker);
            let Some(vm) = of_worker.find(|vm| vm.open.id == id) else {
                continue;
            };
            let vm = vm.config.name.clone();
            self.events.push(match change {
                SleepChange::Asleep => Event::VmAsleep { vm },
                SleepChange::Awake => Event::VmAwake { vm },
                SleepChange::Knock(Knock { protocol, from, to }) => {
                    let proto = Protocol::from_number(protocol).map_or("other", Protocol::name);
                    let proto = proto.to_owned();
                    Event::Wake {
                        vm,
                        proto,
                        from,
                        to,
                    }
                }
            });
        }
    }

    /// All VMs with their states, by name.
    pub(crate) fn vm_list(&self) -> Vec<VmStatus> {
        let mut vms: Vec<_> = self.vms.iter().map(|vm| self.vm_status(vm)).collect();
        vms.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
        vms
    }
}
