//! Requests at the control socket of a user-mode engine.
use std::{collections::BTreeMap, os::fd::BorrowedFd, path::PathBuf};

use slipgate_abi::VmRow;
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, ClientRequest, ControlServer, PermittedRequest},
    engine::{EngineReply, EngineRequest, ToEngine},
};

use super::{Guest, Place};
use crate::{
    control_api::thaws::{FROZEN_AGAIN, Thaw, Thaws},
    kernel_state::{Served, freeze, resolve},
};

/// Requests that may wait for the engine.
const MOST_WAITING: usize = 64;

/// What a client asks for.
#[derive(Debug)]
pub(super) enum Asked {
    /// Of the engine.
    Engine(ToEngine),
    /// The policy file's contents, or another file's, are to be in force.
    Apply(ClientId, Option<PathBuf>),
    /// What a daemon's clients ask for: of the VM, its policies or its machine.
    OfDaemon(ClientId, ClientRequest),
}

/// The control socket, and requests that the engine has not answered.
#[derive(Debug)]
pub(super) struct Clients {
    control: ControlServer,
    vm: String,
    row: VmRow,
    /// By number: who asked, if anybody did.
    waiting: BTreeMap<u64, Option<ClientId>>,
    thaws: Thaws,
    /// By number: who asked for the machine's counters.
    counting: BTreeMap<u64, ClientId>,
    last: u64,
    /// What happened, and clients of the API were not told of.
    pub(super) events: Vec<Event>,
}

impl Clients {
    pub(super) fn new(control: ControlServer, vm: String, row: VmRow) -> Self {
        Self {
            control,
            vm,
            row,
            waiting: BTreeMap::new(),
            thaws: Thaws::default(),
            counting: BTreeMap::new(),
            last: 0,
            events: Vec::new(),
        }
    }

