//! The state from which decisions are made: flows, VMs, rules, routes.
use std::{
    collections::{HashMap, VecDeque},
    net::Ipv4Addr,
    rc::Rc,
};

use slipgate_abi::{Protocol, Tuple, maps::MAX_VMS};
use slipgate_model::Link;

use crate::{
    datapath::Datapath,
    flow::Flows,
    name_gate::{LearntName, SharedJudge},
    port::Outbox,
    quota::{self, TokenBucket, worlds_rate::WorldsRate},
    record::Refusals,
    reply::Answers,
    route::{Difference, RouteTable},
    stats::VmStats,
    vm::VmNet,
};

mod credits;
pub(crate) mod follow;
pub(crate) mod hops;
mod openings;

/// A port of the host that leads to a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Address on the host; 0.0.0.0: any.
    pub host: Ipv4Addr,
    /// Port on the host.
    pub host_port: u16,
    /// Id of the VM.
    pub vm: u32,
    /// Row of the VM.
    pub vm_row: u16,
    /// Port of the guest.
    pub guest_port: u16,
    /// Element of `RULES` that the forward's flows show.
    pub rule: u32,
}

/// State that the engine keeps of a VM.
#[derive(Clone, Debug)]
pub(crate) struct VmState {
    pub(crate) net: VmNet,
    pub(crate) new_flows: TokenBucket,
    /// Part of the rate of new flows that the world may use.
    pub(crate) from_world: WorldsRate,
    pub(crate) answers: Answers,
    /// Answers about flows that are cut.
    pub(crate) cut_answers: Answers,
    /// Whether the engine carries the VM's new flows, for a capture.
    pub(crate) is_captured: bool,
    pub(crate) collect_after_ns: [u64; 2],
    /// Connections to, and exchanges with, the host's loopback, as of the VM's last packet.
    pub(crate) loopback_flows: u32,
    /// Credits of the guest's frames, and of the world's.
    pub(crate) credits: [crate::state::credits::Snapshot; 2],
}

impl VmState {
    fn new(net: VmNet) -> Self {
        let (new_flows, from_world) = rates(&net);
        Self {
            new_flows,
            from_world,
            net,
            answers: Answers::new(),
            cut_answers: Answers::about_cuts(),
            is_captured: false,
            collect_after_ns: [0; 2],
            loopback_flows: 0,
            credits: Default::default(),
        }
    }
}

/// Returns the rate limit of all new flows, and that of flows that the world opens. A burst of one
/// second's worth is allowed: a browser's or a build's burst is no attack.
fn rates(net: &VmNet) -> (TokenBucket, WorldsRate) {
    let all = net.new_flows_per_second;
    let world = quota::worlds_share(all);
    (TokenBucket::new(all, all), WorldsRate::new(world))
}

/// All state that a decision reads and changes.
#[derive(Debug)]
pub(crate) struct Core<D> {
    pub(crate) datapath: D,
    pub(crate) flows: Flows,
    pub(crate) judge: SharedJudge,
    /// Names that opened live flows' addresses, by slot, each with the slot's generation.
    pub(crate) opened_by: HashMap<u32, (u32, Rc<LearntName>)>,
    /// Refusals, for the records.
    pub(crate) refusals: Refusals,
    /// Whether starts of flows are recorded.
    pub(crate) records_starts: bool,
    pub(crate) started: Vec<u32>,
    pub(crate) routes: RouteTable,
    /// First element of `RULES` that is this process's.
    pub(crate) rule_base: u32,
    pub(crate) rule_texts: crate::record::rule_texts::RuleTexts,
    pub(crate) out: Outbox,
    /// Buffer for a packet that is being changed.
    pub(crate) scratch: Vec<u8>,
    /// IPv4 identification of the last packet fragmented.
    pub(crate) identification: u16,
    vms: Vec<Option<Box<VmState>>>,
    rows: HashMap<u32, u16>,
    /// Names of VMs that went lately, for the records of their last flows.
    departed: VecDeque<(u32, String)>,
    pub(crate) forwards: HashMap<(Protocol, Ipv4Addr, u16), Forward>,
    pub(crate) find_guests_at_ns: u64,
    links: HashMap<u32, Link>,
    pub(crate) following: crate::state::follow::Following,
    pub(crate) hops: crate::state::hops::Hops,
    /// Sessions of the flows under inspect rules.
    pub(crate) inspected: crate::inspection::sessions::Inspected,
}

/// MTU assumed for a link whose MTU is not known, bytes: Ethernet's.
const DEFAULT_MTU: u32 = 1_500;

impl<D: Datapath> Core<D> {
    pub(crate) fn new(datapath: D, flows: Flows, judge: SharedJudge, rule_base: u32) -> Self {
        Self {
            datapath,
            flows,
            judge,
            opened_by: HashMap::new(),
            refusals: Refusals::default(),
            records_starts: false,
            started: Vec::new(),
            routes: RouteTable::default(),
            rule_base,
            rule_texts: crate::record::rule_texts::RuleTexts::default(),
            out: Outbox::new(4 << 20),
            scratch: Vec::with_capacity(2_048),
            identification: rand::random(),
            vms: (0..MAX_VMS).map(|_| None).collect(),
            rows: HashMap::new(),
            departed: VecDeque::new(),
            forwards: HashMap::new(),
            find_guests_at_ns: 0,
            links: HashMap::new(),
            following: crate::state::follow::Following::default(),
            hops: crate::state::hops::Hops::default(),
            inspected: crate::inspection::sessions::Inspected::default(),
        }
    }

