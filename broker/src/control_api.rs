//! Client requests of the control socket: their dispatch, and the delivery of the answers.
pub(crate) mod thaws;

use std::collections::BTreeMap;

use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, Target},
    engine::{EngineInventory, EngineReply, EngineRequest, Subject, ToEngine},
};

use self::thaws::{FROZEN_AGAIN, Thaw, Thaws};
use crate::{
    kernel_state::{Attached, BudgetOrder, freeze},
    parts::Parts,
    process::{page_of, reply_of_all},
    vm::VmmProcess,
};

/// Maximum number of requests to an engine, or to a VMM, that wait for an answer.
const MOST_WAITING: usize = 256;
/// How many of these may ask for the activity of VMs: who only reads leaves room for changes and
/// questions while an engine hangs.
const MOST_READERS: usize = 64;

/// Answer while there is no engine to ask, or it is behind.
pub(crate) const BUSY: &str = "the engine can be asked nothing more just now: try again";

/// Requests that another process has not answered yet.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    engine: BTreeMap<u64, Asked>,
    machine: BTreeMap<u64, ClientId>,
    thaws: Thaws,
}

/// A request to an engine.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// The worker whose engine was asked.
    worker: usize,
    /// The client that waits, if any does.
    client: Option<ClientId>,
    /// Whether it asks for a VM's activity.
    is_reader: bool,
    /// Whether it asks for a page of what all engines have.
    is_inventory: bool,
}

impl Pending {
    /// Returns the number of requests that share the room of this one, and how many may.
    fn room_for(&self, request: &EngineRequest) -> (usize, usize) {
        let readers = self.engine.values().filter(|asked| asked.is_reader);
        match request {
            EngineRequest::Activity { .. } => (readers.count(), MOST_READERS),
            _ => (self.engine.len(), MOST_WAITING),
        }
    }

    /// Passes a request on to the engine of its VM or flow.
    pub(crate) fn ask_engine(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        about: Option<Target>,
        request: EngineRequest,
    ) -> anyhow::Result<()> {
        if is_full(parts, client, self.room_for(&request)) {
            return Ok(());
        }
        let mut request = request;
        let about = match parts.attached.resolve(request.scope(), about) {
            Ok(about) => about,
            Err(answer) => {
                parts.control.answer(client, &answer);
                return Ok(());
            }
        };
        let workers = parts.engines.len();
        let worker = match (&mut request, about) {
            (EngineRequest::Inventory { from }, _) => {
                page_of(*from, workers).map(|(worker, at)| {
                    *from = at;
                    worker
                })
            }
            (_, Some(subject)) => parts.attached.worker_of(subject),
            (_, None) => None,
        };
        let Some(worker) = worker else {
            // Another daemon's, or of an engine that is no more.
            let answer = EngineReply::UnknownFlow.into();
            parts.control.answer(client, &answer);
            return Ok(());
        };
        if !parts.engines.of(worker).answers() {
            let is_inventory = matches!(request, EngineRequest::Inventory { .. });
            let answer = without_engine(is_inventory, worker, workers, BUSY);
            parts.control.answer(client, &answer);
            return Ok(());
        }
        let id = parts.next_id();
        let asked = Asked {
            worker,
            client: Some(client),
            is_reader: matches!(request, EngineRequest::Activity { .. }),
            is_inventory: matches!(request, EngineRequest::Inventory { .. }),
        };
        self.engine.insert(id, asked);
        if let (EngineRequest::Thaw, Some(Subject::Vm { row })) = (&request, about) {
            self.thaws.begin(id, row);
        }
        let request = ToEngine::Request { id, about, request };
        parts.engines.send(worker, request)
    }

    /// Has an engine do what is to be done about a VM's budget. One that is not there is asked again,
    /// with the next look.
    pub(crate) fn order_for_budget(
        &mut self,
        parts: &mut Parts,
        worker: usize,
        order: BudgetOrder,
    ) -> anyhow::Result<()> {
        if !parts.engines.of(worker).answers() {
            return Ok(());
        }
        let id = parts.next_id();
        let (row, request) = match order {
            BudgetOrder::Cut(row) => (row, EngineRequest::Cut),
            BudgetOrder::Thaw(row) => (row, EngineRequest::Thaw),
        };
        if matches!(request, EngineRequest::Thaw) {
            let asked = Asked {
                worker,
                client: None,
                is_reader: false,
                is_inventory: false,
            };
            self.engine.insert(id, asked);
            self.thaws.begin(id, row);
        }
        let about = Some(Subject::Vm { row });
        parts
            .engines
            .send(worker, ToEngine::Request { id, about, request })?;
        if let BudgetOrder::Cut(row) = order {
            parts.attached.is_cut(row);
        }
        Ok(())
    }

    /// Passes the reply of a worker's engine to the client that asked.
    pub(crate) fn replied(
        &mut self,
        parts: &mut Parts,
        worker: usize,
        id: u64,
        reply: EngineReply,
    ) {
        // None may answer for another.
        let asked = self.engine.get(&id).copied();
        let Some(Asked { client, .. }) = asked.filter(|asked| asked.worker == worker) else {
            return;
        };
        self.engine.remove(&id);
        let reply = reply_of_all(reply, worker, parts.engines.len());
        let answer = match self.thaws.take(id) {
            Some(done) if reply == EngineReply::Done => thaw(&mut parts.attached, done),
            _ => reply.into(),
        };
        if let Some(client) = client {
            parts.control.answer(client, &answer);
        }
    }

    /// Answers the clients that wait for a worker's engine that it has ended.
    pub(crate) fn forget_engine(&mut self, parts: &mut Parts, worker: usize) {
        let gone = |_: &u64, asked: &mut Asked| asked.worker == worker;
        let gone: Vec<_> = self.engine.extract_if(.., gone).collect();
        let workers = parts.engines.len();
        for (id, asked) in gone {
            self.thaws.take(id);
            let why = "the engine has ended meanwhile, and is started again: try again";
            if let Some(client) = asked.client {
                let answer = without_engine(asked.is_inventory, worker, workers, why);
                parts.control.answer(client, &answer);
            }
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
        if freeze(maps, row) {
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
        if is_full(parts, client, (self.machine.len(), MOST_WAITING)) {
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

/// What a client is told in place of a worker's engine. Of what all engines have, the pages of those behind
/// it follow.
fn without_engine(is_inventory: bool, worker: usize, workers: usize, why: &str) -> ClientAnswer {
    match is_inventory && worker + 1 < workers {
        true => {
            let none = EngineReply::Inventory(EngineInventory::default());
            reply_of_all(none, worker, workers).into()
        }
        false => ClientAnswer::busy(why),
    }
}

/// Whether as many requests wait already as may; then this one is answered. Every one that waits is
/// answered by the other process, or when that has ended.
fn is_full(parts: &mut Parts, client: ClientId, (waiting, most): (usize, usize)) -> bool {
    let is_full = waiting >= most;
    if is_full {
        let why = format!("{most} requests wait for an answer already: try again");
        parts.control.answer(client, &ClientAnswer::busy(why));
    }
    is_full
}

/// Lets the VM's packets pass, after the engine has restarted the timers of its flows.
fn thaw(attached: &mut Attached, thaw: Thaw) -> ClientAnswer {
    let row = match thaw {
        Thaw::Of(row) => row,
        Thaw::Undone => return ClientAnswer::error(FROZEN_AGAIN),
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

#[cfg(test)]
#[path = "control_api_test.rs"]
mod tests;
