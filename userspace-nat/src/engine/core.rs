//! What decisions are made from: flows, VMs, rules, routes.
use std::{
    collections::{HashMap, HashSet, VecDeque},
    net::Ipv4Addr,
};

use slipgate_abi::{Ip4, Protocol, Tuple, maps::MAX_VMS};

use super::control::{Forward, Link};
use crate::{
    datapath::Datapath, flow::Flows, port::Outbox, quota::TokenBucket, reply::Answers,
    route::RouteTable, rules::Policy, stats::VmStats, vm::VmNet,
};

/// A VM as the engine keeps it.
#[derive(Clone, Debug)]
pub(crate) struct VmState {
    pub(crate) net: VmNet,
    pub(crate) new_flows: TokenBucket,
    pub(crate) answers: Answers,
    pub(crate) collect_after_ns: u64,
    pub(crate) credits: super::credits::Snapshot,
}

impl VmState {
    fn new(net: VmNet) -> Self {
        // A second's worth at once: a browser's or a build's burst is no attack.
        let rate = net.new_flows_per_second;
        Self {
            new_flows: TokenBucket::new(rate, rate),
            net,
            answers: Answers::new(),
            collect_after_ns: 0,
            credits: super::credits::Snapshot::default(),
        }
    }
}

/// Everything a decision needs, and what it changes.
#[derive(Debug)]
pub(crate) struct Core<D> {
    pub(crate) datapath: D,
    pub(crate) flows: Flows,
    pub(crate) policy: Policy,
    pub(crate) routes: RouteTable,
    /// The first element of `RULES` that is ours.
    pub(crate) rule_base: u32,
    pub(crate) out: Outbox,
    /// A packet being changed.
    pub(crate) scratch: Vec<u8>,
    /// IPv4 identification of the last packet fragmented.
    pub(crate) identification: u16,
    vms: Vec<Option<Box<VmState>>>,
    rows: HashMap<u32, u16>,
    /// Names of VMs that went lately, for the records of their last flows.
    departed: VecDeque<(u32, String)>,
    pub(super) forwards: HashMap<(Protocol, Ipv4Addr, u16), Forward>,
    pub(super) find_guests_at_ns: u64,
    links: HashMap<u32, Link>,
    /// Neighbours that were claimed because a guest spoke to them, not because they route.
    on_link_hops: HashSet<(u32, Ip4)>,
    next_hops: hashbrown::HashMap<(u32, Ip4), u32, foldhash::fast::RandomState>,
}

/// Most next hops remembered: on-link neighbours of a /20.
const MAX_NEXT_HOPS: usize = 4_096;
/// Most on-link destinations that get a next hop of their own. Each costs the host a neighbour
/// entry that it keeps fresh, and guests choose them; the kernel resolves the rest by packet.
const MAX_ON_LINK_HOPS: usize = 256;
/// Largest packet of a link whose MTU is not known, bytes: Ethernet's.
const DEFAULT_MTU: u32 = 1_500;

impl<D: Datapath> Core<D> {
    pub(crate) fn new(datapath: D, flows: Flows, policy: Policy, rule_base: u32) -> Self {
        Self {
            datapath,
            flows,
            policy,
            routes: RouteTable::default(),
            rule_base,
            out: Outbox::new(4 << 20),
            scratch: Vec::with_capacity(2_048),
            identification: rand::random(),
            vms: (0..MAX_VMS).map(|_| None).collect(),
            rows: HashMap::new(),
            departed: VecDeque::new(),
            forwards: HashMap::new(),
            find_guests_at_ns: 0,
            links: HashMap::new(),
            on_link_hops: HashSet::new(),
            next_hops: hashbrown::HashMap::default(),
        }
    }

    /// Takes a VM's state out for the time of a packet; [`Core::put_vm`] brings it back. `None`
    /// when the row is not that VM's (any more).
    pub(crate) fn take_vm(&mut self, row: u16, id: u32) -> Option<Box<VmState>> {
        self.vms
            .get_mut(usize::from(row))?
            .take_if(|vm| vm.net.id == id)
    }

    pub(crate) fn put_vm(&mut self, vm: Box<VmState>) {
        let row = usize::from(vm.net.row);
        self.vms[row] = Some(vm);
    }

    /// A VM by its row.
    pub(crate) fn vm(&self, row: u16) -> Option<&VmState> {
        self.vms.get(usize::from(row))?.as_deref()
    }

    pub(crate) fn vm_mut(&mut self, row: u16) -> Option<&mut VmState> {
        self.vms.get_mut(usize::from(row))?.as_deref_mut()
    }

    /// A VM by its id.
    pub(crate) fn vm_by_id(&self, id: u32) -> Option<&VmState> {
        self.vm(*self.rows.get(&id)?)
    }

    /// The rows that have a VM, for going through all while changing each.
    pub(crate) fn rows(&self) -> Vec<u16> {
        self.rows.values().copied().collect()
    }

