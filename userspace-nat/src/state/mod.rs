//! The state from which decisions are made. [`Core`] owns its parts; each keeps its own invariants,
//! and a function takes the parts that it uses:
//!
//! | part | what |
//! | --- | --- |
//! | [`Nat`] | flows, the kernel's tables, and the host's [`Network`] |
//! | [`Rules`] | the rules in force, and what names have opened |
//! | [`Inspected`] | sessions of the flows under inspect rules |
//! | [`VmTable`] | the VMs |
//! | [`Forwards`] | ports of the host that lead to guests |
//! | [`Journal`] | what is still to be recorded |
//! | [`Outgoing`] | frames on their way out |
//! | [`Reassembly`] | datagrams of which not all fragments have come |
//! | [`Sleeping`] | the VMs that sleep, and what is held for them |
//! | [`Unaddressed`] | frames for guests whose MAC is not known |
//! | [`Schedule`] | router advertisements that nobody asks for |
//! | [`KeptSyns`] | SYNs that may have to be sent again |
//! | [`Adopting`] | a predecessor's flows that are still to be adopted |
pub(crate) mod credits;
pub(crate) mod early;
pub(crate) mod follow;
mod forwards;
pub(crate) mod hops;
mod journal;
mod kept_syns;
mod mapped;
mod nat;
mod network;
mod outgoing;
mod pairing;
pub(crate) mod reassembly;
mod rules;
mod sleeping;
mod unaddressed;
mod vms;

pub use self::forwards::Forward;
pub(crate) use self::{
    forwards::Forwards,
    journal::{Journal, Refused},
    kept_syns::KeptSyns,
    nat::Nat,
    network::Network,
    outgoing::{Outgoing, charge},
    reassembly::Reassembly,
    rules::Rules,
    sleeping::{NotHeld, SegmentId, Sleeping},
    unaddressed::Unaddressed,
    vms::{VmState, VmTable},
};

use slipgate_abi::{DropReason, SlotIndex, VmId, VmRow};

use crate::{
    datapath::Datapath,
    flow::{Flows, is_asleep},
    inspection::sessions::Inspected,
    name_gate::SharedJudge,
    ndp::schedule::Schedule,
    vm::VmNet,
};

/// All state that decisions read and change.
#[derive(Debug)]
pub(crate) struct Core<D> {
    pub(crate) nat: Nat<D>,
    pub(crate) rules: Rules,
    /// Sessions of the flows under inspect rules.
    pub(crate) inspected: Inspected,
    pub(crate) vms: VmTable,
    pub(crate) forwards: Forwards,
    pub(crate) journal: Journal,
    pub(crate) out: Outgoing,
    pub(crate) adopting: Adopting,
    pub(crate) sleeping: Sleeping,
    pub(crate) unaddressed: Unaddressed,
    pub(crate) reassembly: Reassembly,
    pub(crate) advertisements: Schedule,
    pub(crate) kept_syns: KeptSyns,
}

/// State of an adoption beside the flows that are left.
#[derive(Debug, Default)]
pub(crate) struct Adopting {
    /// Time of the start, ns: what DNS had opened then counts.
    pub(crate) began_ns: u64,
    /// Guests' connections that may still be probed.
    pub(crate) probes: usize,
}

/// Changes in how a VM's flows leave, which a new description of the VM makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Moved {
    /// It has another uplink of its own, or none any more; or its policy chooses other routes.
    pub(crate) uplink: bool,
    /// It has another pool of source addresses, or none any more.
    pub(crate) pool: bool,
}

impl<D: Datapath> Core<D> {
    pub(crate) fn new(datapath: D, flows: Flows, judge: SharedJudge) -> Self {
        let most = datapath.vms();
        Self {
            nat: Nat {
                datapath,
                flows,
                network: Network::default(),
                world_is_sockets: false,
                moved: Default::default(),
                host_sockets: None,
            },
            rules: Rules::new(judge),
            inspected: Inspected::default(),
            vms: VmTable::new(most),
            forwards: Forwards::default(),
            journal: Journal::default(),
            out: Outgoing::new(),
            adopting: Adopting::default(),
            sleeping: Sleeping::default(),
            unaddressed: Unaddressed::default(),
            reassembly: Reassembly::default(),
            advertisements: Schedule::default(),
            kept_syns: KeptSyns::default(),
        }
    }

