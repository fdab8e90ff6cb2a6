//! Room among a VM's flows: its cap, who leaves for a new flow, and its rate.
//!
//! What the world opened and nobody has shown to be behind makes room, and not sooner than the new
//! flow may be.
use slipgate_abi::Refusal;

use super::Opener;
use crate::{
    clock::MILLISECOND_NS,
    datapath::Datapath,
    flow::GivingWay,
    quota::worlds_share,
    state::{Core, VmState},
};

/// How often at most a VM's flows are searched for some that give way because it ran into its cap, ns.
const CAP_COLLECT_INTERVAL_NS: u64 = 5 * MILLISECOND_NS;

/// Whether there is room for another flow of a VM's, and who leaves for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    /// Whether there is, once those below have left.
    is_there: bool,
    /// Whether the VM is at its cap, or the world at its share of it.
    is_at_cap: bool,
    /// A flow of the world's that nobody has shown to be behind.
    unproven: Option<u32>,
    /// What was looked for besides, and whether among the world's flows alone.
    search: Option<(GivingWay, bool)>,
}

impl Room {
    /// The flows that leave for it.
    pub(super) fn leaving(&self) -> Vec<u32> {
        let found = self.search.iter().flat_map(|(found, _)| found.slots());
        found.chain(self.unproven).collect()
    }

    /// Whether the guest may have it now, by cap and rate.
    pub(super) fn check(&self, vm: &VmState, now_ns: u64) -> Result<(), Refusal> {
        match self.is_there {
            false => Err(Refusal::FlowCap),
            true if vm.new_flows.has(now_ns) => Ok(()),
            true => Err(Refusal::FlowRate),
        }
    }
}

impl<D: Datapath> Core<D> {
    /// Room for a flow that the guest opens.
    pub(super) fn room_for_guest(&self, vm: &VmState, now_ns: u64) -> Room {
        self.room(vm, false, now_ns)
    }

    /// Room for a flow that the world opens.
    pub(super) fn room_for_world(&self, vm: &VmState, now_ns: u64) -> Room {
        self.room(vm, true, now_ns)
    }

    fn room(&self, vm: &VmState, by_world: bool, now_ns: u64) -> Room {
        let row = vm.net.row;
        let mut room = Room {
            is_there: true,
            is_at_cap: self.is_at_cap(vm, by_world, (0, 0)),
            unproven: None,
            search: None,
        };
        if !room.is_at_cap {
            return room;
        }
        room.unproven = self.flows.oldest_unproven(&self.datapath, row, now_ns);
        if room.unproven.is_some() {
            return room;
        }
        // The world's share only flows of the world's can leave. Who looks among those in vain takes no
        // look from the guest.
        let from_world = by_world && self.is_at_worlds_share(vm, 0);
        let mut leaving = (0, 0);
        if now_ns >= vm.collect_after_ns[usize::from(from_world)] {
            let flows = &self.flows;
            let found = flows.look_for_room(&self.datapath, row, from_world, now_ns);
            let of_world = |slot| flows.entry(slot).is_some_and(|e| e.is_from_world());
            leaving = (
                found.slots().count(),
                found.slots().filter(|slot| of_world(*slot)).count(),
            );
            room.search = Some((found, from_world));
        }
        room.is_there = !self.is_at_cap(vm, by_world, leaving);
        room
    }

    /// Has those leave that make room, and takes what a flow costs of the rates. Nothing of a rate is
    /// given back: what is refused after this was work all the same.
    pub(super) fn charge(
        &mut self,
        vm: &mut VmState,
        room: &Room,
        by: Opener,
        now_ns: u64,
    ) -> Result<(), Refusal> {
        if room.is_at_cap {
            self.flows.forget_proven(&self.datapath, vm.net.row);
        }
        if let Some((found, from_world)) = &room.search {
            vm.collect_after_ns[usize::from(*from_world)] = now_ns + CAP_COLLECT_INTERVAL_NS;
            self.flows.make_room(&mut self.datapath, found, now_ns);
        }
        if !room.is_there {
            return Err(Refusal::FlowCap);
        }
        let within_share = match by {
            Opener::Guest => true,
            Opener::World(first) => vm.from_world.take(first, now_ns),
        };
        if !within_share || !vm.new_flows.take(now_ns) {
            return Err(Refusal::FlowRate);
        }
        if let Some(slot) = room.unproven {
            self.flows.end_unproven(&mut self.datapath, slot, now_ns);
        }
        Ok(())
    }

    /// Whether a VM is at its cap, or the world at its share of it, once so many flows have left: in
    /// all, and of the world's.
    fn is_at_cap(&self, vm: &VmState, by_world: bool, leaving: (usize, usize)) -> bool {
        let (row, cap) = (vm.net.row, vm.net.max_flows);
        self.flows.count(row) - leaving.0 + vm.loopback_flows as usize >= cap as usize
            || by_world && self.is_at_worlds_share(vm, leaving.1)
    }

    fn is_at_worlds_share(&self, vm: &VmState, leaving: usize) -> bool {
        let worlds = worlds_share(vm.net.max_flows) as usize;
        self.flows.count_from_world(vm.net.row) - leaving >= worlds
    }
}