    pub(crate) fn vms(&self) -> impl Iterator<Item = &VmState> {
        self.rows.values().filter_map(|row| self.vm(*row))
    }

    /// Adds a VM, or changes one that is there with the same id, keeping its rates' state.
    pub(crate) fn set_vm(&mut self, net: VmNet) {
        let Some(place) = self.vms.get_mut(usize::from(net.row)) else {
            return;
        };
        self.flows.set_closed_limit(net.row, net.max_flows);
        self.rows.insert(net.id, net.row);
        self.flows.share_among(self.rows.len());
        match place {
            Some(vm) if vm.net.id == net.id => {
                if vm.net.new_flows_per_second != net.new_flows_per_second {
                    vm.new_flows =
                        TokenBucket::new(net.new_flows_per_second, net.new_flows_per_second);
                }
                vm.net = net;
            }
            _ => *place = Some(Box::new(VmState::new(net))),
        }
    }

    /// Removes a VM; its flows are the caller's to end.
    pub(crate) fn remove_vm(&mut self, row: u16, id: u32) -> bool {
        self.rows.remove(&id);
        self.flows.share_among(self.rows.len());
        let place = self.vms.get_mut(usize::from(row));
        let Some(vm) = place.and_then(|place| place.take_if(|vm| vm.net.id == id)) else {
            return false;
        };
        if self.departed.len() >= MAX_VMS as usize {
            self.departed.pop_front();
        }
        self.departed.push_back((id, vm.net.name.clone()));
        true
    }

    /// A VM's name, also for a while after it went; empty when it is not known.
    pub(crate) fn name_of(&self, id: u32) -> &str {
        let departed = || {
            self.departed
                .iter()
                .find(|(d, _)| *d == id)
                .map(|(_, name)| name)
        };
        self.vm_by_id(id)
            .map(|vm| &vm.net.name)
            .or_else(departed)
            .map_or("", |name| name)
    }

    /// Where what belongs to no VM is counted.
    pub(crate) fn nobody(&self) -> VmStats {
        self.datapath.stats(0)
    }

    pub(crate) fn set_forwards(&mut self, forwards: Vec<Forward>) {
        self.forwards = forwards
            .into_iter()
            .map(|f| ((f.protocol, f.host, f.host_port), f))
            .collect();
    }

    /// The forward of this VM that a packet from the world meets: of its address, else of any.
    pub(crate) fn forward_for(&self, world: &Tuple, vm: u32) -> Option<Forward> {
        let protocol = Protocol::from_ip(world.protocol)?;
        let of = |host| {
            self.forwards
                .get(&(protocol, host, world.local_port))
                .copied()
        };
        of(world.local.into())
            .or_else(|| of(Ipv4Addr::UNSPECIFIED))
            .filter(|forward| forward.vm == vm)
    }

    pub(crate) fn set_links(&mut self, links: &[Link]) {
        self.links = links.iter().map(|link| (link.ifindex, *link)).collect();
        self.next_hops.clear();
    }

    /// The element of `NEXT_HOPS` for a neighbour on the way to `destination`, or 0.
    pub(crate) fn next_hop(&mut self, ifindex: u32, neighbour: Ip4, destination: Ip4) -> u32 {
        let has_l2 = self.links.get(&ifindex).is_none_or(|link| link.has_l2);
        // A link without L2 has one next hop, whoever is behind it.
        let neighbour = Some(neighbour).filter(|_| has_l2);
        let neighbour = neighbour.unwrap_or(Ip4::UNSPECIFIED);
        let hop = (ifindex, neighbour);
        if let Some(index) = self.next_hops.get(&hop) {
            return *index;
        }
        let on_link = neighbour == destination && !self.on_link_hops.contains(&hop);
        if on_link && self.on_link_hops.len() >= MAX_ON_LINK_HOPS {
            return 0;
        }
        let index = self.datapath.next_hop_for(ifindex, neighbour);
        // None to be had now may be one to be had later.
        if index == 0 {
            return 0;
        }
        if self.next_hops.len() >= MAX_NEXT_HOPS {
            self.next_hops.clear();
        }
        self.next_hops.insert(hop, index);
        if on_link {
            self.on_link_hops.insert(hop);
        }
        index
    }

    /// Largest packet by a link, bytes.
    pub(crate) fn link_mtu(&self, ifindex: u32) -> u32 {
        let link = self.links.get(&ifindex);
        link.map_or(DEFAULT_MTU, |link| link.mtu)
    }

    /// Largest packet that both of a flow's links carry, bytes.
    pub(crate) fn path_mtu(&self, vm: &VmNet, slot: u32) -> u32 {
        let uplink = self.datapath.slot(slot).uplink_ifindex();
        u32::from(vm.mtu).min(self.link_mtu(uplink))
    }
}
