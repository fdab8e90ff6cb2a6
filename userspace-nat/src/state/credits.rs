//! Credits: how many frames of a VM may be on their way to the engine. The guest's frames and the
//! world's have separate credits.
//!
//! The programs count a frame as handed over before they redirect it, and drop it as `NoCredit`
//! when more frames are in flight than the VM has credits. The engine counts the frames that
//! arrive, before it handles them, some of a sender together. A frame that a full queue lost in between would be missing for ever. So when the port is
//! found empty, and an earlier count of frames handed over still exceeds the frames that arrived,
//! the difference is counted as lost and its credits are given back.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipgate_abi::{VmRow, segment};

use crate::{
    clock::MILLISECOND_NS,
    datapath::Tables,
    port::{ETHERTYPE_IPV6, Frame, VirtioNetHdr},
    state::VmTable,
    stats::Tally,
};

/// Longest time that a frame takes from the redirect to the port's queue, ns; a generous bound.
const IN_FLIGHT_NS: u64 = 20 * MILLISECOND_NS;

/// Number of frames handed over at an earlier time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Snapshot {
    handed_over: u64,
    at_ns: u64,
}

/// Returns the credits that a frame has taken.
pub(crate) fn credits_of(frame: &Frame<'_>) -> u64 {
    let gso_size = match frame.vnet.gso_type {
        VirtioNetHdr::GSO_NONE => 0,
        _ => u32::from(frame.vnet.gso_size),
    };
    /// Offset of the protocol in an IPv4 header, bytes; `NEXT_HEADER_AT` in an IPv6 header.
    const PROTOCOL_AT: usize = 9;
    const NEXT_HEADER_AT: usize = 6;
    let octet = |at: usize| frame.l3.get(at).copied().unwrap_or(0);
    let len = frame.l3.len() as u32;
    match frame.ethertype {
        ETHERTYPE_IPV6 => segment::credits6(len, octet(NEXT_HEADER_AT), gso_size),
        _ => segment::credits(len, octet(PROTOCOL_AT), gso_size),
    }
}

/// Counts frames of a sender that arrived over the port. The count never exceeds the frames handed over, since
/// a frame that the kernel segmented arrives as several.
pub(crate) fn take_in(tables: &impl Tables, (row, from_world): (VmRow, bool), credits: u64) {
    if credits == 0 {
        return;
    }
    let Some(vm) = tables.vm(row) else {
        return;
    };
    let all = tables.own_row();
    for (handed_over, taken_in) in [vm.under_way(from_world), all.under_way(from_world)] {
        let out = handed_over
            .load(Relaxed)
            .saturating_sub(taken_in.load(Relaxed));
        taken_in.fetch_add(credits.min(out), Relaxed);
    }
}

/// Credits of all VMs together, and whether each VM's have to be looked at.
#[derive(Clone, Debug)]
pub(crate) struct AllCredits {
    /// Of the guests' frames, and of the world's.
    snapshots: [Snapshot; 2],
    /// Whether a VM had frames in flight when each was looked at.
    in_flight: bool,
    /// First packets that went by the port, by whose counts the ring of first packets is in use.
    by_port: Snapshot,
    /// The look that is under way, if one is.
    look: Option<Look>,
}

/// A look at each VM's credits, some in each turn.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Row that is looked at next.
    next: usize,
    /// Whether frames were in flight so far.
    in_flight: bool,
}

/// Work that is left after a turn's part of the credits was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Settled {
    /// Nothing is in flight.
    All,
    /// Frames are in flight: this is to be done again soon.
    InFlight,
    /// Not all VMs were looked at: the next turn goes on.
    Some,
}

/// Most rows that are looked at in a turn.
const ROWS_PER_TURN: usize = 512;

impl AllCredits {
    pub(super) fn new() -> Self {
        Self {
            snapshots: Default::default(),
            // A predecessor may have left some.
            in_flight: true,
            by_port: Snapshot::default(),
            look: None,
        }
    }

    /// Gives back lost frames' credits. Returns whether frames were in flight.
    fn settle(&mut self, tables: &impl Tables, now_ns: u64) -> bool {
        let all = tables.own_row();
        let mut out = false;
        for (from_world, snapshot) in [false, true].into_iter().zip(&mut self.snapshots) {
            out |= settle(all.under_way(from_world), snapshot, now_ns).1;
        }
        let by_port = (all.port_handed(), all.port_taken());
        out |= settle(by_port, &mut self.by_port, now_ns).1;
        out
    }
}

impl VmTable {
    /// Counts lost frames of some VMs and gives back their credits; the port was just found empty.
    pub(crate) fn settle_credits(&mut self, tables: &impl Tables, now_ns: u64) -> Settled {
        let look = match self.all_credits.look.take() {
            Some(look) => look,
            None => {
                let in_flight = self.all_credits.settle(tables, now_ns);
                // With none in flight, nothing was lost: each VM's need no look.
                if !in_flight && !self.all_credits.in_flight {
                    return Settled::All;
                }
                Look { next: 0, in_flight }
            }
        };
        let mut out = look.in_flight;
        let end = self.row_count().min(look.next + ROWS_PER_TURN);
        for row in (look.next..end).map(|row| VmRow::new(row as u16)) {
            let Some(live) = tables.vm(row) else {
                continue;
            };
            let Some(vm) = self.get_mut(row) else {
                continue;
            };
            for (from_world, snapshot) in [false, true].into_iter().zip(&mut vm.credits) {
                let (lost, more) = settle(live.under_way(from_world), snapshot, now_ns);
                if lost > 0 {
                    vm.net.stats.tally(Tally::LostAfterRedirect, lost);
                }
                out |= more;
            }
        }
        if end < self.row_count() {
            self.all_credits.look = Some(Look {
                next: end,
                in_flight: out,
            });
            return Settled::Some;
        }
        self.all_credits.in_flight = out;
        match out {
            true => Settled::InFlight,
            false => Settled::All,
        }
    }
}

/// Gives back the credits of lost frames. Returns how many were lost, and whether frames are still
/// in flight.
fn settle(
    (handed_over, taken_in): (&AtomicU64, &AtomicU64),
    snapshot: &mut Snapshot,
    now_ns: u64,
) -> (u64, bool) {
    let now = Snapshot {
        handed_over: handed_over.load(Relaxed),
        at_ns: now_ns,
    };
    let came = taken_in.load(Relaxed);
    if now.handed_over <= came {
        *snapshot = now;
        return (0, false);
    }
    if now_ns < snapshot.at_ns + IN_FLIGHT_NS {
        return (0, true);
    }
    let lost = snapshot.handed_over.saturating_sub(came);
    taken_in.fetch_add(lost, Relaxed);
    *snapshot = now;
    (lost, true)
}
