//! Flows follow the host's network: to another next hop when the routes change, and to their end
//! when the host no longer has their translated address.
//!
//! # Theory of operation
//! The broker sends the whole network at each change, and most changes concern no flow: a link that
//! comes or goes elsewhere, a container's route. So the tables are compared first ([`Difference`]).
//! The differences that may concern flows are stored, and a walk examines all flows, some in each
//! turn of the loop ([`SlotWalk`]).
//!
//! Changes that arrive during a walk neither make it faster nor start another. It continues at its
//! position, looking for what concerns any of the changes, until every slot has been examined under
//! the newest tables. A flow that is opened meanwhile was opened under those.
//!
//! Flows of a VM that is given an uplink of its own, or another one, move to it if they keep their
//! translated address there, and end otherwise: none goes on by an uplink that its VM is not to use.
//! The same holds if a VM's policy chooses other routes: those of another table, or by another mark.
//! While a VM's own uplink does not exist, its flows wait for it. An engine that adopts a flow does not
//! know by which routes it was opened: it ends one that can't leave by the present route of such a
//! policy. Where that leads nowhere, the flow goes on by its former link.
//!
//! A flow that is not translated keeps its guest's address by any route.
//!
//! A flow whose address is gone is translated to it until the walk reaches it, milliseconds later,
//! as it was until the broker's message arrived.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{IfIndex, SlotIndex, VmId, VmRow};

use crate::{
    datapath::Datapath,
    flow::{EndReason, Flows, STEPS_PER_TURN, SlotWalk},
    route::Difference,
    state::Nat,
};

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
    walk: SlotWalk,
}

impl Following {
    /// Whether a walk is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.walk.is_under_way()
    }

    /// Starts a walk, or extends the one under way, over all flows that the difference concerns.
    pub(super) fn extend(&mut self, difference: Difference, flows: &Flows) {
        if difference.is_empty() {
            return;
        }
        self.difference.add(difference);
        self.walk.start(flows);
    }
}

impl<D: Datapath> Nat<D> {
    /// Has a flow that was just adopted follow the changes while no engine was running.
    pub(crate) fn follow_adopted(&mut self, slot: SlotIndex, now_ns: u64) {
        self.follow_one(&Difference::everything(), slot, now_ns);
        let Some(entry) = self.flows.entry(slot) else {
            return;
        };
        if !entry.state.is_linked() || entry.is_hairpin() || !self.network.has_routes(entry.vm()) {
            return;
        }
        // The VM's policy may have chosen these routes meanwhile: nothing tells it from another change.
        let hop = self.route_of(slot).hop();
        if self.leaves_by_another(slot, hop.map(|(hop, _)| hop.ifindex)) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::Uplink, now_ns);
        }
    }

    /// Does a turn's part of the walk, if one is under way.
    pub(crate) fn go_on_following(&mut self, now_ns: u64) {
        let mut following = std::mem::take(&mut self.network.following);
        let mut steps = STEPS_PER_TURN;
        while let Some(slot) = following.walk.next(&self.flows, &mut steps) {
            let cost = self.follow_one(&following.difference, slot, now_ns);
            steps = steps.saturating_sub(cost);
        }
        if !following.is_under_way() {
            following.difference = Difference::default();
        }
        self.network.following = following;
    }

    /// Examines one flow. Returns the cost in steps, apart from passing its slot.
    fn follow_one(&mut self, difference: &Difference, slot: SlotIndex, now_ns: u64) -> u32 {
        let Some(entry) = self.flows.entry(slot) else {
            return 0;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        let is_hosts = !entry.is_untranslated();
        if !difference.concerns(remote, nat) {
            return 0;
        }
        // A flow that is ending may be revived.
        if !entry.state.is_linked() {
            return STEPS_PER_LOOK;
        }
        let routes = &self.network.routes;
        let is_hairpin = entry.is_hairpin();
        let is_gone = |addr: IpAddr| addr.is_loopback() || !routes.is_delivered(addr);
        if is_hosts && is_gone(nat) || is_hairpin && is_gone(remote) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::AddressGone, now_ns);
            return STEPS_PER_END;
        }
        if is_hairpin {
            return STEPS_PER_LOOK;
        }
        let vm = VmId::new(entry.guest.scope);
        self.follow_route(slot, vm);
        if self.leaves_by_another(slot, self.network.uplink_of(vm)) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::Uplink, now_ns);
            return STEPS_PER_END;
        }
        STEPS_PER_LOOK
    }

    /// Has the flows of a VM whose uplink has changed leave by the present one. Returns those that
    /// can't, because their translated address is not its.
    pub(crate) fn follow_uplink_of(&mut self, row: VmRow, vm: VmId) -> Vec<SlotIndex> {
        let network = &self.network;
        if network
            .uplink_of(vm)
            .is_some_and(|uplink| !uplink.is_some())
        {
            // They wait for it.
            return Vec::new();
        }
        let has_routes = network.has_routes(vm);
        let uplink = network.uplink_of(vm).or(network.routes.uplink());
        let mut slots = self.flows.slots_of(row).to_vec();
        slots.retain(|slot| {
            // It leaves by no link.
            if self.is_hairpin(*slot) {
                return false;
            }
            self.follow_route(*slot, vm);
            // No one link is the only one of routes that a policy chooses.
            let uplink = match has_routes {
                true => self.route_of(*slot).hop().map(|(hop, _)| hop.ifindex),
                false => uplink,
            };
            match uplink {
                None => has_routes,
                uplink => self.leaves_by_another(*slot, uplink),
            }
        });
        slots
    }

    /// Has a flow leave by the present route, if that keeps its translated address.
    fn follow_route(&mut self, slot: SlotIndex, vm: VmId) {
        let Some(entry) = self.flows.entry(slot) else {
            return;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        let is_own = entry.is_untranslated();
        let Some((hop, source)) = self.route_of(slot).hop() else {
            return;
        };
        let network = &self.network;
        let is_kept = nat == source
            || is_own
            || network.is_pooled(vm, nat)
            || network.may_keep_source(vm, hop.ifindex, remote, (source, nat));
        if is_kept {
            let next_hop = self.next_hop(hop, remote);
            let live = self.datapath.slot(slot);
            // Without a next hop, the programs send by the uplink.
            live.uplink_ifindex().store(hop.ifindex.get(), Relaxed);
            live.next_hop().store(next_hop, Relaxed);
        }
    }

    /// Whether a flow leaves by another uplink than this one, which exists.
    fn leaves_by_another(&self, slot: SlotIndex, uplink: Option<IfIndex>) -> bool {
        let uplink = uplink.filter(|uplink| uplink.is_some());
        uplink.is_some_and(|uplink| self.datapath.slot(slot).uplink() != uplink)
    }
}