    /// Number for a question to the engine.
    pub(super) fn next_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.control.fds()
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.control.has_waiting()
    }

    /// Answers what needs nobody else. Returns the rest. `by_api`: requests of clients of the API.
    pub(super) fn requests(
        &mut self,
        by_api: Vec<PermittedRequest>,
        place: &Place,
        guest: &mut impl Guest,
    ) -> Vec<Asked> {
        let mut asked = Vec::new();
        for permitted in self.control.serve().into_iter().chain(by_api) {
            let client = permitted.client;
            if is_of_daemon(&permitted.request) {
                asked.push(Asked::OfDaemon(client, permitted.request));
                continue;
            }
            if let ClientRequest::Machines = permitted.request {
                self.machines(client, guest);
                continue;
            }
            if let ClientRequest::Apply { file } = permitted.request {
                asked.push(Asked::Apply(client, file));
                continue;
            }
            match self.request(client, permitted.request, place) {
                Ok(message) => asked.push(Asked::Engine(message)),
                Err(answer) => self.control.answer(client, &answer),
            }
        }
        asked
    }

    fn request(
        &mut self,
        client: ClientId,
        request: ClientRequest,
        place: &Place,
    ) -> Result<ToEngine, Box<ClientAnswer>> {
        let unknown_vm = || ClientAnswer::UnknownVm {
            served: vec![self.vm.clone()],
        };
        match request {
            ClientRequest::Engine {
                ask: EngineRequest::Sleep | EngineRequest::Resume,
                ..
            } => Err(Box::new(ClientAnswer::error(
                "in user mode nothing is held for a guest that is paused: its sockets wait in the \
                 host's kernel, and go on when it does",
            ))),
            ClientRequest::Engine { about, ask } => {
                if self.waiting.len() >= MOST_WAITING {
                    let why = format!("{MOST_WAITING} requests wait for an answer: try again");
                    return Err(Box::new(ClientAnswer::busy(why)));
                }
                let served = Served {
                    maps: &place.memory.maps,
                    is_own_row: &|row| row == place.owner.row(),
                    row_of: &|name| (name == self.vm).then_some(self.row),
                    unknown_vm: &unknown_vm,
                };
                let about = resolve(ask.scope(), about, &served)?;
                self.last += 1;
                self.waiting.insert(self.last, Some(client));
                if let EngineRequest::Thaw = ask {
                    self.thaws.begin(self.last, self.row);
                }
                Ok(ToEngine::Request {
                    id: self.last,
                    about,
                    request: ask,
                })
            }
            ClientRequest::Freeze { vm } if vm == self.vm => {
                // A thaw that was asked for before must not undo it.
                self.thaws.undo(self.row);
                if freeze(&place.memory.maps, self.row) {
                    self.events.push(Event::VmFrozen { vm });
                }
                Err(Box::new(ClientAnswer::Done))
            }
            ClientRequest::Freeze { .. } | ClientRequest::Vms => Err(Box::new(unknown_vm())),
            _ => Err(Box::new(ClientAnswer::error(
                "it serves one guest, and changes nothing of it but its policy",
            ))),
        }
    }

    /// Asks the guest for its machine's counters, or answers that it has none.
    fn machines(&mut self, client: ClientId, guest: &mut impl Guest) {
        self.last += 1;
        if self.counting.len() < MOST_WAITING && guest.ask_counters(self.last) {
            self.counting.insert(self.last, client);
        } else {
            let machines = BTreeMap::new();
            let none = ClientAnswer::Machines { machines };
            self.control.answer(client, &none);
        }
    }

    /// Passes the machine's counters on.
    pub(super) fn counted(&mut self, id: u64, counters: serde_json::Value) {
        if let Some(client) = self.counting.remove(&id) {
            let machines = BTreeMap::from([(self.vm.clone(), counters)]);
            let answer = ClientAnswer::Machines { machines };
            self.control.answer(client, &answer);
        }
    }

    /// Passes the engine's reply on.
    pub(super) fn replied(&mut self, id: u64, reply: EngineReply, place: &Place) {
        let Some(client) = self.waiting.remove(&id) else {
            return;
        };
        let answer = match self.thaws.take(id) {
            Some(Thaw::Of(row)) if reply == EngineReply::Done => {
                if place.memory.maps.is_frozen(row) {
                    place.memory.maps.set_frozen(row, false);
                    let vm = self.vm.clone();
                    self.events.push(Event::VmThawed { vm });
                }
                ClientAnswer::Done
            }
            Some(Thaw::Undone) if reply == EngineReply::Done => ClientAnswer::error(FROZEN_AGAIN),
            _ => reply.into(),
        };
        if let Some(client) = client {
            self.control.answer(client, &answer);
        }
    }

    /// Number for a request to thaw the VM that no client made; `None` while the engine has one already.
    pub(super) fn thaw(&mut self) -> Option<u64> {
        if self.waiting.values().any(Option::is_none) {
            return None;
        }
        let id = self.next_id();
        self.waiting.insert(id, None);
        self.thaws.begin(id, self.row);
        Some(id)
    }

    /// Answers a client.
    pub(super) fn answer(&mut self, client: ClientId, answer: &ClientAnswer) {
        self.control.answer(client, answer);
    }

    /// Takes in a request of a client of the API: its number, by which it is answered.
    pub(super) fn take_in(&mut self) -> ClientId {
        self.control.take_in()
    }

    /// Takes out the answers to those requests.
    pub(super) fn answers(&mut self) -> Vec<(ClientId, ClientAnswer)> {
        self.control.answers()
    }

    /// Answers those that wait for an engine that has ended.
    pub(super) fn forget(&mut self, why: &str) {
        let waiting = std::mem::take(&mut self.waiting).into_values();
        self.thaws = Thaws::default();
        for client in waiting.flatten() {
            self.control.answer(client, &ClientAnswer::busy(why));
        }
    }
}

/// Whether it is for [`Served::of_daemon`](super::Served::of_daemon).
fn is_of_daemon(request: &ClientRequest) -> bool {
    use ClientRequest as Of;
    matches!(
        request,
        Of::ListVms
            | Of::GetVm { .. }
            | Of::PutVm { .. }
            | Of::RemoveVm { .. }
            | Of::KeepVm { .. }
            | Of::ListPolicies
            | Of::PutPolicy { .. }
            | Of::RemovePolicy { .. }
            | Of::ApiSockets
            | Of::ListMachines
            | Of::OrderMachine { .. }
    )
}

#[cfg(test)]
#[path = "clients_test.rs"]
mod tests;
