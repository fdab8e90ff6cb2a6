//! Judging what a connection names.
use std::rc::Rc;

use slipgate_abi::{Protocol, Tuple};

use crate::{
    inspection::HostName,
    name_gate::{LearntName, SharedJudge},
};

/// Names that a connection named are remembered, so many.
const MAX_NAMED: usize = 16;

/// Judges what a connection names.
pub(crate) struct Naming<'a> {
    pub(crate) judge: &'a SharedJudge,
    pub(crate) vm: u32,
    pub(crate) to: slipgate_policy::Destination,
    pub(crate) now_ns: u64,
    /// The last name that was let in.
    pub(crate) last: Option<Rc<LearntName>>,
}

impl<'a> Naming<'a> {
    pub(crate) fn new(
        judge: &'a SharedJudge,
        vm: u32,
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

    /// Whether a server of this name may be spoken to. What DNS told may be over by now; what the
    /// connection named before it may name again.
    pub(crate) fn may(&mut self, said: &HostName, named: &mut Vec<Rc<LearntName>>) -> bool {
        let text = said.name().without_dot();
        let before = named.iter().find(|name| *name.name == *text);
        let judge = self.judge.borrow();
        let name = match before {
            Some(name) => {
                let let_in = judge.lets_in(self.vm, self.to, said.name());
                let_in.ok().map(|()| name.clone())
            }
            None => judge.said(self.vm, self.to, said.name(), self.now_ns).ok(),
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

pub(crate) fn destination(tuple: &Tuple) -> slipgate_policy::Destination {
    slipgate_policy::Destination {
        addr: tuple.remote.into(),
        port: tuple.remote_port,
        protocol: Protocol::from_ip(tuple.protocol).unwrap_or(Protocol::Tcp),
    }
}