    /// Returns the flows of a VM that it may not have any more: of IPv6 addresses that are not of
    /// its prefix, or that the network does not route to it any more.
    pub(crate) fn flows_of_other_prefix(&self, row: VmRow) -> Vec<SlotIndex> {
        let flows = &self.nat.flows;
        let vm = self.vms.get(row);
        let is_other = |slot: &SlotIndex| {
            flows.entry(*slot).is_some_and(|entry| {
                let (guest, own) = (entry.guest.local, entry.is_untranslated());
                !vm.is_some_and(|vm| vm.net.may_have_flows_of(guest, own))
            })
        };
        let slots = flows.slots_of(row).iter().copied();
        slots.filter(is_other).collect()
    }

    /// Returns the flows of a VM that have a source address which is not of its pool. Those that the
    /// world opened have the address to which their first packet was sent.
    pub(crate) fn flows_off_pool(&self, row: VmRow) -> Vec<SlotIndex> {
        let slots = self.nat.flows.slots_of(row).iter().copied();
        slots.filter(|slot| self.nat.is_off_pool(*slot)).collect()
    }

    /// Pairs VMs with the addresses that a predecessor's flows of them have.
    pub(crate) fn pair_as_before(&self) {
        for (row, slots) in self.nat.flows.left_by_vm() {
            let vm = self.vms.get(row);
            if let Some(vm) = vm {
                self.nat.pair_by(vm.net.id, slots);
            }
        }
    }

    /// Adds a VM, or replaces the description of the one with the same id and keeps the state of
    /// its rate limits. Returns in what it leaves otherwise than before: its flows are to follow.
    pub(crate) fn set_vm(&mut self, net: VmNet) -> Moved {
        let (id, row, policy, most) = (net.id, net.row, net.policy, net.max_flows);
        let (uplink, ipv6) = (net.uplink, net.ipv6);
        let described = net.clone();
        if !self.vms.set(net) {
            return Moved::default();
        }
        self.rules.judge.borrow_mut().assign(id, policy);
        self.nat.flows.set_cap(row, most);
        self.nat.flows.mappings.look_again(id);
        self.nat.flows.share_among(self.vms.len());
        // It was put to sleep under a predecessor.
        if is_asleep(&self.nat.datapath, row) {
            self.sleeping.add(row, id, false);
        }
        self.nat.network.set_ipv6(id, ipv6.as_ref());
        let moved = Moved {
            uplink: self.nat.network.set_uplink(id, uplink)
                | self
                    .nat
                    .network
                    .set_routes_of(id, described.routes.as_ref()),
            pool: self.nat.network.set_pool(&described),
        };
        if moved.pool {
            self.nat.pair_by(id, self.nat.flows.slots_of(row));
        }
        moved
    }

    /// Removes a VM. Returns whether it was in that row. The caller ends its flows.
    pub(crate) fn remove_vm(&mut self, row: VmRow, id: VmId) -> bool {
        if self.sleeping.has(row, id) {
            for frame in self.sleeping.forget(row) {
                self.drop_held(VmRow::NOBODY, &frame, DropReason::StaleVm);
            }
        }
        if self.vms.id_of(row) == Some(id) {
            self.reassembly.forget(row);
            self.count_lost_fragments();
            self.kept_syns.forget(row);
        }
        let was_there = self.vms.remove(row, id);
        self.nat.flows.share_among(self.vms.len());
        if was_there {
            self.rules.judge.borrow_mut().forget(id);
            self.inspected.forget_vm(id);
            self.forwards.forget(id);
            self.nat.network.forget(id);
            self.advertisements.remove(id);
        }
        was_there
    }
}
