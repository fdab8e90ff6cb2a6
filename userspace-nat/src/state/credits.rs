//! Credits: how many of a VM's frames may be on their way to the engine, those of the guest and those
//! of the world each for themselves.
//!
//! The programs count a frame as handed over before they redirect it, and drop it as `NoCredit`
//! when more than the VM's credits are out. The engine counts in what comes out. What a full queue
//! lost in between would be missing for ever: so when the port is found empty, and a count of
//! frames handed over that is a while old is still ahead of what came out, the difference is lost,
//! is counted as such, and its credits are given back.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipgate_abi::segment;

use crate::{
    clock::MILLISECOND_NS,
    datapath::Datapath,
    port::{Frame, VirtioNetHdr},
    state::Core,
    stats::Tally,
};

/// How long a frame may take from the redirect to the port's queue, ns: very long.
const IN_FLIGHT_NS: u64 = 20 * MILLISECOND_NS;

/// Frames handed over, some time ago.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Snapshot {
    handed_over: u64,
    at_ns: u64,
}

impl<D: Datapath> Core<D> {
    /// Counts a frame in that came over the port; never more than was handed over, since a frame
    /// that the kernel cut in pieces comes as several.
    pub(crate) fn take_in(&self, frame: &Frame<'_>) {
        let Some(vm) = self.datapath.vm(frame.header.vm_row) else {
            return;
        };
        let gso_size = match frame.vnet.gso_type {
            VirtioNetHdr::GSO_NONE => 0,
            _ => u32::from(frame.vnet.gso_size),
        };
        /// Of the protocol in an IPv4 header.
        const PROTOCOL_AT: usize = 9;
        let protocol = frame.l3.get(PROTOCOL_AT).copied().unwrap_or(0);
        let credits = segment::credits(frame.l3.len() as u32, protocol, gso_size);
        let (handed_over, taken_in) = vm.under_way(frame.is_from_world());
        let out = handed_over
            .load(Relaxed)
            .saturating_sub(taken_in.load(Relaxed));
        taken_in.fetch_add(credits.min(out), Relaxed);
    }

    /// Settles what was lost. The port was just found empty. Returns whether frames are still
    /// out, so that this is wanted again soon.
    pub(crate) fn settle_credits(&mut self, now_ns: u64) -> bool {
        let mut out = false;
        for row in self.rows() {
            let Some(live) = self.datapath.vm(row) else {
                continue;
            };
            let Some(vm) = self.vm_mut(row) else { continue };
            for (from_world, snapshot) in [false, true].into_iter().zip(&mut vm.credits) {
                let (lost, more) = settle(live.under_way(from_world), snapshot, now_ns);
                if lost > 0 {
                    vm.net.stats.tally(Tally::LostAfterRedirect, lost);
                }
                out |= more;
            }
        }
        out
    }
}

/// Takes in what was lost: how much that was, and whether frames are still out.
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
