//! Flows follow the host's network: to another next hop when the routes change, and to their end
//! when the host no longer has their translated address, or their destination is not reached as it
//! was.
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
//! A flow is *astray* if a new one to its destination would be refused because of what a route says:
//! one that refuses or discards, one of the host's own, one by a link by which the VM may not leave.
//! So is one that would leave by another link, but cannot keep its address there. The engine cuts
//! these, and tells their guests what it would tell of a new flow. Where there is merely no route any
//! more, a flow goes on: routes go and come again within moments when a daemon or a lease renews
//! them, and no other way is said to be right meanwhile. While the only uplink by which a VM may leave
//! does not exist, its flows wait for it.
//!
//! A flow whose address is gone is translated to it until the walk reaches it, milliseconds later,
//! as it was until the broker's message arrived.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{IfIndex, SlotIndex, VmId, VmRow};

use crate::{
    datapath::Datapath,
    flow::{EndReason, Flows, STEPS_PER_TURN, SlotWalk},
    route::{Difference, Route},
    state::Nat,
};

/// Steps to examine a flow: its route is looked up, and its slot is read.
const STEPS_PER_LOOK: u32 = 8;
/// Steps of a question to the kernel about a flow's route: two system calls.
pub(crate) const STEPS_PER_QUESTION: u32 = 64;
/// Steps to end a flow: both its tuples are deleted in the kernel.
const STEPS_PER_END: u32 = 128;
/// Steps to cut a flow: its guest may have to be asked for a segment.
const STEPS_PER_CUT: u32 = 64;
/// Most flows that are examined in a turn.
#[cfg(test)]
pub(crate) const LOOKS_PER_TURN: u32 = STEPS_PER_TURN / STEPS_PER_LOOK + 1;

/// State of the walk that is under way, if one is.
#[derive(Debug, Default)]
pub(crate) struct Following {
    /// Changes that may concern a flow.
    difference: Difference,
    walk: SlotWalk,
    /// Guests' connections that may still be probed.
    pub(crate) probes: usize,
}

/// What became of a flow that was examined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Followed {
    /// No change concerns it.
    Unconcerned,
    /// It goes on, maybe by another next hop.
    GoesOn,
    /// It was ended.
    Ended,
    /// The caller is to cut it.
    Astray,
}

impl Followed {
    /// Cost in steps, apart from passing the flow's slot.
    const fn cost(self) -> u32 {
        match self {
            Self::Unconcerned => 0,
            Self::GoesOn => STEPS_PER_LOOK,
            Self::Ended => STEPS_PER_END,
            Self::Astray => STEPS_PER_CUT,
        }
    }
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
    /// Has a flow that was just adopted follow the changes while no engine was running. Returns whether
    /// it is astray: it is to be cut.
    pub(crate) fn follow_adopted(&mut self, slot: SlotIndex, now_ns: u64) -> bool {
        let followed = self.follow_one(&Difference::everything(), slot, now_ns);
        if followed != Followed::Astray {
            return false;
        }
        self.note_moved(slot);
        // By another link: the VM may have been given that uplink, or its policy these routes.
        if self.route_of(slot).hop().is_some() {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::Uplink, now_ns);
            return false;
        }
        true
    }

    /// Does a turn's part of the walk, if one is under way. Returns the flows that are astray: they are
    /// to be cut.
    #[must_use]
    pub(crate) fn go_on_following(&mut self, now_ns: u64) -> Vec<SlotIndex> {
        let mut following = std::mem::take(&mut self.network.following);
        let mut steps = STEPS_PER_TURN;
        let mut astray = Vec::new();
        while let Some(slot) = following.walk.next(&self.flows, &mut steps) {
            let asked = self.network.questions();
            let followed = self.follow_one(&following.difference, slot, now_ns);
            let asked = (self.network.questions() - asked) as u32;
            steps = steps.saturating_sub(asked.saturating_mul(STEPS_PER_QUESTION));
            if followed == Followed::Astray {
                self.note_moved(slot);
                astray.push(slot);
            }
            steps = steps.saturating_sub(followed.cost());
        }
        if !following.is_under_way() {
            following.difference = Difference::default();
        }
        self.network.following = following;
        astray
    }

    /// Examines one flow.
    fn follow_one(&mut self, difference: &Difference, slot: SlotIndex, now_ns: u64) -> Followed {
        let Some(entry) = self.flows.entry(slot) else {
            return Followed::Unconcerned;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        let is_hosts = !entry.is_untranslated();
        if !difference.concerns(remote, nat) {
            return Followed::Unconcerned;
        }
        // A flow that is ending may be revived.
        if !entry.state.is_linked() {
            return Followed::GoesOn;
        }
        let routes = &self.network.routes;
        let is_hairpin = entry.is_hairpin();
        let is_gone = |addr: IpAddr| addr.is_loopback() || !routes.is_delivered(addr);
        if is_hosts && (is_gone(nat) || is_hairpin && is_gone(remote)) {
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::AddressGone, now_ns);
            return Followed::Ended;
        }
        // One that was cut may not.
        if is_hairpin || self.flows.is_cut(slot) {
            return Followed::GoesOn;
        }
        let vm = VmId::new(entry.guest.scope);
        if !self.follow_route(slot, vm) {
            return Followed::Astray;
        }
        if self.leaves_by_another(slot, self.network.uplink_of(vm)) {
            self.note_moved(slot);
            self.flows
                .unlink(&mut self.datapath, slot, EndReason::Uplink, now_ns);
            return Followed::Ended;
        }
        Followed::GoesOn
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
        for slot in &slots {
            self.note_moved(*slot);
        }
        slots
    }

    /// Has a flow leave by the present route, if that keeps its translated address. Returns whether it
    /// may go on.
    fn follow_route(&mut self, slot: SlotIndex, vm: VmId) -> bool {
        let Some(entry) = self.flows.entry(slot) else {
            return true;
        };
        let (remote, nat) = (entry.guest.remote, entry.nat);
        let (is_own, is_from_world) = (entry.is_untranslated(), entry.is_from_world());
        // The kernel has the host's sockets leave by any link.
        let by_socket = self.world_is_sockets;
        let network = &self.network;
        let (hop, source) = match self.route_of(slot) {
            Route::HostLocal | Route::Refused(_) => return false,
            Route::OtherUplink { .. } => return by_socket || network.waits(vm),
            route => match route.hop() {
                Some(hop) => hop,
                None => return true,
            },
        };
        let is_kept = nat == source
            || is_own
            || network.is_pooled(vm, nat)
            || is_from_world && network.answers_by(vm, hop.ifindex, nat)
            || network.may_keep_source(vm, hop.ifindex, remote, (source, nat));
        if is_kept {
            let next_hop = self.next_hop(hop, remote);
            let live = self.datapath.slot(slot);
            // Without a next hop, the programs send by the uplink.
            live.uplink_ifindex().store(hop.ifindex.get(), Relaxed);
            live.next_hop().store(next_hop, Relaxed);
        }
        is_kept || by_socket || !self.leaves_by_another(slot, Some(hop.ifindex))
    }

    /// Whether a flow leaves by another uplink than this one, which exists.
    fn leaves_by_another(&self, slot: SlotIndex, uplink: Option<IfIndex>) -> bool {
        let uplink = uplink.filter(|uplink| uplink.is_some());
        uplink.is_some_and(|uplink| self.datapath.slot(slot).uplink() != uplink)
    }
}
