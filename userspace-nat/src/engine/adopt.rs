//! What a new engine takes over: its predecessor's flows, as far as VMs, rules and routes still
//! have them. [`crate::flow::adopt`] says how they are told apart.
use hashbrown::HashSet;
use slipgate_abi::Protocol;

use super::{Control, Engine, EngineError, Services, core::Core};
use crate::{
    clock::Clock,
    datapath::Datapath,
    flow::{
        EndReason,
        adopt::{Adoption, Known},
    },
    port::FrameIo,
    record::Id,
    rules::Destination,
};

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    pub(super) fn adopt(
        &mut self,
        recorded: &HashSet<Id>,
        now_ns: u64,
    ) -> Result<Adoption, EngineError> {
        struct Here<'a> {
            vms: HashSet<(u32, u32)>,
            recorded: &'a HashSet<Id>,
            instance: u32,
        }
        impl Known for Here<'_> {
            fn is_vm(&self, row: u32, vm: u32) -> bool {
                self.vms.contains(&(row, vm))
            }
            fn is_recorded(&self, slot: u32, generation: u32) -> bool {
                self.recorded.contains(&Id {
                    instance: self.instance,
                    slot,
                    generation,
                })
            }
        }
        let vms = self
            .core
            .vms()
            .map(|vm| (u32::from(vm.net.row), vm.net.id))
            .collect();
        let here = Here {
            vms,
            recorded,
            instance: self.core.datapath.instance(),
        };
        let mut ended = Vec::new();
        let Core {
            flows, datapath, ..
        } = &mut self.core;
        let mut adoption = flows
            .adopt(datapath, now_ns, &here, &mut |e| ended.push(*e))
            .map_err(EngineError::Adopt)?;
        self.record(&ended);
        self.flush_log();
        adoption.reopened = self.core.reopen(now_ns);
        // What changed while nobody served.
        self.core.follow_routes(now_ns);
        let refused = self.core.refused_flows(now_ns, true);
        adoption.refused = self.cut_slots(&refused.cut, EndReason::Policy);
        adoption.refused += self.core.end_uninspected(now_ns);
        adoption.live -= adoption.refused;
        self.core.release_captured(now_ns);
        self.core
            .flows
            .free_finished(&mut self.core.datapath, now_ns);
        Ok(adoption)
    }
}

impl<D: Datapath> Core<D> {
    /// Gives flows to the kernel that a predecessor carried for a capture, which ended with it. What
    /// it carried to inspect is no capture's.
    fn release_captured(&mut self, now_ns: u64) {
        for slot in self.flows.all() {
            let held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
            if held && !self.is_inspected(slot, now_ns) {
                self.flows.release(&mut self.datapath, slot);
            }
        }
    }

    fn is_inspected(&self, slot: u32, now_ns: u64) -> bool {
        let live = self.datapath.slot(slot);
        let Some(protocol) = Protocol::from_ip(live.protocol()) else {
            return false;
        };
        let to = Destination {
            addr: live.remote().into(),
            port: live.remote_port(),
            protocol,
        };
        let judge = self.judge.borrow();
        // The opening by which it came may be over: where anything is inspected, nothing goes free.
        judge.decide(live.vm(), to, now_ns).inspect || judge.policy(live.vm()).inspections().0
    }
}
