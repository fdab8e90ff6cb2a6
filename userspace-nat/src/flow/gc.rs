//! Garbage collection: finds the end of flows by a scan of own slots.
//!
//! The end of a flow causes no event: the bits and times in the slots are the truth. A pass reads
//! the first cache line of each live slot, in memory order, of [`SLOTS_PER_PASS`] slots; a turn of
//! the loop reads [`SLOTS_AT_ONCE`] of them.
//!
//! A closed flow may stay until its timeout, but its resources are wanted sooner when slots or
//! ports toward its destination run short, or when its VM nears its cap: then it is ended. Both its
//! sides have all that the other sent ([`slipgate_abi::tcp`]), so nothing is lost. Only a copy of
//! the second FIN may still come, whose acknowledgement was lost behind the engine. So without need
//! a flow is ended only when it was silent for [`COPIES_NS`]. The module `give_way` ends flows when
//! there is need.
//!
//! Flows of a VM that is frozen or sleeps do not idle out; afterwards their timers start again
//! ([`Flows::begin_timers`]).
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Protocol, SlotIndex, VmId,
    maps::SLOTS_PER_CHUNK,
    tcp::{Phase, TcpBits},
};
use slipgate_policy::Timers;

use super::{
    EndReason, Flows, State,
    cut::is_paused,
    end::{idle_left_ns, last_seen_ns},
    give_way::COPIES_NS,
};
use crate::datapath::Datapath;

/// Slots examined in one pass.
const SLOTS_PER_PASS: usize = 65_536;
/// Slots examined in one call, some 30 µs: first packets wait meanwhile.
const SLOTS_AT_ONCE: usize = 2_048;

/// Position of the scan, and what is left of the present pass.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scan {
    chunk: usize,
    pass: Option<Pass>,
    /// Whether ports may have rested that are not free yet.
    rested: bool,
}

/// Parts of a collection pass that are still to do.
#[derive(Clone, Copy, Debug)]
struct Pass {
    slots: usize,
    chunks: usize,
}

impl Flows {
    /// Begins to free ports that have rested, and a pass of the scan, unless one is under way.
    pub fn begin_scan(&mut self, datapath: &impl Datapath) {
        self.scan.rested = true;
        self.ports
            .share_with(datapath.owner(), datapath.other_owners());
        self.mappings
            .share_with(datapath.owner(), datapath.other_owners());
        self.scan.pass.get_or_insert(Pass {
            slots: SLOTS_PER_PASS,
            chunks: self.table.chunks(),
        });
    }

    /// Whether a pass is under way, or ports that have rested are to be freed.
    pub fn is_scanning(&self) -> bool {
        self.scan.pass.is_some() || self.scan.rested
    }

    /// Does some of this: frees ports, begins the end of flows whose timeout is over, by their VM's
    /// timers, and at the end of the pass releases a chunk of slots that is not needed.
    pub fn go_on_scanning(
        &mut self,
        datapath: &mut impl Datapath,
        timers: impl Fn(VmId) -> Timers,
        now_ns: u64,
    ) {
        if self.scan.rested {
            let are_all = [self.mappings.wake(now_ns), self.ports.wake(now_ns)];
            self.scan.rested = are_all.contains(&false);
        }
        let Some(mut pass) = self.scan.pass else {
            return;
        };
        let mut at_once = SLOTS_AT_ONCE;
        while pass.slots > 0 && pass.chunks > 0 && at_once > 0 {
            let chunk = self.scan.chunk;
            self.scan.chunk = (chunk + 1) % self.table.chunks();
            pass.chunks -= 1;
            let Some(entries) = self.table.chunk(chunk) else {
                continue;
            };
            pass.slots = pass.slots.saturating_sub(entries.len());
            at_once = at_once.saturating_sub(entries.len());
            for at in 0..SLOTS_PER_CHUNK {
                let slot = SlotIndex::new(chunk as u32 * SLOTS_PER_CHUNK + at);
                if self.entry(slot).is_some() {
                    self.examine(datapath, slot, &timers, now_ns);
                }
            }
        }
        let is_over = pass.slots == 0 || pass.chunks == 0;
        self.scan.pass = (!is_over).then_some(pass);
        if !is_over {
            return;
        }
        self.reclaim(datapath, now_ns);
        if !self.is_adopting()
            && let Some(chunk) = self.slots.give_back(datapath, now_ns)
        {
            self.table.forget_chunk(chunk as usize);
        }
    }

    fn examine(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        timers: &impl Fn(VmId) -> Timers,
        now_ns: u64,
    ) {
        let Some(entry) = self.entry(slot) else {
            return;
        };
        if entry.state != State::Live {
            return;
        }
        let protocol = entry.protocol();
        let live = datapath.slot(slot);
        let phase = TcpBits(live.tcp().load(Relaxed)).phase();
        let due = idle_left_ns(live, protocol, timers(entry.vm()), now_ns) == 0;
        if protocol != Protocol::Tcp || !matches!(phase, Phase::Closed) {
            if due && !is_paused(datapath, entry.vm_row) {
                let reason = match phase {
                    Phase::Reset => EndReason::Reset,
                    Phase::Closing => EndReason::Closed,
                    _ => EndReason::Idle,
                };
                self.begin_end(datapath, slot, reason, now_ns);
            }
            return;
        }
        let (destination, generation) = (entry.destination(), entry.generation);
        let wanted = self.table.is_near_cap(entry.vm_row) || self.ports.is_pressed(&destination);
        if due || wanted && is_quiet(datapath, slot, now_ns) {
            self.begin_end(datapath, slot, EndReason::Closed, now_ns);
        } else if self.table.note_closed(slot) {
            self.closed.push_back((slot, generation));
        }
    }

    /// Ends closed flows, oldest first, while slots run short.
    fn reclaim(&mut self, datapath: &mut impl Datapath, now_ns: u64) {
        if self.closed.len() > 2 * self.len() + 1_024 {
            let table = &self.table;
            self.closed.retain(|(slot, generation)| {
                table
                    .get(*slot)
                    .is_some_and(|e| e.generation == *generation)
            });
        }
        let shortage = self.slots.shortage(self.vms);
        let mut wanted = shortage.saturating_sub(self.ending.len());
        while let Some((slot, generation)) = self.closed.pop_front() {
            let still = self
                .entry(slot)
                .is_some_and(|e| e.generation == generation && e.state == State::Live);
            if !still {
                continue;
            }
            if wanted == 0 || !is_quiet(datapath, slot, now_ns) {
                self.closed.push_front((slot, generation));
                break;
            }
            self.begin_end(datapath, slot, EndReason::Closed, now_ns);
            wanted -= 1;
        }
    }
}

/// Whether neither side has sent for [`COPIES_NS`].
fn is_quiet(datapath: &impl Datapath, slot: SlotIndex, now_ns: u64) -> bool {
    now_ns.saturating_sub(last_seen_ns(datapath.slot(slot))) >= COPIES_NS
}
