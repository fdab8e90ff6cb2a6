//! The adoption of a flow of a predecessor: it comes into the table, and is treated by what is in
//! force now. [`crate::flow::adopt`] has the theory.
use std::io;

use slipgate_abi::{Direction, SlotIndex, VmId, activity::LastPackets};
use slipgate_model::FlowTuple;

use crate::{
    admission::{rejudge::judge_again, room::is_at_cap},
    datapath::Datapath,
    flow::{EndReason, State},
    icmp::Quoted,
    packet_path::job::read,
    port::Frame,
    relay::Standing,
    state::{Core, Nat},
};

/// Flows of a VM at its cap that are adopted for a first packet, so that one of them can give way.
const AT_CAP: usize = 16;
/// Flows of a guest's port that are adopted for a packet, so that it has its mapping.
const FOR_MAPPING: usize = 16;

impl<D: Datapath> Core<D> {
    /// Adopts a slot, if it is left. Returns whether it was left and held a flow.
    ///
    /// # Errors
    /// When the kernel refuses a look-up.
    pub(crate) fn adopt(&mut self, slot: SlotIndex, now_ns: u64) -> io::Result<bool> {
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        let vms = &self.vms;
        let is_vm = |row, id| vms.id_of(row) == Some(id);
        if !flows.adopt(datapath, slot, is_vm, now_ns)? {
            return Ok(false);
        }
        self.end_of_other_prefix(slot, now_ns);
        if self.nat.follow_adopted(slot, now_ns) {
            self.cut_adopted(slot, EndReason::Route, now_ns);
        }
        if judge_again(self, slot, self.adopting.began_ns, |_| false) == Some(Standing::Cut) {
            let reason = match self.nat.is_off_pool(slot) {
                true => EndReason::NatAddresses,
                false => EndReason::Policy,
            };
            self.cut_adopted(slot, reason, now_ns);
        }
        let uninspected = self.end_if_uninspected(slot, now_ns);
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        flows.release_captured(datapath, slot);
        let entry = flows.entry(slot);
        // The policy of before may have had its keep-alives not count.
        if entry.is_some_and(|it| !self.rules.judge.borrow().idle(it.vm()).ignores_keepalive) {
            LastPackets::count_all(datapath.slot(slot), now_ns);
        }
        let is_live = entry.is_some_and(|entry| entry.state == State::Live);
        flows.adoption.uninspected += usize::from(uninspected);
        flows.adoption.live += usize::from(is_live);
        Ok(true)
    }

    /// Ends a flow of a VM that has no IPv6 any more, or another prefix.
    fn end_of_other_prefix(&mut self, slot: SlotIndex, now_ns: u64) {
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        let Some(entry) = flows.entry(slot) else {
            return;
        };
        let vm = self.vms.by_id(entry.vm());
        let (guest, own) = (entry.guest.local, entry.is_untranslated());
        if !vm.is_some_and(|vm| vm.net.may_have_flows_of(guest, own)) {
            flows.unlink(datapath, slot, EndReason::Prefix, now_ns);
        }
    }

    /// Cuts a flow that the present rules, forwards or routes do not admit, and informs its guest.
    fn cut_adopted(&mut self, slot: SlotIndex, reason: EndReason, now_ns: u64) {
        let Core { nat, vms, out, .. } = self;
        if !nat.flows.cut(&mut nat.datapath, slot, reason, now_ns) {
            return;
        }
        nat.flows.adoption.refused += 1;
        if self.adopting.probes > 0 && nat.may_probe(slot) {
            self.adopting.probes -= 1;
            nat.probe(vms, slot, &mut out.queue, now_ns);
        }
    }

    /// Adopts the flow that a frame from the port concerns, and some flows of a VM that can't have
    /// another. A look-up that the kernel refuses is left to the walk, which ends the engine.
    pub(super) fn adopt_for(&mut self, frame: &Frame<'_>, now_ns: u64) {
        let (row, id) = (frame.header.row(), VmId::new(frame.header.id));
        if self.vms.id_of(row) != Some(id) {
            return;
        }
        let from_world = frame.is_from_world();
        let (scope, direction) = match from_world {
            true => (FlowTuple::WORLD, Direction::Rx),
            false => (id.get(), Direction::Tx),
        };
        let Ok(packet) = read(*frame) else { return };
        let quoted = Quoted::parse(&packet.ip, false).ok();
        let quoted = quoted.map(|quoted| match from_world {
            true => quoted.tuple_as_sent(scope),
            false => quoted.tuple_as_received(scope),
        });
        let tuple = packet.tuple(scope, direction);
        for tuple in tuple.into_iter().chain(quoted) {
            self.adopt_by(&tuple, now_ns);
        }
        if let Some(tuple) = tuple {
            self.adopt_mapping_of(&tuple, now_ns);
            if !from_world {
                self.adopt_receiver(&tuple, now_ns);
            }
        }
        for _ in 0..AT_CAP {
            let vm = self.vms.get(row);
            if !vm.is_some_and(|vm| is_at_cap(&self.nat.flows, vm, from_world, (0, 0))) {
                break;
            }
            let Some(slot) = self.nat.flows.next_left_of(row) else {
                break;
            };
            let _ = self.adopt(slot, now_ns);
        }
    }

    /// Adopts a flow that has the mapping of the guest's port which a packet with this tuple
    /// concerns: it says which translated port that is. One will do, and few are tried; until the
    /// walk has passed the others, filtering by address keeps new ports of their peers out.
    pub(super) fn adopt_mapping_of(&mut self, tuple: &FlowTuple, now_ns: u64) {
        for inside in self.nat.flows.mappings.unadopted_by(tuple) {
            for _ in 0..FOR_MAPPING {
                let mappings = &mut self.nat.flows.mappings;
                if mappings.get(&inside).is_some() {
                    break;
                }
                let Some(slot) = mappings.take_unadopted(&inside) else {
                    break;
                };
                if self.adopt(slot, now_ns).is_err() {
                    let mappings = &mut self.nat.flows.mappings;
                    mappings.put_unadopted_back(slot, &inside);
                    return;
                }
            }
            // A stranger's packet is decided about at once.
            self.follow_mapping(&inside);
        }
    }

    /// Adopts the flow with this tuple, if it is left. Returns whether it was.
    pub(crate) fn adopt_by(&mut self, tuple: &FlowTuple, now_ns: u64) -> bool {
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        match flows.left_by(datapath, tuple) {
            Ok(Some(slot)) => self.adopt(slot, now_ns).unwrap_or(false),
            Ok(None) | Err(_) => false,
        }
    }
}
