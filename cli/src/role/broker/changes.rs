//! What the control socket asks to be changed: VMs frozen and thawed, flows cut and captured.
use std::os::fd::OwnedFd;

use slipgate_abi::Verdict;
use userspace_nat::{
    observe::Subject,
    record::{FlowId, Id},
};

use super::{Broker, answers::MOST_WAITING};
use crate::{
    channel::ToEngine,
    control_socket::{Answer, ClientId, Target},
};

impl Broker {
    pub(super) fn freeze(&mut self, client: ClientId, name: &str) {
        let Some(row) = self.row_of(client, name) else {
            return;
        };
        let maps = self.attached.datapath.maps();
        // A thaw that was asked for before must not undo it.
        self.asked.thaws.forget(row);
        if !maps.is_frozen(row) {
            maps.set_frozen(row, true);
            tracing::info!("{name} is frozen");
        }
        self.control.answer(client, &Answer::Done);
    }

    /// The engine has the timers of its flows begin anew before anything passes.
    pub(super) fn thaw(&mut self, client: ClientId, name: &str) -> anyhow::Result<()> {
        let Some(row) = self.row_of(client, name) else {
            return Ok(());
        };
        let request = self.change(client);
        self.asked.thaws.begin(request, row);
        let row = row as u16;
        self.engine.tell(ToEngine::Thaw { request, row })
    }

    /// The timers were begun anew.
    pub(super) fn thawed(&mut self, request: u64) {
        let Some(row) = self.asked.thaws.take(request) else {
            let error = "it was frozen again meanwhile".to_owned();
            self.answer_change(request, Answer::Error { error });
            return;
        };
        let maps = self.attached.datapath.maps();
        if maps.is_frozen(row) {
            maps.set_frozen(row, false);
            let vms = &self.attached.vms;
            if let Some(vm) = vms.iter().find(|vm| vm.open.row == row) {
                tracing::info!("{} is thawed", vm.config.name);
            }
        }
        self.answer_change(request, Answer::Done);
    }

    pub(super) fn ask_cut(&mut self, client: ClientId, what: &Target) -> anyhow::Result<()> {
        let Some(what) = self.subject(client, what) else {
            return Ok(());
        };
        let request = self.change(client);
        self.engine.tell(ToEngine::Cut { request, what })
    }

    pub(super) fn ask_capture(
        &mut self,
        client: ClientId,
        what: &Target,
        packets: Option<u64>,
        seconds: Option<u64>,
        to: Option<OwnedFd>,
    ) -> anyhow::Result<()> {
        let Some(to) = self.descriptor(client, to) else {
            return Ok(());
        };
        let Some(what) = self.subject(client, what) else {
            return Ok(());
        };
        let request = self.change(client);
        let message = ToEngine::Capture {
            request,
            what,
            packets,
            seconds,
        };
        self.engine.hand(message, to)
    }

    pub(super) fn ask_listen(
        &mut self,
        client: ClientId,
        vm: &str,
        to: Option<OwnedFd>,
    ) -> anyhow::Result<()> {
        let Some(to) = self.descriptor(client, to) else {
            return Ok(());
        };
        let Some(row) = self.row_of(client, vm) else {
            return Ok(());
        };
        let request = self.change(client);
        let row = row as u16;
        self.engine.hand(ToEngine::Listen { request, row }, to)
    }

    /// What came with a request; who asked is told when nothing did.
    pub(super) fn descriptor(&mut self, client: ClientId, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        if fd.is_none() {
            let error = "no descriptor came with it".to_owned();
            self.control.answer(client, &Answer::Error { error });
        }
        fd
    }

    /// Answers who asked for a change.
    pub(super) fn answer_change(&mut self, request: u64, answer: Answer) {
        if let Some(client) = self.asked.changes.remove(&request) {
            self.control.answer(client, &answer);
        }
    }

    /// Says of VMs that were frozen by a predecessor's time that they still are.
    pub(super) fn tell_frozen(&self) {
        let maps = self.attached.datapath.maps();
        for vm in &self.attached.vms {
            if maps.is_frozen(vm.open.row) {
                let name = &vm.config.name;
                tracing::warn!(
                    "{name} is frozen, as it was left: nothing passes until `slipgate thaw {name}`"
                );
            }
        }
    }

    fn change(&mut self, client: ClientId) -> u64 {
        let request = self.asked.next();
        self.asked.changes.insert(request, client);
        if self.asked.changes.len() > MOST_WAITING {
            self.asked.changes.pop_first();
        }
        request
    }

    /// The row of a VM that is served here; who asked is told otherwise.
    pub(super) fn row_of(&mut self, client: ClientId, name: &str) -> Option<u32> {
        let vms = &self.attached.vms;
        let found = vms.iter().find(|vm| vm.config.name == name);
        let row = found.map(|vm| vm.open.row);
        if row.is_none() {
            let served = vms.iter().map(|vm| vm.config.name.clone()).collect();
            self.control.answer(client, &Answer::UnknownVm { served });
        }
        row
    }

    /// What is meant, as the engine has it; who asked is told when it is not here.
    fn subject(&mut self, client: ClientId, what: &Target) -> Option<Subject> {
        match what {
            Target::Vm(name) => {
                let row = self.row_of(client, name)? as u16;
                Some(Subject::Vm { row })
            }
            Target::Flow(id) => {
                // Whose relayed flow it is only its engine knows.
                let subject = match FlowId::parse(id) {
                    Some(FlowId::Relayed(id)) => Some(Subject::Relayed(id)),
                    Some(FlowId::Translated(id)) => self.flow(id),
                    None => None,
                };
                if subject.is_none() {
                    self.control.answer(client, &Answer::UnknownFlow);
                }
                subject
            }
        }
    }

    fn flow(&self, id: Id) -> Option<Subject> {
        use std::sync::atomic::Ordering::Acquire;
        let maps = self.attached.datapath.maps();
        let slot = maps.slot(id.slot)?;
        if slot.verdict().load(Acquire) == Verdict::Free as u32 {
            return None;
        }
        let (slot, generation) = (id.slot, slot.generation().load(Acquire));
        let ours = maps.chunks_of(self.attached.owner.row());
        let is_it = id.instance == maps.instance()
            && id.generation == generation
            && ours.iter().any(|chunk| chunk.contains(&slot));
        is_it.then_some(Subject::Flow { slot, generation })
    }
}
