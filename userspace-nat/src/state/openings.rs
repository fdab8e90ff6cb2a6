//! What DNS opened, kept for a successor in the map `NAMES`.
//!
//! What is remembered is the way of an answer ([`LearntName::way`]), not the rules that spoke of it:
//! a successor judges it by its own, and opens for what is left of the time. A way that is longer
//! than an element has room for is not remembered: its name is asked for anew. So is what finds no
//! room in the map, of which no VM can take what the others need ([`Reserve`]).
//!
//! [`LearntName::way`]: crate::name_gate::LearntName::way
use slipgate_abi::{maps::MAX_NAMES, names::MAX_NAME_LEN};

use crate::{
    datapath::{Datapath, RememberedName},
    name_gate::Change,
    quota::Reserve,
    state::Core,
};

impl<D: Datapath> Core<D> {
    /// Writes down what opened and what ended since the last call.
    pub(crate) fn remember_openings(&mut self) {
        let changes = self.judge.borrow_mut().take_changes();
        if changes.is_empty() {
            return;
        }
        let reserve = Reserve::new(MAX_NAMES as usize, self.vms().count());
        for change in changes {
            match change {
                Change::Opened(vm, addr, name, expires_ns) => {
                    let (held, total) = self.judge.borrow().open_by_name(vm);
                    let free = (MAX_NAMES as usize).saturating_sub(total);
                    if name.way().len() > MAX_NAME_LEN || !reserve.allows(free, || held) {
                        continue;
                    }
                    self.datapath.remember_name(&RememberedName {
                        vm,
                        addr: addr.into(),
                        name: name.way().into(),
                        expires_ns,
                    });
                }
                Change::Ended(vm, addr, name) => {
                    if name.way().len() <= MAX_NAME_LEN {
                        self.datapath.forget_name(vm, addr.into(), name.way());
                    }
                }
            }
        }
    }

    /// Opens what a predecessor had open, as far as the present rules let it, and deletes the rest;
    /// how many addresses are open.
    pub(crate) fn reopen(&mut self, now_ns: u64) -> usize {
        let mut open = 0;
        for remembered in self.datapath.remembered_names() {
            let RememberedName {
                vm,
                addr,
                name,
                expires_ns,
            } = remembered;
            let mut judge = self.judge.borrow_mut();
            if judge.reopen(vm, addr.into(), &name, expires_ns, now_ns) {
                open += 1;
            } else {
                self.datapath.forget_name(vm, addr, &name);
            }
        }
        self.remember_openings();
        open
    }
}
