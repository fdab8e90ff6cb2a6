//! The parts of the broker that requests and changes work with.
use std::collections::BTreeSet;

use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, ControlServer, VmChange},
    engine::ToEngine,
};

use crate::{kernel_state::Attached, process::Engines};

/// The kernel state, the engine processes and the control socket.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) attached: Attached,
    pub(crate) engines: Engines,
    pub(crate) control: ControlServer,
    /// Number of the last request to another process.
    last_id: u64,
}

impl Parts {
    pub(crate) fn new(attached: Attached, engines: Engines, control: ControlServer) -> Self {
        Self {
            attached,
            engines,
            control,
            last_id: 0,
        }
    }

    /// Returns the number of the next request to another process.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Tells the engines the host's network if it differs from what they were told.
    pub(crate) fn tell_network(&mut self) -> anyhow::Result<()> {
        let attached = &mut self.attached;
        let view = attached.network_view();
        if attached.told_network.as_ref() == Some(&view) {
            return Ok(());
        }
        attached.policies.set_local(&view.local);
        attached.told_network = Some(view.clone());
        self.engines.send_all(|| ToEngine::Network(view.clone()))
    }

    /// Attaches to the uplinks that VMs name for themselves, and tells the engines what is new.
    pub(crate) fn follow_vm_uplinks(&mut self) -> anyhow::Result<()> {
        let changed = self.attached.follow_vm_uplinks();
        if changed.is_empty() {
            return Ok(());
        }
        self.tell_network()?;
        self.tell_vms_by_uplinks(&changed)?;
        self.attached.refresh_next_hops()
    }

    /// Tells the engines the VMs that name one of these uplinks.
    pub(crate) fn tell_vms_by_uplinks(&mut self, names: &BTreeSet<String>) -> anyhow::Result<()> {
        let vms = self.attached.vms_by_uplinks(names).into_iter();
        let mut vms = vms.map(|(worker, vm)| (worker, ToEngine::Vm(vm)));
        vms.try_for_each(|(worker, vm)| self.engines.send(worker, vm))
    }

    /// Tells the engines the VMs that have IPv6 now, having waited for it.
    pub(crate) fn follow_ipv6(&mut self) -> anyhow::Result<()> {
        let vms = self.attached.follow_ipv6().into_iter();
        let mut vms = vms.map(|(worker, vm)| (worker, ToEngine::Vm(vm)));
        vms.try_for_each(|(worker, vm)| self.engines.send(worker, vm))
    }

    /// Refuses a client's request with a reason.
    pub(crate) fn refuse(&mut self, client: ClientId, why: impl Into<String>) {
        self.control.answer(client, &ClientAnswer::error(why));
    }

    /// Answers with the present state of a VM.
    pub(crate) fn answer_vm(&mut self, client: ClientId, at: usize, change: VmChange) {
        let vm = Box::new(self.attached.vm_status(&self.attached.vms[at]));
        if change == VmChange::Changed {
            let vm = vm.definition.name.clone();
            self.attached.events.push(Event::VmChanged { vm });
        }
        self.control
            .answer(client, &ClientAnswer::Vm { vm, change });
    }
}
