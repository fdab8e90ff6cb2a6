//! Cuts flows, on request, because the present rules refuse them, or because their VM goes on from
//! another state of its memory. Both ends are informed ([`crate::packet_path`]).
use std::cmp::Reverse;

use slipgate_abi::{SlotIndex, VmRow};
use slipgate_model::Subject;

use crate::{
    clock::Clock,
    control::Cut,
    datapath::Datapath,
    event_loop::Engine,
    flow::{EndReason, last_seen_ns},
    poll::Context,
    port::FrameIo,
    state::{Core, Nat},
};

/// Most guests' connections that are probed for a segment at one cut, and exchanges of datagrams of
/// which the guest is told.
pub(super) const MOST_PROBES: usize = 1_024;
/// Probes that are written at a time: as many as fit in a TAP's queue, so that its reader can keep
/// up.
const PROBES_AT_ONCE: usize = 256;

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Ends flows; `None` when the flow is not in this engine.
    pub fn cut(&mut self, what: Subject) -> Option<Cut> {
        let flows = self.cut_subject(what)? as u64;
        let ends = self.after_ends();
        Some(Cut { flows, ends })
    }

    fn cut_subject(&mut self, what: Subject) -> Option<usize> {
        match what {
            Subject::Flow { slot, generation } => {
                self.adopt_flow(slot);
                let entry = self.core.nat.flows.entry(slot)?;
                // A flow that has ended stays until its record is written.
                let is_it = entry.generation == generation && entry.state.is_linked();
                is_it.then(|| self.cut_slots(&[slot], EndReason::Cut))
            }
            Subject::Relayed(id) => {
                let number = self.log.relayed_number(id)?;
                let cx =
                    &mut Context::new(self.clock.now_ns(), &mut self.core.out.queue, &self.poller);
                let relay = &mut self.services.relay;
                relay
                    .cut_flow(number, EndReason::Cut.name(), cx)
                    .then_some(1)
            }
            Subject::Vm { row } => {
                let relayed = self.cut_relayed(row, EndReason::Cut);
                let slots = self.all_slots_of(row);
                Some(self.cut_slots(&slots, EndReason::Cut) + relayed)
            }
        }
    }

    /// Ends all flows of a VM that goes on from another state of its memory. Its peers are informed
    /// too, though the guest may not run yet, and its sockets of datagrams.
    pub fn end_generation(&mut self, row: VmRow) -> Cut {
        let relayed = self.cut_relayed(row, EndReason::Generation);
        let slots = self.all_slots_of(row);
        let mut may_tell = MOST_PROBES;
        let cut = self.cut_probing(&slots, EndReason::Generation, &mut may_tell);
        self.probe_peers(&cut);
        self.tell_port_unreachable(&cut, may_tell);
        Cut {
            flows: (cut.len() + relayed) as u64,
            ends: self.after_ends(),
        }
    }

    /// Does a turn's part of the walk in which flows follow the host's network, and cuts those whose
    /// destination is not reached as it was.
    pub(super) fn go_on_following(&mut self, now_ns: u64) {
        let astray = self.core.nat.go_on_following(now_ns);
        if astray.is_empty() {
            return;
        }
        let mut probes = self.core.nat.network.following.probes;
        self.cut_probing(&astray, EndReason::Route, &mut probes);
        self.core.nat.network.following.probes = probes;
    }

    fn all_slots_of(&mut self, row: VmRow) -> Vec<SlotIndex> {
        self.adopt_vm(row);
        self.core.nat.flows.slots_of(row).to_vec()
    }

    /// Probes the peers of these flows, which were just cut.
    fn probe_peers(&mut self, cut: &[SlotIndex]) {
        let now_ns = self.clock.now_ns();
        let nat = &self.core.nat;
        let probes = cut.iter().filter(|slot| nat.may_probe(**slot));
        let probes: Vec<_> = probes.take(MOST_PROBES).collect();
        for some in probes.chunks(PROBES_AT_ONCE) {
            for &&slot in some {
                let Core { nat, vms, out, .. } = &mut self.core;
                nat.probe_peer(vms, slot, &mut out.queue, now_ns);
            }
            self.write_answers();
        }
    }

    /// Tells the guest of those of these flows, which were just cut, that have datagrams; of the latest
    /// ones if they are more than `most`. They are a part of [`MOST_PROBES`], because the queue of a
    /// guest that does not run yet has little more room.
    fn tell_port_unreachable(&mut self, cut: &[SlotIndex], most: usize) {
        if most == 0 {
            return;
        }
        let now_ns = self.clock.now_ns();
        let nat = &self.core.nat;
        let is_told = |slot: &SlotIndex| nat.may_be_awaited(*slot);
        let mut told: Vec<_> = cut.iter().copied().filter(is_told).collect();
        // A look at each time, as the programs may write it meanwhile.
        told.sort_by_cached_key(|slot| Reverse(last_seen_ns(nat.datapath.slot(*slot))));
        told.truncate(most);
        for some in told.chunks(PROBES_AT_ONCE) {
            for &slot in some {
                let Core { nat, vms, out, .. } = &mut self.core;
                nat.tell_port_unreachable(vms, slot, &mut out.queue, now_ns);
            }
            self.write_answers();
        }
    }

    /// Cuts the relayed flows of a VM. Returns how many.
    fn cut_relayed(&mut self, row: VmRow, why: EndReason) -> usize {
        let Some(vm) = self.core.vms.id_of(row) else {
            return 0;
        };
        let cx = &mut Context::new(self.clock.now_ns(), &mut self.core.out.queue, &self.poller);
        self.services.relay.cut(vm, why.name(), cx)
    }

    /// Cuts those of these flows that are live, and informs their guests. Returns how many.
    pub(crate) fn cut_slots(&mut self, slots: &[SlotIndex], reason: EndReason) -> usize {
        self.cut_probing(slots, reason, &mut { MOST_PROBES }).len()
    }

    /// The same with a number of guests' connections that may be probed, which is counted down. Returns
    /// which were cut.
    pub(super) fn cut_probing(
        &mut self,
        slots: &[SlotIndex],
        reason: EndReason,
        may_probe: &mut usize,
    ) -> Vec<SlotIndex> {
        // Not the time of the turn: finding these flows may have taken longer than the grace.
        let now_ns = self.clock.now_ns();
        let mut cut = Vec::new();
        for &slot in slots {
            let Nat {
                flows, datapath, ..
            } = &mut self.core.nat;
            if flows.cut(datapath, slot, reason, now_ns) {
                cut.push(slot);
            }
        }
        let mut probes = cut.iter().filter(|slot| self.core.nat.may_probe(**slot));
        let probes: Vec<_> = probes.by_ref().take(*may_probe).copied().collect();
        *may_probe -= probes.len();
        for some in probes.chunks(PROBES_AT_ONCE) {
            for &slot in some {
                let Core { nat, vms, out, .. } = &mut self.core;
                nat.probe(vms, slot, &mut out.queue, now_ns);
            }
            self.write_answers();
        }
        cut
    }
}
