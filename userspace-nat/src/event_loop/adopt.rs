//! Adoption: a new engine takes over its predecessor's flows, as far as present VMs, rules and
//! routes admit them. [`crate::flow::adopt`] has the cases.
use std::sync::atomic::Ordering::Relaxed;

use hashbrown::HashSet;
use slipgate_abi::Verdict;
use slipgate_model::TranslatedId;

use crate::{
    clock::Clock,
    datapath::Datapath,
    event_loop::{Engine, EngineError},
    flow::{
        EndReason,
        adopt::{Adoption, Known},
    },
    port::FrameIo,
    services::Services,
    state::Core,
};

impl<D: Datapath, P: FrameIo, C: Clock, S: Services> Engine<D, P, C, S> {
    /// Adopts the flows in the kernel. VMs, routes, forwards and so on are to be set before.
    /// `recorded`: ids in the flow log's tail.
    ///
    /// # Errors
    /// When the flow map can't be read.
    pub fn adopt(&mut self, recorded: &HashSet<TranslatedId>) -> Result<Adoption, EngineError> {
        struct Here<'a> {
            vms: HashSet<(u32, u32)>,
            recorded: &'a HashSet<TranslatedId>,
            instance: u32,
        }
        impl Known for Here<'_> {
            fn is_vm(&self, row: u32, vm: u32) -> bool {
                self.vms.contains(&(row, vm))
            }
            fn is_recorded(&self, slot: u32, generation: u32) -> bool {
                self.recorded.contains(&TranslatedId {
                    instance: self.instance,
                    slot,
                    generation,
                })
            }
        }
        let now_ns = self.clock.now_ns();
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
        // Changes while no engine was running.
        self.core.follow_at_once(now_ns);
        let refused = self.core.refused_flows(now_ns, |_| false);
        adoption.refused = self.cut_slots(&refused.cut, EndReason::Policy);
        adoption.uninspected = self.core.end_uninspected(now_ns);
        // Counted now, since a flow that was about to end may have been refused as well.
        adoption.live = self.core.flows.live();
        self.core.release_captured();
        self.free_recorded(now_ns);
        Ok(adoption)
    }
}

impl<D: Datapath> Core<D> {
    /// Returns to the kernel the flows that a predecessor carried for a capture, which ended with
    /// it. The flows that it inspected have been ended before.
    fn release_captured(&mut self) {
        for slot in self.flows.all() {
            let verdict = self.datapath.slot(slot).verdict().load(Relaxed);
            if verdict == Verdict::Engine as u32 {
                self.flows.release(&mut self.datapath, slot);
            }
        }
    }
}
