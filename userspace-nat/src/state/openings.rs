//! Openings by DNS, kept for a successor in the map `NAMES`.
//!
//! An entry holds the names that the answer led through ([`LearntName::way`]), not the rules that
//! named them. A successor judges these by its own rules, and opens the address for the time that
//! is left. A chain of names that is longer than an element is not kept: the guest has to resolve
//! its name again. The same holds for an opening for which the map has no room; no VM can take the
//! room that the others need ([`Reserve`]).
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
    /// Writes the openings and their ends since the last call to the map.
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

    /// Restores the openings of a predecessor that the present rules allow, and deletes the others.
    /// Returns how many addresses are open.
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
