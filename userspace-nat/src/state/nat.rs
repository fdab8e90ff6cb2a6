//! The translation of flows: the flows, the kernel's tables that hold them, and the network that
//! they leave by.
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{IfIndex, NextHop, SlotIndex, VmId, slot::SlotFlags};
use slipgate_model::FlowUplink;

use super::Network;
use crate::{
    datapath::{Datapath, Hop},
    flow::Flows,
    host_sockets::HostSockets,
    port::Exit,
    route::{Route, RouteEntry, ask::Transport, spread},
    vm::VmNet,
};

/// Smallest MTU that a link may have (RFC 791), bytes.
const MIN_MTU: u32 = 68;

/// The flows of this process, the kernel's tables, and the host's network. Every linked flow of
/// [`Flows`] has its tuples and its slot in the tables, and its next hop from the network.
#[derive(Debug)]
pub(crate) struct Nat<D> {
    pub(crate) datapath: D,
    pub(crate) flows: Flows,
    pub(crate) network: Network,
    /// Whether packets from the world are made here, of what sockets of the host received: their
    /// sender toward the guest is this NAT.
    pub(crate) world_is_sockets: bool,
    /// Where the routes led for flows that end because they may not go there.
    pub(crate) moved: HashMap<SlotIndex, Hop, foldhash::fast::RandomState>,
    /// The host's sockets that flows end in (user mode).
    pub(crate) host_sockets: Option<Rc<HostSockets>>,
}

impl<D: Datapath> Nat<D> {
    /// Returns the index of the element of `NEXT_HOPS` for a next hop toward `destination`, or 0
    /// when there is none.
    pub(crate) fn next_hop(&mut self, hop: Hop, destination: IpAddr) -> u32 {
        self.network.next_hop(&mut self.datapath, hop, destination)
    }

    /// Releases next hops that nothing uses any more, some flows at a time. Those of a predecessor
    /// are known once its flows are adopted.
    pub(crate) fn release_idle_hops(&mut self, now_ns: u64) {
        if self.flows.are_left() {
            return;
        }
        let hops = &mut self.network.hops;
        hops.release_idle(&self.flows, &mut self.datapath, now_ns);
    }

    /// Returns the next hop or link by which a flow leaves. A next hop is requested again if there
    /// was none at the flow's admission.
    pub(crate) fn exit_of(&mut self, slot: SlotIndex) -> Exit {
        if self.is_hairpin(slot) {
            return Exit::BackIn;
        }
        let live = self.datapath.slot(slot);
        let remote = self.datapath.addresses(slot).remote;
        let next_hop = live.next_hop().load(Relaxed);
        if next_hop != 0 {
            return Exit::NextHop(next_hop);
        }
        let mut uplink = live.uplink();
        if let Some((hop, _)) = self.route_of(slot).hop() {
            let index = self.next_hop(hop, remote);
            if index != 0 {
                return Exit::NextHop(index);
            }
            uplink = hop.ifindex;
        }
        Exit::Uplink(uplink)
    }

    /// Returns by which link and neighbour a flow with these flags leaves, for its records. `None` if
    /// it is the host's sockets that leave, or the flow leaves by none.
    pub(crate) fn uplink_of_record(
        &self,
        flags: u8,
        uplink: IfIndex,
        next_hop: u32,
    ) -> Option<FlowUplink<&str>> {
        let is_hairpin = flags & SlotFlags::HAIRPIN != 0;
        if self.world_is_sockets || is_hairpin || !uplink.is_some() {
            return None;
        }
        let element = Some(next_hop).filter(|index| *index != 0);
        let claim = element.and_then(|index| Some(self.datapath.next_hop(index)?.claim()));
        let neighbour = claim.and_then(|(of, neighbour)| (of == uplink).then_some(neighbour));
        let neighbour = neighbour.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let name = self.network.link_name(uplink);
        Some(FlowUplink::new(name, uplink, neighbour))
    }

    /// Notes where the present route of a flow leads that ends because of it.
    pub(super) fn note_moved(&mut self, slot: SlotIndex) {
        let entry = self.flows.entry(slot);
        let is_linked = entry.is_some_and(|entry| entry.state.is_linked());
        // Another flow may have the slot when one whose end is recorded leaves it.
        if self.world_is_sockets || !is_linked {
            return;
        }
        match self.route_of(slot) {
            Route::OtherUplink { ifindex } => {
                let neighbour = Ipv4Addr::UNSPECIFIED.into();
                let hop = Hop {
                    ifindex,
                    neighbour,
                    route_mtu: 0,
                };
                self.moved.insert(slot, hop);
            }
            route => {
                if let Some((hop, _)) = route.hop() {
                    self.moved.insert(slot, hop);
                }
            }
        }
    }

