//! Flows follow the host's network: to another next hop when the routes change, and to their end
//! when the host no longer has their translated address.
//!
//! # Theory of operation
//! The broker sends the whole network at each change, and most changes concern no flow: a link that
//! comes or goes elsewhere, a container's route. So the tables are compared first ([`Difference`]).
//! The differences that may concern flows are stored, and a walk examines all flows, some in each
//! turn of the loop ([`STEPS_PER_TURN`]). A first packet that arrives meanwhile waits for one such
//! step at most, however many flows there are.
//!
//! Changes that arrive during a walk neither make it faster nor start another. It continues at its
//! position, looking for what concerns any of the changes, until every slot has been examined under
//! the newest tables. A flow that is opened meanwhile was opened under those.
//!
//! A flow whose address is gone is translated to it until the walk reaches it, milliseconds later,
//! as it was until the broker's message arrived.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{SlotIndex, maps::SLOTS_PER_CHUNK};

use crate::{
    datapath::Datapath,
    flow::{EndReason, Flows},
    route::Difference,
    state::Nat,
};

/// Most steps in a turn, about 0.2 ms. Passing a slot costs one step, examining a flow
/// [`STEPS_PER_LOOK`], and ending one [`STEPS_PER_END`].
const STEPS_PER_TURN: u32 = 16_384;
/// Steps to examine a flow: its route is looked up, and its slot is read.
const STEPS_PER_LOOK: u32 = 8;
/// Steps to end a flow: both its tuples are deleted in the kernel.
const STEPS_PER_END: u32 = 128;
/// Most flows that are examined in a turn.
#[cfg(test)]
pub(crate) const LOOKS_PER_TURN: u32 = STEPS_PER_TURN / STEPS_PER_LOOK + 1;

/// State of the walk that is under way, if one is.
#[derive(Debug, Default)]
pub(crate) struct Following {
    /// Changes that may concern a flow.
    difference: Difference,
    /// Index of the next slot.
    cursor: u32,
    /// Number of slots still to be examined.
    left: u32,
}

impl Following {
    /// Whether a walk is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.left > 0
    }

    /// Starts a walk, or extends the one under way, over all flows that the difference concerns.
    pub(super) fn extend(&mut self, difference: Difference, flows: &Flows) {
        if difference.is_empty() {
            return;
        }
        self.difference.add(difference);
        self.left = flows.chunks() as u32 * SLOTS_PER_CHUNK;
    }
}

impl<D: Datapath> Nat<D> {
    /// Examines all flows at once. Called before any VM is served.
    pub(crate) fn follow_at_once(&mut self, now_ns: u64) {
        let following = &mut self.network.following;
        following.extend(Difference::everything(), &self.flows);
        while self.network.following.is_under_way() {
            self.go_on_following(now_ns);
        }
    }

    /// Does a turn's part of the walk, if one is under way.
    pub(crate) fn go_on_following(&mut self, now_ns: u64) {
        let mut following = std::mem::take(&mut self.network.following);
        let slots = self.flows.chunks() as u32 * SLOTS_PER_CHUNK;
        let mut steps = STEPS_PER_TURN;
        while following.left > 0 && steps > 0 {
            let slot = SlotIndex::new(following.cursor % slots);
            let chunk = slot.chunk() as usize;
            let (cost, passed) = match self.flows.has_chunk(chunk) {
                true => (self.follow_one(&following.difference, slot, now_ns), 1),
                // The chunk is not in use: skip to its end.
                false => (1, SLOTS_PER_CHUNK - slot.position() as u32),
            };
            steps = steps.saturating_sub(cost);
            following.left = following.left.saturating_sub(passed);
            following.cursor = (slot.get() + passed) % slots;
        }
        if following.left == 0 {
            following.difference = Difference::default();
        }
        self.network.following = following;
    }

    /// Examines one slot. Returns the cost in steps.
    fn follow_one(&mut self, difference: &Difference, slot: SlotIndex, now_ns: u64) -> u32 {
        let Some(entry) = self.flows.entry(slot) else {
            return 1;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        if !difference.concerns(remote.into(), nat.into()) {
            return 1;
        }
        // A flow that is ending may be revived.
        if !entry.state.is_linked() {
            return STEPS_PER_LOOK;
        }
        let live = self.datapath.slot(slot);
        let routes = &self.network.routes;
        if nat.is_loopback() || !routes.is_host(nat.into()) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::AddressGone, now_ns);
            return STEPS_PER_END;
        }
        if let Some((hop, source)) = routes.lookup(remote.into()).hop()
            && nat == source.into()
        {
            let next_hop = self.next_hop(hop, remote);
            live.next_hop().store(next_hop, Relaxed);
        }
        STEPS_PER_LOOK
    }
}
