//! Client requests of the control socket: their dispatch, and the delivery of the answers.
mod thaws;

use std::collections::BTreeMap;

use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, Target},
    engine::{EngineReply, EngineRequest, Subject, ToEngine},
};

use self::thaws::{Thaw, Thaws};
use crate::{kernel_state::Attached, parts::Parts, vm::VmmProcess};

/// Maximum number of requests to an engine, or to a VMM, that wait for an answer.
const MOST_WAITING: usize = 256;

/// Requests that another process has not answered yet.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    engine: BTreeMap<u64, ClientId>,
    machine: BTreeMap<u64, ClientId>,
    thaws: Thaws,
}

impl Pending {
    /// Passes a request on to the engine of its VM or flow.
    pub(crate) fn ask_engine(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        about: Option<Target>,
        request: EngineRequest,
    ) -> anyhow::Result<()> {
        if is_full(parts, client, &self.engine) {
            return Ok(());
        }
        let about = match parts.attached.resolve(request.scope(), about) {
            Ok(about) => about,
            Err(answer) => {
                parts.control.answer(client, &answer);
                return Ok(());
            }
        };
        let id = parts.next_id();
        self.engine.insert(id, client);
        if let (EngineRequest::Thaw, Some(Subject::Vm { row })) = (&request, about) {
            self.thaws.begin(id, row);
        }
        parts.engine.send(ToEngine::Request { id, about, request })
    }

    /// Passes the engine's reply to the client that asked.
    pub(crate) fn replied(&mut self, parts: &mut Parts, id: u64, reply: EngineReply) {
        let answer = match self.thaws.take(id) {
            Some(done) if reply == EngineReply::Done => thaw(&mut parts.attached, done),
            _ => reply.into(),
        };
        if let Some(client) = self.engine.remove(&id) {
            parts.control.answer(client, &answer);
        }
    }

    /// Answers the clients that wait for an engine that it has ended.
    pub(crate) fn forget_engine(&mut self, parts: &mut Parts) {
        self.thaws = Thaws::default();
        for client in std::mem::take(&mut self.engine).into_values() {
            let why = "the engine has ended meanwhile, and is started again: try again";
            parts.control.answer(client, &ClientAnswer::busy(why));
        }
    }

    /// Freezes a VM: all its packets are dropped from now on.
    pub(crate) fn freeze(&mut self, parts: &mut Parts, client: ClientId, name: &str) {
        let Some(row) = parts.attached.row_of(name) else {
            let answer = parts.attached.unknown_vm();
            return parts.control.answer(client, &answer);
        };
        let maps = parts.attached.datapath.maps();
        // A thaw that was asked for before must not undo it.
        self.thaws.undo(row);
        if !maps.is_frozen(row) {
            maps.set_frozen(row, true);
            tracing::info!("{name} is frozen");
            let vm = name.to_owned();
            parts.attached.events.push(Event::VmFrozen { vm });
        }
        parts.control.answer(client, &ClientAnswer::Done);
    }

    /// Requests the counters of the broker's own VM, if it has one.
    pub(crate) fn ask_machine(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        vmm: Option<&VmmProcess>,
    ) {
        if is_full(parts, client, &self.machine) {
            return;
        }
        let id = parts.next_id();
        if !vmm.is_some_and(|vmm| vmm.ask_counters(id)) {
            let none = ClientAnswer::Machines {
                machines: BTreeMap::new(),
            };
            return parts.control.answer(client, &none);
        }
        self.machine.insert(id, client);
    }

    /// Passes the VMM's answer to the client that asked.
    pub(crate) fn answer_machine(
        &mut self,
        parts: &mut Parts,
        id: u64,
        counters: serde_json::Value,
    ) {
        if let Some(client) = self.machine.remove(&id) {
            let names = parts.attached.vms.iter().map(|vm| vm.config.name.clone());
            let machines = names.map(|name| (name, counters.clone())).collect();
            let answer = ClientAnswer::Machines { machines };
            parts.control.answer(client, &answer);
        }
    }
}

/// Whether as many requests wait already as may; then this one is answered. Every one that waits is
/// answered by the other process, or when that has ended.
fn is_full(parts: &mut Parts, client: ClientId, waiting: &BTreeMap<u64, ClientId>) -> bool {
    let is_full = waiting.len() >= MOST_WAITING;
    if is_full {
        let why = format!("{MOST_WAITING} requests wait for an answer already: try again");
        parts.control.answer(client, &ClientAnswer::busy(why));
    }
    is_full
}

/// Lets the VM's packets pass, after the engine has restarted the timers of its flows.
fn thaw(attached: &mut Attached, thaw: Thaw) -> ClientAnswer {
    let row = match thaw {
        Thaw::Of(row) => row,
        Thaw::Undone => return ClientAnswer::error("it was frozen again meanwhile"),
    };
    let maps = attached.datapath.maps();
    if maps.is_frozen(row) {
        maps.set_frozen(row, false);
        if let Some(vm) = attached.vms.in_row(row).map(|at| &attached.vms[at]) {
            tracing::info!("{} is thawed", vm.config.name);
            let vm = vm.config.name.clone();
            attached.events.push(Event::VmThawed { vm });
        }
    }
    ClientAnswer::Done
}