    /// Returns a next hop as records show it.
    pub(crate) fn way_by(&self, hop: Hop) -> FlowUplink<&str> {
        let name = self.network.link_name(hop.ifindex);
        let neighbour = match self.network.has_l2(hop.ifindex) {
            true => hop.neighbour,
            false => Ipv4Addr::UNSPECIFIED.into(),
        };
        FlowUplink::new(name, hop.ifindex, neighbour)
    }

    /// Whether a flow's peer is a guest of this engine, by its translated address.
    pub(crate) fn is_hairpin(&self, slot: SlotIndex) -> bool {
        self.flows
            .entry(slot)
            .is_some_and(|entry| entry.is_hairpin())
    }

    /// Returns the translated address of a flow that its guest opened, or whose translated port is
    /// of a mapping, which its guest made.
    pub(super) fn source_of_own(&self, slot: SlotIndex) -> Option<IpAddr> {
        let live = self.datapath.slot(slot);
        let is_mapped = || {
            let world = self.datapath.world_tuple(slot);
            let mapped = self.flows.mappings.by_outside(&world);
            mapped.is_some_and(|(inside, _)| inside.vm == live.id())
        };
        let is_own = live.flags() & SlotFlags::INBOUND == 0 || is_mapped();
        is_own.then(|| self.datapath.addresses(slot).nat)
    }

    /// Pairs a VM with addresses that these flows of it have, as far as it is not paired.
    pub(super) fn pair_by(&self, vm: VmId, slots: &[SlotIndex]) {
        let Some(pairing) = self.network.pairing(vm) else {
            return;
        };
        for slot in slots {
            if pairing.is_complete() {
                return;
            }
            if let Some(nat) = self.source_of_own(*slot) {
                pairing.keep(nat);
            }
        }
    }

    /// Whether a flow has a source address which is not of its VM's pool, and no forward gave it.
    pub(crate) fn is_off_pool(&self, slot: SlotIndex) -> bool {
        let vm = self.datapath.slot(slot).id();
        let source = self.source_of_own(slot);
        source.is_some_and(|nat| !self.network.may_be_translated_to(vm, nat))
    }

    /// Returns the present route of a flow's packets to the world. Of several next hops it is the one
    /// that the flow has, while that is one of them.
    pub(super) fn route_of(&self, slot: SlotIndex) -> Route {
        let Some(entry) = self.flows.entry(slot) else {
            return Route::Unreachable;
        };
        let (vm, remote) = (entry.vm(), entry.guest.remote);
        let choose = &mut |hops: &[&RouteEntry]| {
            let live = self.datapath.slot(slot);
            let element = self.datapath.next_hop(live.next_hop().load(Relaxed));
            // One without an element of its own keeps its link.
            let link = || (live.uplink(), Ipv4Addr::UNSPECIFIED.into());
            let present = element.map_or_else(link, |hop| hop.claim());
            spread::keeping(Some(present), &entry.guest)(hops)
        };
        let network = &self.network;
        match entry.is_from_world() && !entry.is_untranslated() {
            true => {
                let answers = self.datapath.world_tuple(slot);
                let transport = Transport::of(&answers);
                network.route_of_host(vm, remote, Some(entry.nat), transport, choose)
            }
            false => network.route_choosing(vm, remote, Transport::of(&entry.guest), choose),
        }
    }

    /// Returns the largest packet that a flow's uplink, and its route, carry, bytes. A hairpin flow
    /// has no link but its guest's.
    #[expect(unsafe_code, reason = "reads one word of a mapped element")]
    pub(crate) fn uplink_mtu(&self, slot: SlotIndex) -> u32 {
        if self.is_hairpin(slot) {
            return u16::MAX.into();
        }
        let live = self.datapath.slot(slot);
        let next_hop = live.next_hop().load(Relaxed);
        let hop = self.datapath.next_hop(next_hop);
        // SAFETY: `Tables::next_hop` gives a mapped element; a word is read, not a reference made.
        let mtu = |hop: *const NextHop| unsafe { (&raw const (*hop).mtu).read_volatile() };
        let known = hop.and_then(|hop| hop.read(mtu));
        known.filter(|mtu| *mtu >= MIN_MTU).unwrap_or_else(|| {
            let link_mtu = self.network.link_mtu(live.uplink());
            match self.route_of(slot) {
                Route::Via { mtu: Some(mtu), .. } => link_mtu.min(mtu),
                _ => link_mtu,
            }
        })
    }

    /// Returns the largest packet that both links of a flow carry, bytes.
    pub(crate) fn path_mtu(&self, vm: &VmNet, slot: SlotIndex) -> u32 {
        u32::from(vm.mtu).min(self.uplink_mtu(slot))
    }
}
