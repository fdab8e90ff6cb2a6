//! Flows follow the host's network: to another next hop when the routes say so, and to their end when
//! their translated address is not the host's any more.
//!
//! # Theory of operation
//! The broker sends the whole network at each change, and most changes are nobody's flow's: a link
//! that comes or goes elsewhere, a container's route. So the tables are compared first
//! ([`Difference`]). What may concern flows is kept, and a walk goes through all of them, some in each
//! turn of the loop ([`STEPS_PER_TURN`]): whoever sends a first packet meanwhile waits for that much
//! and no more, however many flows others have.
//!
//! Changes that come while a walk is under way make it no faster and begin none beside it. It goes on
//! where it stands, looking for what concerns any of them, until every slot was looked at under the
//! newest tables. A flow that is opened meanwhile was opened under those.
//!
//! A flow whose address is gone is translated to it until the walk comes by, milliseconds later, as
//! it was until the broker's message came.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::maps::SLOTS_PER_CHUNK;

use crate::{
    datapath::Datapath,
    flow::EndReason,
    route::{Difference, RouteTable},
    state::Core,
};

/// What a turn may cost: a slot costs one step to pass by, a flow that is looked at
/// [`STEPS_PER_LOOK`], and one that ends [`STEPS_PER_END`]. 0.2 ms, about.
const STEPS_PER_TURN: u32 = 16_384;
/// A route is looked up, and the slot.
const STEPS_PER_LOOK: u32 = 8;
/// Both tuples are deleted in the kernel.
const STEPS_PER_END: u32 = 128;
/// Most flows that are looked at in a turn.
#[cfg(test)]
pub(crate) const LOOKS_PER_TURN: u32 = STEPS_PER_TURN / STEPS_PER_LOOK + 1;

/// The walk that is under way, if one is.
#[derive(Debug, Default)]
pub(crate) struct Following {
    /// What may be other for a flow.
    difference: Difference,
    /// The slot that comes next.
    cursor: u32,
    /// Slots to go.
    left: u32,
}

impl Following {
    /// Whether a walk is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.left > 0
    }
}

impl<D: Datapath> Core<D> {
    /// Other routes are in force. Flows follow them by and by.
    pub(crate) fn set_routes(&mut self, routes: RouteTable) {
        let difference = routes.difference_from(&self.routes);
        self.routes = routes;
        self.follow(difference);
    }

    /// Has all flows looked at that this concerns.
    pub(crate) fn follow(&mut self, difference: Difference) {
        if difference.is_empty() {
            return;
        }
        self.following.difference.add(difference);
        self.following.left = self.flows.chunks() as u32 * SLOTS_PER_CHUNK;
    }

    /// Goes through all flows at once: nobody is served yet.
    pub(crate) fn follow_at_once(&mut self, now_ns: u64) {
        self.follow(Difference::everything());
        while self.following.is_under_way() {
            self.go_on_following(now_ns);
        }
    }

    /// A turn's part of the walk, if one is under way.
    pub(crate) fn go_on_following(&mut self, now_ns: u64) {
        let mut following = std::mem::take(&mut self.following);
        let slots = self.flows.chunks() as u32 * SLOTS_PER_CHUNK;
        let mut steps = STEPS_PER_TURN;
        while following.left > 0 && steps > 0 {
            let slot = following.cursor % slots;
            let chunk = (slot / SLOTS_PER_CHUNK) as usize;
            let (cost, passed) = match self.flows.has_chunk(chunk) {
                true => (
                    self.look_whether_to_follow(&following.difference, slot, now_ns),
                    1,
                ),
                // Nothing to the chunk's end.
                false => (1, SLOTS_PER_CHUNK - slot % SLOTS_PER_CHUNK),
            };
            steps = steps.saturating_sub(cost);
            following.left = following.left.saturating_sub(passed);
            following.cursor = (slot + passed) % slots;
        }
        if following.left == 0 {
            following.difference = Difference::default();
        }
        self.following = following;
    }

    /// What it cost, in steps.
    fn look_whether_to_follow(&mut self, difference: &Difference, slot: u32, now_ns: u64) -> u32 {
        let Some(entry) = self.flows.entry(slot) else {
            return 1;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        if !difference.concerns(remote.into(), nat.into()) {
            return 1;
        }
        // One that is ending may be revived.
        if !entry.state.is_linked() {
            return STEPS_PER_LOOK;
        }
        let live = self.datapath.slot(slot);
        if nat.is_loopback() || !self.routes.is_host(nat.into()) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::AddressGone, now_ns);
            return STEPS_PER_END;
        }
        if let Some((hop, source)) = self.routes.lookup(remote.into()).hop()
            && nat == source.into()
        {
            let next_hop = self.next_hop(hop, remote);
            live.next_hop().store(next_hop, Relaxed);
        }
        STEPS_PER_LOOK
    }
}
