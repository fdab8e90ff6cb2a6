//! Flows that live, judged again: by other policies, or by those that a successor has.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Protocol, SlotRef, slot::SlotFlags, tcp::TcpBits};

use crate::{datapath::Datapath, state::Core};
use slipgate_policy::{Destination, OnReload};

/// Flows that the rules of now would not admit.
#[derive(Debug, Default)]
pub(crate) struct NotAdmitted {
    /// To be cut.
    pub(crate) cut: Vec<u32>,
    /// Left, for their policy says so.
    pub(crate) left: usize,
    /// All that live, these included.
    pub(crate) live: usize,
}

impl<D: Datapath> Core<D> {
    /// The flows that would not be admitted by the rules and forwards of now. `may_stay`: of which VMs
    /// they are left, if their policy says so.
    pub(crate) fn refused_flows(&self, now_ns: u64, may_stay: impl Fn(u32) -> bool) -> NotAdmitted {
        let mut refused = NotAdmitted::default();
        for slot in self.flows.all() {
            let entry = self.flows.entry(slot);
            let is_linked = entry.is_some_and(|entry| entry.state.is_linked());
            if !is_linked || self.flows.is_cut(slot) {
                continue;
            }
            refused.live += 1;
            let live = self.datapath.slot(slot);
            if self.is_allowed(slot, live, now_ns) {
                continue;
            }
            let on_reload = self.judge.borrow().on_reload(live.vm());
            if on_reload == OnReload::Keep && may_stay(live.vm()) {
                refused.left += 1;
            } else {
                refused.cut.push(slot);
            }
        }
        refused
    }

    fn is_allowed(&self, slot: u32, live: SlotRef, now_ns: u64) -> bool {
        if live.flags() & SlotFlags::INBOUND != 0 {
            let forward = self.forward_for(&live.world_tuple(), live.vm());
            let leads = forward.is_some_and(|forward| forward.guest_port == live.guest_port());
            let vm = self.vm_by_id(live.vm());
            return leads && vm.is_some_and(|vm| self.may_come_in(&vm.net, live.remote().into()));
        }
        let Some(protocol) = Protocol::from_ip(live.protocol()) else {
            return false;
        };
        let to = Destination {
            addr: live.remote().into(),
            port: live.remote_port(),
            protocol,
        };
        let generation = live.generation().load(Relaxed);
        let by = self.opened_by.get(&slot);
        let by = by.filter(|(of, _)| *of == generation);
        let rule = self.rule_texts.identity(live.rule(), &self.datapath);
        let by = by.map(|(_, name)| &**name);
        let is_in_session = self.flows.entry(slot).is_some_and(|e| e.is_held());
        let was_released = live.tcp().load(Relaxed) & TcpBits::HELD != 0;
        let was_inspected = is_in_session || was_released;
        let judge = self.judge.borrow();
        judge.keeps(live.vm(), to, by, rule.as_ref(), was_inspected, now_ns)
    }
}
