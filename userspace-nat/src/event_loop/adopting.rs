//! The adoption of a predecessor's flows, some in each turn of the loop ([`crate::flow::adopt`]).
//!
//! A command that concerns all flows of a VM has that VM's flows adopted before, and so have new
//! policies those of their VMs, some in each turn: each flow is judged once by what was in force at
//! the start, and then by what comes.
use std::io;

use hashbrown::HashSet;
use slipgate_abi::{SlotIndex, VmRow};
use slipgate_model::TranslatedId;

use super::{Engine, EngineError, cut::MOST_PROBES};
use crate::{
    clock::Clock,
    datapath::Datapath,
    flow::adopt::{Adoption, NO_BATCH},
    port::FrameIo,
    state::{Adopting, Nat},
};

/// Slots that are adopted in a turn, about 0.5 ms: first packets wait meanwhile.
const SLOTS_PER_TURN: usize = 256;

/// Values that the walk over a predecessor's slots needs beside the flows.
#[derive(Debug)]
pub(super) struct Walk {
    /// Ids in the flow log's tail.
    recorded: HashSet<TranslatedId>,
    /// Most slots that are adopted in a turn.
    pub(super) slots_per_turn: usize,
}

impl Default for Walk {
    fn default() -> Self {
        Self {
            recorded: HashSet::new(),
            slots_per_turn: SLOTS_PER_TURN,
        }
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Begins to adopt the flows of a predecessor in the kernel, as far as VMs, rules and routes
    /// admit them: these are to be set before. `recorded`: ids in the flow log's tail. Returns how
    /// many there are that have not begun to end. The turns of the loop do the rest.
    pub fn begin_adoption(&mut self, recorded: HashSet<TranslatedId>) -> usize {
        let now_ns = self.clock.now_ns();
        let core = &mut self.core;
        core.adopting = Adopting {
            began_ns: now_ns,
            probes: MOST_PROBES,
        };
        let Nat {
            flows, datapath, ..
        } = &mut core.nat;
        let found = flows.begin_adoption(datapath, now_ns);
        let vms = core.vms.len();
        flows.adoption.reopened = core.rules.reopen(datapath, vms, now_ns);
        core.pair_as_before();
        self.adopting.recorded = recorded;
        found
    }

    /// Adopts all that is left. Returns what became of all since the start.
    ///
    /// # Errors
    /// When the flow map can't be read.
    pub fn finish_adoption(&mut self) -> Result<Adoption, EngineError> {
        while self.core.nat.flows.is_adopting() {
            self.go_on_adopting()?;
        }
        self.flush_log();
        self.free_recorded(self.clock.now_ns());
        Ok(self.core.nat.flows.adoption)
    }

    /// Ends and records the flows that were listed, those of a user-mode engine that has died, with what
    /// their slots last counted. Their sockets and tuples are gone, so nothing is judged, and no turn is
    /// run before or after this.
    pub fn end_orphans(&mut self) {
        let now_ns = self.clock.now_ns();
        let mut is_over = false;
        while !is_over {
            let Nat {
                flows, datapath, ..
            } = &mut self.core.nat;
            for _ in 0..self.adopting.slots_per_turn {
                match flows.next_left() {
                    Some(slot) => flows.orphan(datapath, slot, now_ns),
                    None => is_over = true,
                }
            }
            self.record_adopted();
            // Nobody is served meanwhile, and the queue to a slow disk has little room: each part is
            // waited for.
            self.finish_log();
            self.free_recorded(now_ns);
        }
        if let Some(lost) = self.losses.rest() {
            self.report_lost(lost);
        }
    }

    /// Adopts flows that are left of these VMs, `most` slots. A VM is taken from the list when it has
    /// none. Returns whether none is left of all of them.
    pub(super) fn adopt_some(&mut self, vms: &mut Vec<VmRow>, most: usize) -> bool {
        let now_ns = self.clock.now_ns();
        let mut adopted = 0;
        while let Some(row) = vms.last() {
            if !self.core.nat.flows.has_left_of(*row) {
                vms.pop();
                continue;
            }
            if adopted == most {
                break;
            }
            adopted += 1;
            let slot = self.core.nat.flows.next_left_of(*row);
            if slot.is_some_and(|slot| self.core.adopt(slot, now_ns).is_err()) {
                // The walk meets it again, and ends the engine.
                vms.pop();
            }
        }
        if adopted > 0 {
            self.write_answers();
            self.record_adopted();
        }
        vms.is_empty()
    }

    /// Does a turn's part of the adoption, if one is under way.
    pub(super) fn go_on_adopting(&mut self) -> Result<(), EngineError> {
        if !self.core.nat.flows.is_adopting() {
            return Ok(());
        }
        let now_ns = self.clock.now_ns();
        for _ in 0..self.adopting.slots_per_turn {
            let Some(slot) = self.core.nat.flows.next_left() else {
                self.sweep_adopted().map_err(EngineError::Adopt)?;
                break;
            };
            let adopted = self.core.adopt(slot, now_ns);
            adopted.map_err(EngineError::Adopt)?;
        }
        self.write_answers();
        self.record_adopted();
        if !self.core.nat.flows.is_adopting() {
            self.adopting.recorded = HashSet::new();
            report(&self.core.nat.flows.adoption);
            self.core.close_left_ports();
        }
        Ok(())
    }

    fn sweep_adopted(&mut self) -> io::Result<()> {
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
        flows.sweep_some(datapath)
    }

    /// Adopts all flows of a VM that are left.
    pub(super) fn adopt_vm(&mut self, row: VmRow) {
        if !self.core.nat.flows.are_left() {
            return;
        }
        let now_ns = self.clock.now_ns();
        while let Some(slot) = self.core.nat.flows.next_left_of(row) {
            if self.core.adopt(slot, now_ns).is_err() {
                // The walk meets it again, and ends the engine.
                break;
            }
            if self.core.out.queue.is_half_full() {
                self.write_answers();
            }
        }
        self.write_answers();
        self.record_adopted();
    }

    /// Adopts a flow that is left, by its slot.
    pub(super) fn adopt_flow(&mut self, slot: SlotIndex) {
        if !self.core.nat.flows.are_left() {
            return;
        }
        let now_ns = self.clock.now_ns();
        let tables = &self.core.nat.datapath;
        for tuple in [tables.guest_tuple(slot), tables.world_tuple(slot)] {
            if self.core.adopt_by(&tuple, now_ns) {
                break;
            }
        }
        self.write_answers();
    }

    /// Records the flows that had ended, unless the log has them.
    fn record_adopted(&mut self) {
        let instance = self.core.nat.datapath.instance();
        let (known, new): (Vec<_>, Vec<_>) =
            self.core.nat.flows.take_ended().into_iter().partition(|e| {
                self.adopting.recorded.contains(&TranslatedId {
                    instance,
                    slot: e.slot,
                    generation: e.content.generation,
                })
            });
        for ended in &known {
            self.core.nat.flows.recorded(ended, NO_BATCH);
        }
        self.record(&new);
    }
}

fn report(adoption: &Adoption) {
    tracing::debug!(?adoption, "all flows of a predecessor are adopted");
    let ended = [
        (adoption.refused, "refused by what is in force now"),
        (
            adoption.uninspected,
            "an inspection that was under way can't go on",
        ),
    ];
    for (flows, why) in ended.into_iter().filter(|(flows, _)| *flows > 0) {
        tracing::info!("of a predecessor's flows {flows} ended: {why}");
    }
}
