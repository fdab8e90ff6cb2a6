//! Credits: how many of a VM's frames may be on their way to the engine.
//!
//! The programs count a frame as handed over before they redirect it, and drop it as `NoCredit`
//! when more than the VM's credits are out. The engine counts in what comes out. What a full queue
//! lost in between would be missing for ever: so when the port is found empty, and a count of
//! frames handed over that is a while old is still ahead of what came out, the difference is lost,
//! is counted as such, and its credits are given back.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::segment;

use super::core::Core;
use crate::{
    clock::MILLISECOND_NS,
    datapath::Datapath,
    port::{Frame, VirtioNetHdr},
    stats::Tally,
};

/// How long a frame may take from the redirect to the port's queue, ns: very long.
const IN_FLIGHT_NS: u64 = 20 * MILLISECOND_NS;

/// A VM's frames handed over, some time ago.
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
        let taken_in = vm.taken_in().load(Relaxed);
        let handed_over = vm.handed_over().load(Relaxed);
        let credits = credits.min(handed_over.saturating_sub(taken_in));
        vm.taken_in().fetch_add(credits, Relaxed);
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
            let handed_over = live.handed_over().load(Relaxed);
            let taken_in = live.taken_in().load(Relaxed);
            if handed_over <= taken_in {
                vm.credits = Snapshot {
                    handed_over,
                    at_ns: now_ns,
                };
                continue;
            }
            if now_ns < vm.credits.at_ns + IN_FLIGHT_NS {
                out = true;
                continue;
            }
            if let Some(lost) = vm
                .credits
                .handed_over
                .checked_sub(taken_in)
                .filter(|n| *n > 0)
            {
                live.taken_in().fetch_add(lost, Relaxed);
                vm.net.stats.tally(Tally::LostAfterRedirect, lost);
            }
            vm.credits = Snapshot {
                handed_over,
                at_ns: now_ns,
            };
            out = true;
        }
        out
    }
}
