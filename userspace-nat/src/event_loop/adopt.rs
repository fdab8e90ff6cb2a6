//! What a new engine takes over: its predecessor's flows, as far as VMs, rules and routes still
//! have them. [`crate::flow::adopt`] says how they are told apart.
use std::sync::atomic::Ordering::Relaxed;

use hashbrown::HashSet;
use slipgate_abi::Verdict;

use crate::{
    clock::Clock,
    control::Control,
    datapath::Datapath,
    event_loop::{Engine, EngineError},
    flow::{
        EndReason,
        adopt::{Adoption, Known},
    },
    port::FrameIo,
    record::Id,
    services::Services,
    state::Core,
};

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    pub(crate) fn adopt(
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
        self.core.follow_at_once(now_ns);
        let refused = self.core.refused_flows(now_ns, |_| false);
        adoption.refused = self.cut_slots(&refused.cut, EndReason::Policy);
        adoption.uninspected = self.core.end_uninspected(now_ns);
        // Counted, since what was about to end may have been refused as well.
        adoption.live = self.core.flows.live();
        self.core.release_captured();
        self.free_recorded(now_ns);
        Ok(adoption)
    }
}

impl<D: Datapath> Core<D> {
    /// Gives the kernel the flows that a predecessor carried for a capture, which ended with it. Those
    /// that it inspected have been ended before.
    fn release_captured(&mut self) {
        for slot in self.flows.all() {
            let verdict = self.datapath.slot(slot).verdict().load(Relaxed);
            if verdict == Verdict::Engine as u32 {
                self.flows.release(&mut self.datapath, slot);
            }
        }
    }
}
