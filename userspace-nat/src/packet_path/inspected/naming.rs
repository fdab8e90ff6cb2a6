//! Judgement of the server names in connections.
use std::rc::Rc;

use slipgate_abi::{Protocol, VmId};
use slipgate_model::FlowTuple;

use crate::{
    inspection::HostName,
    name_gate::{LearntName, SharedJudge},
};

/// Most names of one connection that are remembered.
const MAX_NAMED: usize = 16;

/// Judge of the server names in one connection.
pub(crate) struct Naming<'a> {
    pub(crate) judge: &'a SharedJudge,
    pub(crate) vm: VmId,
    pub(crate) to: slipgate_policy::Destination,
    pub(crate) now_ns: u64,
    /// The last name that was admitted.
    pub(crate) last: Option<Rc<LearntName>>,
}

impl<'a> Naming<'a> {
    pub(crate) fn new(
        judge: &'a SharedJudge,
        vm: VmId,
        to: slipgate_policy::Destination,
        now_ns: u64,
    ) -> Self {
        Self {
            judge,
            vm,
            to,
            now_ns,
            last: None,
        }
    }

    /// Whether the connection may name this server. The opening by DNS may have expired since; a
    /// name that the connection has named before it may name again.
    pub(crate) fn may(&mut self, host: &HostName, named: &mut Vec<Rc<LearntName>>) -> bool {
        let text = host.name().without_dot();
        let before = named.iter().find(|name| *name.name == *text);
        let judge = self.judge.borrow();
        let name = match before {
            Some(name) => {
                let allowed = judge.rules_allow(self.vm, self.to, host.name());
                allowed.ok().map(|()| name.clone())
            }
            None => {
                let allowed = judge.may_name(self.vm, self.to, host.name(), self.now_ns);
                allowed.ok()
            }
        };
        let Some(name) = name else {
            return false;
        };
        if !named.contains(&name) && named.len() < MAX_NAMED {
            named.push(name.clone());
        }
        self.last = Some(name);
        true
    }
}

pub(crate) fn destination(tuple: &FlowTuple) -> slipgate_policy::Destination {
    slipgate_policy::Destination {
        addr: tuple.remote,
        port: tuple.remote_port,
        protocol: tuple.protocol().unwrap_or(Protocol::Tcp),
    }
}