    /// Takes out a VM's state while a packet is handled; [`Core::put_vm`] returns it. `None` when
    /// the row does not belong to that VM (any more).
    pub(crate) fn take_vm(&mut self, row: u16, id: u32) -> Option<Box<VmState>> {
        self.vms
            .get_mut(usize::from(row))?
            .take_if(|vm| vm.net.id == id)
    }

    pub(crate) fn put_vm(&mut self, vm: Box<VmState>) {
        let row = usize::from(vm.net.row);
        self.vms[row] = Some(vm);
    }

    /// Returns a VM by its row.
    pub(crate) fn vm(&self, row: u16) -> Option<&VmState> {
        self.vms.get(usize::from(row))?.as_deref()
    }

    pub(crate) fn vm_mut(&mut self, row: u16) -> Option<&mut VmState> {
        self.vms.get_mut(usize::from(row))?.as_deref_mut()
    }

    /// Sets whether the engine, instead of the kernel, carries the flows that a VM opens from now
    /// on.
    pub(crate) fn capture_new_flows(&mut self, row: u16, captured: bool) {
        if let Some(vm) = self.vm_mut(row) {
            vm.is_captured = captured;
        }
    }

    /// Returns a VM by its id.
    pub(crate) fn vm_by_id(&self, id: u32) -> Option<&VmState> {
        self.vm(*self.rows.get(&id)?)
    }

    /// Returns the rows that have a VM, for a loop that changes each.
    pub(crate) fn rows(&self) -> Vec<u16> {
        self.rows.values().copied().collect()
    }

    pub(crate) fn vms(&self) -> impl Iterator<Item = &VmState> {
        self.rows.values().filter_map(|row| self.vm(*row))
    }

    /// Adds a VM, or replaces the description of the one with the same id and keeps the state of
    /// its rate limits.
    pub(crate) fn set_vm(&mut self, net: VmNet) {
        let Some(place) = self.vms.get_mut(usize::from(net.row)) else {
            return;
        };
        self.judge.borrow_mut().assign(net.id, net.policy);
        self.flows.set_cap(net.row, net.max_flows);
        self.rows.insert(net.id, net.row);
        self.flows.share_among(self.rows.len());
        match place {
            Some(vm) if vm.net.id == net.id => {
                if vm.net.new_flows_per_second != net.new_flows_per_second {
                    (vm.new_flows, vm.from_world) = rates(&net);
                }
                vm.net = net;
            }
            _ => *place = Some(Box::new(VmState::new(net))),
        }
    }

    /// Removes a VM. Returns whether it was in that row. The caller ends its flows.
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
        self.judge.borrow_mut().forget(id);
        self.inspected.forget_vm(id);
        self.departed.push_back((id, vm.net.name.clone()));
        true
    }

    /// Returns a VM's name, also for a while after its removal; empty when it is not known.
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

    /// Returns the counters for packets that belong to no VM.
    pub(crate) fn nobody(&self) -> VmStats {
        self.datapath.stats(0)
    }

    pub(crate) fn set_forwards(&mut self, forwards: Vec<Forward>) {
        self.forwards = forwards
            .into_iter()
            .map(|f| ((f.protocol, f.host, f.host_port), f))
            .collect();
    }

    /// Returns the forward of this VM that a packet from the world matches: one of its destination
    /// address, else one of any address. A packet to loopback that arrives by a link matches none:
    /// those forwards are for the host alone.
    pub(crate) fn forward_for(&self, world: &Tuple, vm: u32) -> Option<Forward> {
        if world.local.is_loopback() {
            return None;
        }
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
        let links: HashMap<u32, Link> = links.iter().map(|link| (link.ifindex, *link)).collect();
        // Next hops are known by whether their link has L2.
        let differs = links
            .values()
            .any(|link| self.has_l2(link.ifindex) != link.has_l2);
        self.links = links;
        if differs {
            self.hops.forget_known();
            self.follow(Difference::everything());
        }
    }

    /// Whether a link's packets have an L2 header.
    pub(crate) fn has_l2(&self, ifindex: u32) -> bool {
        self.links.get(&ifindex).is_none_or(|link| link.has_l2)
    }

    /// Returns the largest packet that a link carries, bytes.
    pub(crate) fn link_mtu(&self, ifindex: u32) -> u32 {
        let link = self.links.get(&ifindex);
        link.map_or(DEFAULT_MTU, |link| link.mtu)
    }

    /// Returns the largest packet that both links of a flow carry, bytes.
    pub(crate) fn path_mtu(&self, vm: &VmNet, slot: u32) -> u32 {
        u32::from(vm.mtu).min(self.uplink_mtu(slot))
    }
}
