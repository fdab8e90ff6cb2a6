//! Cutting flows: on request, or because the rules refuse them now. Both ends are told
//! ([`crate::packet_path`]).
use crate::{
    clock::Clock, context::Context, control::Control, datapath::Datapath, event_loop::Engine,
    flow::EndReason, observe::Subject, port::FrameIo, services::Services, state::Core,
};

/// Guests' connections that are asked for a segment, at one cut.
const MOST_PROBES: usize = 1_024;
/// Probes that are written at a time: what a TAP's queue holds, and then some rest for its reader.
const PROBES_AT_ONCE: usize = 256;

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    /// Cuts what was asked for; how many flows. `None`: no such flow is here.
    pub(crate) fn cut(&mut self, what: Subject) -> Option<usize> {
        match what {
            Subject::Flow { slot, generation } => {
                let entry = self.core.flows.entry(slot)?;
                // One that has ended stays until its record is written.
                let is_it = entry.generation == generation && entry.state.is_linked();
                is_it.then(|| self.cut_slots(&[slot], EndReason::Cut))
            }
            Subject::Relayed(id) => {
                let number = self.log.relayed_number(id)?;
                let cx = &mut Context {
                    now_ns: self.clock.now_ns(),
                    out: &mut self.core.out,
                    poller: &self.poller,
                };
                self.services.cut_flow(number, cx).then_some(1)
            }
            Subject::Vm { row } => {
                let relayed = self.cut_relayed(row);
                let slots = self.core.flows.slots_of(row).to_vec();
                Some(self.cut_slots(&slots, EndReason::Cut) + relayed)
            }
        }
    }

    /// Cuts what is relayed for a VM; how many.
    fn cut_relayed(&mut self, row: u16) -> usize {
        let Some(vm) = self.core.vm(row).map(|vm| vm.net.id) else {
            return 0;
        };
        let cx = &mut Context {
            now_ns: self.clock.now_ns(),
            out: &mut self.core.out,
            poller: &self.poller,
        };
        self.services.cut(vm, cx)
    }

    /// Cuts these flows, as far as they live, and tells their guests; how many.
    pub(crate) fn cut_slots(&mut self, slots: &[u32], reason: EndReason) -> usize {
        // Not the turn's: finding out which may have taken longer than the grace.
        let now_ns = self.clock.now_ns();
        let mut cut = Vec::new();
        for &slot in slots {
            let Core {
                flows, datapath, ..
            } = &mut self.core;
            if flows.cut(datapath, slot, reason, now_ns) {
                cut.push(slot);
            }
        }
        let mut probes = cut.iter().filter(|slot| self.core.may_probe(**slot));
        let probes: Vec<u32> = probes.by_ref().take(MOST_PROBES).copied().collect();
        for some in probes.chunks(PROBES_AT_ONCE) {
            for &slot in some {
                self.core.probe(slot, now_ns);
            }
            self.write_answers();
        }
        cut.len()
    }
}
