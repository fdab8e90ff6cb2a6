//! Resolution of a request's subject: from names and ids of clients to rows and slots of the maps.
use std::sync::atomic::Ordering::Acquire;

use slipgate_abi::{SlotIndex, Verdict, VmRow};
use slipgate_control::maps::SharedMaps;
use slipgate_ipc::{
    client::{ClientAnswer, Target},
    engine::{EngineReply, Scope, Subject},
};
use slipgate_model::{FlowId, TranslatedId};

use super::Attached;

impl Attached {
    /// Returns the row of a VM that is served here.
    pub(crate) fn row_of(&self, name: &str) -> Option<VmRow> {
        let at = self.index_of(name)?;
        Some(self.vms[at].open.row)
    }

    /// Returns the answer to a request for a VM that is not served here.
    pub(crate) fn unknown_vm(&self) -> ClientAnswer {
        let served = self.vms.iter().map(|vm| vm.config.name.clone()).collect();
        ClientAnswer::UnknownVm { served }
    }

    /// Resolves the target of a request to the engine's terms; returns the answer for the client if
    /// the target is not here.
    pub(crate) fn resolve(
        &self,
        scope: Scope,
        about: Option<Target>,
    ) -> Result<Option<Subject>, Box<ClientAnswer>> {
        resolve(
            scope,
            about,
            &Served {
                maps: self.datapath.maps(),
                is_own_row: &|row| self.worker_of_row(row).is_some(),
                row_of: &|name| self.row_of(name),
                unknown_vm: &|| self.unknown_vm(),
            },
        )
    }

    fn worker_of_slot(&self, slot: SlotIndex) -> Option<usize> {
        let row = self.datapath.maps().chunk_owner(slot.chunk())?;
        self.worker_of_row(row)
    }

    /// Returns the worker that a subject belongs to.
    pub(crate) fn worker_of(&self, subject: Subject) -> Option<usize> {
        match subject {
            Subject::Vm { row } => self.vms.in_row(row).map(|at| self.vms[at].worker),
            Subject::Flow { slot, .. } => self.worker_of_slot(slot),
            Subject::Relayed(id) => self.worker_of_row(id.owner_row()),
        }
    }

    /// Logs VMs that were frozen or asleep under a predecessor, and still are.
    pub(crate) fn warn_of_paused(&self) {
        let maps = self.datapath.maps();
        for vm in self.vms.iter() {
            if maps.is_frozen(vm.open.row) {
                let name = &vm.config.name;
                tracing::warn!(
                    "{name} is frozen, as it was left: nothing passes until `slipgate thaw {name}`"
                );
            } else if maps.is_asleep(vm.open.row) {
                let name = &vm.config.name;
                tracing::info!(
                    "{name} sleeps, as it was left: packets for it are held until \
                     `slipgate resume {name}`"
                );
            }
        }
    }
}

/// VMs and maps of a broker, in which a request's target is looked up.
pub(crate) struct Served<'s> {
    pub(crate) maps: &'s SharedMaps,
    /// Whether a row of `OWNERS` is the broker's.
    pub(crate) is_own_row: &'s dyn Fn(u32) -> bool,
    /// Finds the row of a VM by its name.
    pub(crate) row_of: &'s dyn Fn(&str) -> Option<VmRow>,
    /// Makes the answer for a VM that is not served.
    pub(crate) unknown_vm: &'s dyn Fn() -> ClientAnswer,
}

/// Resolves the target of a request to the engine's terms; returns the answer for the client if the
/// target is not served.
pub(crate) fn resolve(
    scope: Scope,
    about: Option<Target>,
    served: &Served<'_>,
) -> Result<Option<Subject>, Box<ClientAnswer>> {
    let refused = |why| Err(Box::new(ClientAnswer::error(why)));
    match (scope, about) {
        (Scope::Engine, None) => Ok(None),
        (Scope::Vm | Scope::Flows, Some(Target::Vm(name))) => {
            let row = (served.row_of)(&name);
            let row = row.ok_or_else(|| Box::new((served.unknown_vm)()))?;
            Ok(Some(Subject::Vm { row }))
        }
        (Scope::Flows, Some(Target::Flow(id))) => {
            let subject = match FlowId::parse(&id) {
                // Whose relayed flow it is only its engine knows.
                Some(FlowId::Relayed(id)) => Some(Subject::Relayed(id)),
                Some(FlowId::Translated(id)) => served.flow(id),
                None => None,
            };
            let reply = EngineReply::UnknownFlow;
            subject.map(Some).ok_or_else(|| Box::new(reply.into()))
        }
        (Scope::Engine, Some(_)) => refused("that is asked of no VM, and of no flow"),
        (Scope::Vm, _) => refused("that is asked of a VM"),
        (Scope::Flows, None) => refused("that is asked of a VM or a flow"),
    }
}

impl Served<'_> {
    fn flow(&self, id: TranslatedId) -> Option<Subject> {
        let maps = self.maps;
        let slot = maps.slot(id.slot)?;
        if slot.verdict().load(Acquire) == Verdict::Free as u32 {
            return None;
        }
        let (slot, generation) = (id.slot, slot.generation().load(Acquire));
        let owner = maps.chunk_owner(slot.chunk());
        let is_it = id.instance == maps.instance()
            && id.generation == generation
            && owner.is_some_and(|row| (self.is_own_row)(row));
        is_it.then_some(Subject::Flow { slot, generation })
    }
}
