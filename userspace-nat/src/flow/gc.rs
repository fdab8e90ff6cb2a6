//! Finding the end of flows: a scan of own slots.
//!
//! Ends leave no event: the bits and times in the slots are the truth. A pass reads the first cache
//! line of each live slot, in memory order; [`SCAN_BUDGET`] slots at a time bound what one turn of
//! the loop spends on it.
//!
//! A closed flow may stay until its timeout, but its resources are wanted sooner when slots or
//! ports toward its destination run short, or when its VM has left too many behind: then it is
//! ended. Both its sides have all that the other sent ([`slipgate_abi::tcp`]), so nothing is lost.
//! What may still come is a copy of the second FIN, whose acknowledgement was lost behind us: as
//! long as nobody is refused for it, a flow is ended only when it was silent for [`COPIES_NS`].
//!
//! Flows of a frozen VM do not idle out; at the thaw their timers begin anew
//! ([`Flows::begin_timers`]).
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Protocol,
    maps::SLOTS_PER_CHUNK,
    tcp::{Phase, TcpBits},
};

use super::{
    EndReason, Flows, State,
    cut::is_frozen,
    end::{idle_left_ns, last_seen_ns},
    table::Leftovers,
};
use crate::{clock::SECOND_NS, datapath::Datapath};

/// Above the least retransmission timeout of Linux (200 ms).
const COPIES_NS: u64 = 300_000_000;

/// How long a reset connection is silent before it makes room in a VM at its cap. Who forges a RST for
/// one that lives gains only there, and only when neither side says a word for so long.
const RESET_NS: u64 = 10 * SECOND_NS;

/// Slots looked at in one go.
const SCAN_BUDGET: usize = 65_536;
/// Of those of a VM that ran into its cap.
const VM_BUDGET: usize = 256;

/// Where the scan stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scan {
    chunk: usize,
}

impl Flows {
    /// Looks at up to `SCAN_BUDGET` slots, begins to end what is due, and wakes resting ports.
    pub fn collect(&mut self, datapath: &mut impl Datapath, now_ns: u64) {
        self.ports.wake(now_ns);
        let mut left = SCAN_BUDGET;
        for _ in 0..self.table.chunks() {
            if left == 0 {
                break;
            }
            let chunk = self.scan.chunk;
            self.scan.chunk = (chunk + 1) % self.table.chunks();
            let Some(entries) = self.table.chunk(chunk) else {
                continue;
            };
            left = left.saturating_sub(entries.len());
            for at in 0..SLOTS_PER_CHUNK {
                let slot = chunk as u32 * SLOTS_PER_CHUNK + at;
                if self.entry(slot).is_some() {
                    self.look_at(datapath, slot, u64::MAX, now_ns);
                }
            }
        }
        self.reclaim(datapath, now_ns);
    }

    /// Looks at some flows of a VM, going on where it stopped: the VM ran into its cap, and closed
    /// ones do not count. Connections that were reset and are silent since make room.
    pub fn collect_vm(&mut self, datapath: &mut impl Datapath, row: u16, now_ns: u64) {
        for _ in 0..self.slots_of(row).len().min(VM_BUDGET) {
            if let Some(slot) = self.table.next_of(row) {
                self.look_at(datapath, slot, RESET_NS, now_ns);
            }
        }
    }

    /// Frees ports toward a destination by unlinking closed flows there: those that are quiet, or
    /// if there is none, the one that was silent longest. Returns whether there was any. A sample
    /// bounds the work.
    pub fn reclaim_ports(
        &mut self,
        datapath: &mut impl Datapath,
        world: slipgate_abi::Tuple,
        now_ns: u64,
    ) -> bool {
        let mut any = false;
        let mut oldest: Option<(u64, u32)> = None;
        for port in self.ports.sample(256) {
            let tuple = slipgate_abi::Tuple {
                local_port: port,
                ..world
            };
            let Some(slot) = self.by_world(&tuple) else {
                continue;
            };
            if phase(datapath, slot) != Phase::Closed {
                continue;
            }
            if is_quiet(datapath, slot, now_ns) {
                self.unlink(datapath, slot, EndReason::Closed, now_ns);
                any = true;
            } else {
                let this = (last_seen_ns(datapath.slot(slot)), slot);
                oldest = Some(oldest.map_or(this, |oldest| oldest.min(this)));
            }
        }
        if let Some((_, slot)) = oldest.filter(|_| !any) {
            self.unlink(datapath, slot, EndReason::Closed, now_ns);
            any = true;
        }
        any
    }

    /// Ends a flow if it is due. A connection that was reset is when it was silent for `reset_ns`, if not
    /// before.
    fn look_at(&mut self, datapath: &mut impl Datapath, slot: u32, reset_ns: u64, now_ns: u64) {
        let Some(entry) = self.entry(slot) else {
            return;
        };
        if entry.state != State::Live {
            return;
        }
        let protocol = entry.protocol();
        let live = datapath.slot(slot);
        let phase = TcpBits(live.tcp().load(Relaxed)).phase();
        let was_reset = protocol == Protocol::Tcp && phase == Phase::Reset;
        let silent_ns = now_ns.saturating_sub(last_seen_ns(live));
        let due = idle_left_ns(live, protocol, now_ns) == 0 || was_reset && silent_ns >= reset_ns;
        if protocol != Protocol::Tcp || !matches!(phase, Phase::Closed) {
            if due && !is_frozen(datapath, entry.vm_row) {
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
        let (news, leftovers) = self.table.note_closed(slot);
        let wanted = leftovers > Leftovers::Few || self.ports.is_pressed(&destination);
        // Who chats on behind both FINs has no claim to a place.
        let at_once = due || leftovers == Leftovers::FarTooMany;
        if at_once || wanted && is_quiet(datapath, slot, now_ns) {
            self.begin_end(datapath, slot, EndReason::Closed, now_ns);
        } else if news {
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

/// Whether neither side has sent lately.
fn is_quiet(datapath: &impl Datapath, slot: u32, now_ns: u64) -> bool {
    now_ns.saturating_sub(last_seen_ns(datapath.slot(slot))) >= COPIES_NS
}

fn phase(datapath: &impl Datapath, slot: u32) -> Phase {
    TcpBits(datapath.slot(slot).tcp().load(Relaxed)).phase()
}
