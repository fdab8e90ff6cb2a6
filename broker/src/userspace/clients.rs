//! Requests at the control socket of a user-mode engine.
use std::{collections::BTreeMap, os::fd::BorrowedFd};

use slipgate_abi::VmRow;
use slipgate_ipc::{
    client::{ClientAnswer, ClientId, ClientRequest, ControlServer},
    engine::{EngineReply, EngineRequest, ToEngine},
};

use super::{Guest, Place};
use crate::kernel_state::{Served, resolve};

/// Requests that may wait for the engine.
const MOST_WAITING: usize = 64;

/// The control socket, and requests that the engine has not answered.
#[derive(Debug)]
pub(super) struct Clients {
    control: ControlServer,
    vm: String,
    row: VmRow,
    /// By number: who asked, and whether the VM is to be thawed then.
    waiting: BTreeMap<u64, (ClientId, bool)>,
    /// By number: who asked for the machine's counters.
    counting: BTreeMap<u64, ClientId>,
    last: u64,
}

impl Clients {
    pub(super) fn new(control: ControlServer, vm: String, row: VmRow) -> Self {
        Self {
            control,
            vm,
            row,
            waiting: BTreeMap::new(),
            counting: BTreeMap::new(),
            last: 0,
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

    /// Answers what needs no engine. Returns the messages for the engine.
    pub(super) fn requests(&mut self, place: &Place, guest: &mut impl Guest) -> Vec<ToEngine> {
        let mut messages = Vec::new();
        for permitted in self.control.serve() {
            let client = permitted.client;
            if let ClientRequest::Machines = permitted.request {
                self.machines(client, guest);
                continue;
            }
            match self.request(client, permitted.request, place) {
                Ok(message) => messages.push(message),
                Err(answer) => self.control.answer(client, &answer),
            }
        }
        messages
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
                let thaws = matches!(ask, EngineRequest::Thaw);
                self.waiting.insert(self.last, (client, thaws));
                Ok(ToEngine::Request {
                    id: self.last,
                    about,
                    request: ask,
                })
            }
            ClientRequest::Freeze { vm } if vm == self.vm => {
                place.memory.maps.set_frozen(self.row, true);
                Err(Box::new(ClientAnswer::Done))
            }
            ClientRequest::Freeze { .. } | ClientRequest::Vms => Err(Box::new(unknown_vm())),
            _ => Err(Box::new(ClientAnswer::error(
                "it serves one guest, by the policy that it was started with",
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
        let Some((client, thaws)) = self.waiting.remove(&id) else {
            return;
        };
        if thaws && reply == EngineReply::Done {
            place.memory.maps.set_frozen(self.row, false);
        }
        self.control.answer(client, &reply.into());
    }

    /// Answers those that wait for an engine that has ended.
    pub(super) fn forget(&mut self, why: &str) {
        for (client, _) in std::mem::take(&mut self.waiting).into_values() {
            self.control.answer(client, &ClientAnswer::error(why));
        }
    }
}
