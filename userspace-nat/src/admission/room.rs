//! Room among a VM's flows: its cap, the flows that leave for a new one, and its rate.
//!
//! Unproven flows from the world make room, and not before the new flow is admitted.
use slipgate_abi::{Direction, Refusal, SlotIndex, rate::RateRef};

use super::Opener;
use crate::{
    clock::MILLISECOND_NS,
    datapath::Datapath,
    flow::{Flows, GivingWay},
    quota::worlds_share,
    state::{Nat, VmState},
};

/// Shortest time between two searches for a VM's flows that give way at its cap, ns.
const CAP_COLLECT_INTERVAL_NS: u64 = 5 * MILLISECOND_NS;

/// Whether there is room for another flow of a VM, and which flows leave for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    /// Whether there is room once the flows below have left.
    is_there: bool,
    /// Whether the VM has bytes left of its budgets.
    has_bytes: bool,
    /// Whether the VM is at its cap, or the world at its share of it.
    is_at_cap: bool,
    /// Slot of an unproven flow from the world that leaves.
    unproven: Option<SlotIndex>,
    /// Search for other flows that leave, and whether it was among the world's flows only.
    search: Option<(GivingWay, bool)>,
}

impl Room {
    /// Returns the room for a flow that the guest opens, or the world.
    pub(super) fn find<D: Datapath>(
        nat: &Nat<D>,
        vm: &VmState,
        by_world: bool,
        now_ns: u64,
    ) -> Self {
        let (flows, datapath, row) = (&nat.flows, &nat.datapath, vm.net.row);
        let is_spent =
            |limits: RateRef| limits.is_spent(Direction::Tx) || limits.is_spent(Direction::Rx);
        let mut room = Self {
            is_there: true,
            has_bytes: !datapath.rates(row).is_some_and(is_spent),
            is_at_cap: is_at_cap(flows, vm, by_world, (0, 0)),
            unproven: None,
            search: None,
        };
        if !room.is_at_cap {
            return room;
        }
        room.unproven = flows.oldest_unproven(datapath, row, now_ns);
        if room.unproven.is_some() {
            return room;
        }
        // Only flows from the world can leave the world's share. A failed search among those does
        // not delay the guest's next one.
        let from_world = by_world && is_at_worlds_share(flows, vm, 0);
        let mut leaving = (0, 0);
        if now_ns >= vm.collect_after_ns[usize::from(from_world)] {
            let found = flows.find_room(datapath, row, from_world, now_ns);
            let of_world = |slot| flows.entry(slot).is_some_and(|e| e.is_from_world());
            leaving = (
                found.slots().count(),
                found.slots().filter(|slot| of_world(*slot)).count(),
            );
            room.search = Some((found, from_world));
        }
        room.is_there = !is_at_cap(flows, vm, by_world, leaving);
        room
    }

    /// Returns the flows that leave.
    pub(super) fn leaving(&self) -> Vec<SlotIndex> {
        let found = self.search.iter().flat_map(|(found, _)| found.slots());
        found.chain(self.unproven).collect()
    }

    /// Checks whether the guest may open a flow now, by cap and rate.
    pub(super) fn check(&self, vm: &VmState, now_ns: u64) -> Result<(), Refusal> {
        match self.is_there {
            _ if !self.has_bytes => Err(Refusal::ByteBudget),
            false => Err(Refusal::FlowCap),
            true if vm.new_flows.has(now_ns) => Ok(()),
            true => Err(Refusal::FlowRate),
        }
    }

    /// Ends the flows that leave, and charges the rates for the new flow. The charge is not
    /// returned if the flow is refused later, because it has caused work.
    pub(super) fn take<D: Datapath>(
        &self,
        nat: &mut Nat<D>,
        vm: &mut VmState,
        by: Opener,
        now_ns: u64,
    ) -> Result<(), Refusal> {
        if !self.has_bytes {
            return Err(Refusal::ByteBudget);
        }
        let (flows, datapath) = (&mut nat.flows, &mut nat.datapath);
        if self.is_at_cap {
            flows.forget_proven(datapath, vm.net.row);
        }
        if let Some((found, from_world)) = &self.search {
            vm.collect_after_ns[usize::from(*from_world)] = now_ns + CAP_COLLECT_INTERVAL_NS;
            flows.make_room(datapath, found, now_ns);
        }
        if !self.is_there {
            return Err(Refusal::FlowCap);
        }
        let within_share = match by {
            Opener::Guest => true,
            Opener::World(first) => vm.from_world.take(first, now_ns),
        };
        if !within_share || !vm.new_flows.take(now_ns) {
            return Err(Refusal::FlowRate);
        }
        if let Some(slot) = self.unproven {
            flows.end_unproven(datapath, slot, now_ns);
        }
        Ok(())
    }
}

/// Whether a VM is at its cap, or the world at its share of it, after `leaving` flows have left: in
/// all, and from the world.
pub(crate) fn is_at_cap(
    flows: &Flows,
    vm: &VmState,
    by_world: bool,
    leaving: (usize, usize),
) -> bool {
    let (row, cap) = (vm.net.row, vm.net.max_flows);
    flows.count(row) - leaving.0 + vm.loopback_flows as usize >= cap as usize
        || by_world && is_at_worlds_share(flows, vm, leaving.1)
}

fn is_at_worlds_share(flows: &Flows, vm: &VmState, leaving: usize) -> bool {
    let worlds = worlds_share(vm.net.max_flows) as usize;
    flows.count_from_world(vm.net.row) - leaving >= worlds
}
