//! What the control socket is asked, and who knows the answer.
use std::collections::{BTreeMap, HashMap};

use slipgate_abi::Protocol;
use userspace_nat::control::NamesPage;

use super::{Broker, thaws::Thaws};
use crate::{
    args::OnExit,
    channel::{ToEngine, ToMetrics, WhyAnswer, WhyQuestion},
    control_socket::{Answer, Asked, ClientId, Request},
};

/// Questions of a kind that may wait for an answer.
pub(super) const MOST_WAITING: usize = 64;

/// Questions that another process has not answered yet.
#[derive(Debug, Default)]
pub(super) struct Questions {
    why: HashMap<u64, ClientId>,
    names: BTreeMap<u64, ClientId>,
    machine: BTreeMap<u64, ClientId>,
    /// Changes that are under way.
    pub(super) changes: BTreeMap<u64, ClientId>,
    pub(super) thaws: Thaws,
    last: u64,
}

impl Questions {
    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

impl Questions {
    /// The engine that was asked is gone; who waits for its answer.
    fn forget_engine(&mut self) -> Vec<ClientId> {
        self.thaws = Thaws::default();
        let why = std::mem::take(&mut self.why).into_values();
        let names = std::mem::take(&mut self.names).into_values();
        let changes = std::mem::take(&mut self.changes).into_values();
        why.chain(names).chain(changes).collect()
    }
}

impl Broker {
    /// Tells who waits for an engine's answer that it has ended.
    pub(super) fn forget_asked(&mut self) {
        for client in self.asked.forget_engine() {
            let error = "the engine has ended meanwhile, and is started again: try again";
            let error = error.to_owned();
            self.control.answer(client, &Answer::Error { error });
        }
        // The metrics process has a limit to its patience.
        if let Some(metrics) = &mut self.metrics {
            metrics.asking = None;
        }
    }

    /// Answers what can be answered, and asks on. How to stop, when it is asked to.
    pub(super) fn answer_control(&mut self) -> anyhow::Result<Option<OnExit>> {
        for asked in self.control.serve() {
            let Asked {
                client,
                request,
                descriptor,
            } = asked;
            if self.engine.is_behind() && request.asks_engine() {
                let error = "the engine can be asked nothing more just now: try again".to_owned();
                self.control.answer(client, &Answer::Error { error });
                continue;
            }
            match request {
                Request::Freeze { vm } => self.freeze(client, &vm),
                Request::Thaw { vm } => self.thaw(client, &vm)?,
                Request::Apply { file } => self.apply(Some(client), file)?,
                Request::Cut { what } => self.ask_cut(client, &what)?,
                Request::Capture {
                    what,
                    packets,
                    seconds,
                } => self.ask_capture(client, &what, packets, seconds, descriptor)?,
                Request::Listen { vm } => self.ask_listen(client, &vm, descriptor)?,
                Request::Open { vm } => self.open(client, vm, descriptor)?,
                Request::Why(question) => self.ask_why(client, question)?,
                Request::Machines => self.ask_machine(client),
                Request::Vms => {
                    let vms = self.attached.vms.iter();
                    let served = vms.map(|vm| vm.config.name.clone()).collect();
                    self.control.answer(client, &Answer::UnknownVm { served });
                }
                Request::Names { from } => self.ask_names(client, from)?,
                Request::Stop { keep } => {
                    if keep && self.vm.is_some() {
                        let error = "the VM of `slipgate run` ends with it: there is nothing to \
                                     keep flows for";
                        let error = error.to_owned();
                        self.control.answer(client, &Answer::Error { error });
                        continue;
                    }
                    self.control.answer(client, &Answer::Done);
                    return Ok(Some(if keep { OnExit::Keep } else { OnExit::Detach }));
                }
            }
        }
        Ok(None)
    }

    fn ask_why(&mut self, client: ClientId, question: WhyQuestion) -> anyhow::Result<()> {
        let vms = &self.attached.vms;
        let Some(vm) = vms.iter().find(|vm| vm.config.name == question.vm) else {
            let served = vms.iter().map(|vm| vm.config.name.clone()).collect();
            self.control.answer(client, &Answer::UnknownVm { served });
            return Ok(());
        };
        if Protocol::from_ip(question.protocol).is_none() {
            let error = format!("IP protocol {} has no flows", question.protocol);
            self.control.answer(client, &Answer::Error { error });
            return Ok(());
        }
        let request = self.asked.next();
        self.asked.why.insert(request, client);
        self.engine.tell(ToEngine::Why {
            request,
            row: vm.open.row as u16,
            address: question.address,
            port: question.port,
            protocol: question.protocol,
            name: question.name,
        })
    }

    /// Gives the engine's answer to who asked.
    pub(super) fn answer_why(&mut self, request: u64, answer: WhyAnswer) {
        if let Some(client) = self.asked.why.remove(&request) {
            self.control.answer(client, &Answer::Why(answer));
        }
    }

    fn ask_names(&mut self, client: ClientId, from: u64) -> anyhow::Result<()> {
        let request = self.asked.next();
        self.asked.names.insert(request, client);
        if self.asked.names.len() > MOST_WAITING {
            self.asked.names.pop_first();
        }
        self.engine.tell(ToEngine::Names { request, from })
    }

    /// Gives a page of the engine's names to who asked.
    pub(super) fn answer_names(&mut self, request: u64, page: NamesPage) {
        if let Some(metrics) = &mut self.metrics
            && metrics.asking == Some(request)
        {
            return metrics.answer(&ToMetrics::Names { page });
        }
        if let Some(client) = self.asked.names.remove(&request) {
            self.control.answer(client, &Answer::Names { page });
        }
    }

    fn ask_machine(&mut self, client: ClientId) {
        let request = self.asked.next();
        let vm = self.vm.as_ref();
        if !vm.is_some_and(|vm| vm.vmm.ask_counters(request)) {
            let none = Answer::Machines {
                machines: BTreeMap::new(),
            };
            self.control.answer(client, &none);
            return;
        }
        self.asked.machine.insert(request, client);
        if self.asked.machine.len() > MOST_WAITING {
            self.asked.machine.pop_first();
        }
    }

    /// Gives the VMM's answer to who asked.
    pub(super) fn answer_machine(&mut self, request: u64, counters: serde_json::Value) {
        if let Some(client) = self.asked.machine.remove(&request) {
            let names = self.attached.vms.iter().map(|vm| vm.config.name.clone());
            let machines = names.map(|name| (name, counters.clone())).collect();
            self.control.answer(client, &Answer::Machines { machines });
        }
    }
}
