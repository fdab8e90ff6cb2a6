//! The host's network: its routes, its links, and the next hops that flows leave by.
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    net::{IpAddr, SocketAddr},
};

use ipnet::Ipv6Net;
use slipgate_abi::{IfIndex, Protocol, VmId};
use slipgate_model::{GuestIpv6, Link, route::OUT_THERE};
use slipgate_policy::EgressRoutes;

use super::{follow::Following, hops::Hops, pairing::Pairing};
use crate::{
    datapath::{Hop, Tables},
    dns::{Guest, Way, Ways},
    flow::Flows,
    packet::Version,
    route::{
        Choose, Difference, Query, Route, RouteTable,
        ask::{self, Answer, Ask, AskKernel, Asked, Question, Transport},
        spread,
    },
    vm::VmNet,
};

/// MTU assumed for a link whose MTU is not known, bytes: Ethernet's.
const DEFAULT_MTU: u32 = 1_500;
/// Most links whose names are remembered after they are gone.
const MAX_GONE: usize = 64;

/// The host's network as the broker last described it, and how far the flows follow it.
#[derive(Debug, Default)]
pub(crate) struct Network {
    pub(crate) routes: RouteTable,
    /// The kernel, which is asked about rules that a look-up can't judge; `None`: it can't be.
    asked: Option<Asked>,
    links: HashMap<IfIndex, Link, foldhash::fast::RandomState>,
    /// Names of links that are gone and had a next hop, for the records of flows that left by them, the
    /// last one last; at most [`MAX_GONE`].
    gone: VecDeque<(IfIndex, String)>,
    pub(crate) following: Following,
    pub(crate) hops: Hops,
    /// Uplinks of the VMs that have one of their own.
    vm_uplinks: HashMap<VmId, IfIndex, foldhash::fast::RandomState>,
    /// Routes of the VMs whose policies choose others than those of the table main.
    vm_routes: HashMap<VmId, EgressRoutes, foldhash::fast::RandomState>,
    /// Source addresses of the VMs that have a pool.
    pairings: HashMap<VmId, Pairing, foldhash::fast::RandomState>,
    /// Prefixes that are routed to VMs: a /64, or an address.
    routed: HashMap<VmId, Ipv6Net, foldhash::fast::RandomState>,
}

impl Ways for Network {
    fn are_hosts(&self, vm: VmId) -> bool {
        // The kernel routes the host's own packets by all that its rules say.
        let is_as_host = || self.vm_routes.get(&vm) == Some(&EgressRoutes::Host { mark: 0 });
        self.leaves_as_all(vm) || self.uplink_of(vm).is_none() && is_as_host()
    }

    /// Questions have an address of the host, also those of a VM with a routed prefix.
    fn way(&self, vm: VmId, resolver: SocketAddr, by: Protocol) -> Option<Way> {
        // Its own port is the kernel's to choose, later.
        let transport = Transport::to(by, resolver.port());
        match self.route_of_host(vm, resolver.ip(), None, transport, &mut spread::first) {
            Route::Via { ifindex, .. } => Some(Way {
                link: Some(ifindex),
            }),
            // A resolver on the host itself, which asks others as the host.
            Route::HostLocal => Some(Way::default()),
            _ => None,
        }
    }
}

impl Network {
    /// Sets the routes and starts a walk in which flows follow the changes.
    pub(crate) fn set_routes(&mut self, routes: RouteTable, flows: &Flows) {
        let difference = routes.difference_from(&self.routes);
        self.pairings.values().for_each(Pairing::look_again);
        self.routes = routes;
        if let Some(asked) = &mut self.asked {
            asked.forget();
        }
        self.following.extend(difference, flows);
    }

    /// Returns how many questions the kernel was asked so far.
    pub(crate) fn questions(&self) -> u64 {
        self.asked.as_ref().map_or(0, Asked::questions)
    }

    /// Sets whom to ask about rules of the host that a look-up can't judge.
    pub(crate) fn set_kernel(&mut self, kernel: Box<dyn AskKernel>) {
        self.asked = Some(Asked::new(kernel));
    }

    /// Looks up the route of a VM's packets to `addr`, of which no more is known, by the first of several
    /// next hops.
    pub(crate) fn route(&self, vm: VmId, addr: impl Into<IpAddr>) -> Route {
        let transport = Transport::default();
        self.route_choosing(vm, addr.into(), transport, &mut spread::first)
    }

    /// Looks up the route of a VM's packets to `addr`. `transport`: theirs, by which rules of the host
    /// may decide. `choose`: one of several next hops.
    pub(crate) fn route_choosing(
        &self,
        vm: VmId,
        addr: IpAddr,
        transport: Transport,
        choose: &mut Choose<'_>,
    ) -> Route {
        let query = self.query(vm, addr);
        let route = self.look_up(vm, &query, choose, &mut || self.ask(vm, &query, transport));
        self.of_pool(vm, addr, route)
    }

    /// Returns the rule of the host that a look-up for a VM's packets to `addr` can't judge, so that
    /// the kernel is asked: its priority; `None`: there is none.
    pub(crate) fn undecided_rule(&self, vm: VmId, addr: IpAddr) -> Option<u32> {
        let query = self.query(vm, addr);
        match self.look_up(vm, &query, &mut spread::first, &mut ask::nobody) {
            Route::Undecided { priority } => Some(priority),
            _ => None,
        }
    }

    /// Looks up the route of packets to `addr` that have an address of the host by a forward, `from`:
    /// that of a VM's pool or routed prefix is not theirs. `None`: they have none yet. `transport`:
    /// theirs. `choose`: one of several next hops.
    pub(crate) fn route_of_host(
        &self,
        vm: VmId,
        addr: IpAddr,
        from: Option<IpAddr>,
        transport: Transport,
        choose: &mut Choose<'_>,
    ) -> Route {
        let query = Query {
            uplink: self.uplink_of(vm),
            from,
            ..Query::to(addr)
        };
        self.look_up(vm, &query, choose, &mut || self.ask(vm, &query, transport))
    }

    /// Returns what is looked up for a VM's own packets to `addr`.
    fn query(&self, vm: VmId, addr: IpAddr) -> Query {
        // Packets of a routed prefix need no address of the host to leave from.
        let own = self.routed.get(&vm).filter(|_| addr.is_ipv6());
        let own = own.map(|prefix| IpAddr::V6(prefix.network()));
        // Rules of the host may be by the source.
        let has_rules = || own.is_none() && self.has_routes(vm);
        let pairing = self.pairings.get(&vm).filter(|_| has_rules());
        let paired = pairing.and_then(|pairing| pairing.address(addr.is_ipv6(), &self.routes));
        Query {
            uplink: self.uplink_of(vm),
            source: own.or(paired),
            ..Query::to(addr)
        }
    }

    /// Returns a route with the source that the VM's pool gives, if it has one.
    fn of_pool(&self, vm: VmId, addr: IpAddr, route: Route) -> Route {
        let has_own = addr.is_ipv6() && self.routed.contains_key(&vm);
        let pairing = self.pairings.get(&vm).filter(|_| !has_own);
        pairing.map_or(route, |pairing| pairing.applied_to(route, &self.routes))
    }

    fn look_up(
        &self,
        vm: VmId,
        query: &Query,
        choose: &mut Choose<'_>,
        ask: &mut Ask<'_>,
    ) -> Route {
        let egress = self.vm_routes.get(&vm);
        self.routes.lookup_for(egress, query, choose, ask)
    }

    /// Asks the kernel for the table of a VM's packets.
    fn ask(&self, vm: VmId, query: &Query, transport: Transport) -> Option<Answer> {
        let mark = self.vm_routes.get(&vm)?.mark()?;
        self.asked.as_ref()?.answer(Question {
            mark,
            to: query.to,
            from: query.rule_source(),
            transport,
        })
    }

    /// Returns the route of a VM's packets to `to` with the source `known`, which other flows of its
    /// guest's port have, if either source will do (RFC 4787 REQ-1): of IPv6, the host's addresses
    /// depend on the destination.
    pub(crate) fn keeping_source(
        &self,
        vm: VmId,
        route: Route,
        to: IpAddr,
        known: IpAddr,
    ) -> Route {
        match route {
            Route::Via {
                ifindex,
                next_hop,
                source,
                mtu,
            } if self.may_keep_source(vm, ifindex, to, (source, known)) => Route::Via {
                ifindex,
                next_hop,
                source: known,
                mtu,
            },
            route => route,
        }
    }

    /// Whether a VM's flow to `to` by this link may have the source `known` instead of `chosen`, which
    /// the route gives ([`RouteTable::may_keep_source`]). Where the VM's pool chooses, it may not.
    pub(super) fn may_keep_source(
        &self,
        vm: VmId,
        link: IfIndex,
        to: IpAddr,
        (chosen, known): (IpAddr, IpAddr),
    ) -> bool {
        let pairing = self.pairings.get(&vm);
        let is_free = pairing.is_none_or(|pairing| !pairing.pool().has_family(known.is_ipv6()));
        is_free && self.routes.may_keep_source(link, to, chosen, known)
    }

    /// Sets whether a VM's packets leave with their own addresses of IPv6.
    pub(crate) fn set_ipv6(&mut self, vm: VmId, ipv6: Option<&GuestIpv6>) {
        match ipv6.filter(|net| net.is_routed) {
            Some(net) => drop(self.routed.insert(vm, net.prefix)),
            None => drop(self.routed.remove(&vm)),
        }
    }

    /// Whether the ports of a VM's own addresses are shut: the host has an address in their prefix, so
    /// that what is sent there without a flow is the host's.
    pub(crate) fn are_own_ports_shut(&self, vm: VmId) -> bool {
        let prefix = self.routed.get(&vm);
        prefix.is_some_and(|prefix| self.routes.has_address_in(*prefix))
    }

    /// Returns the source addresses of a VM that has a pool.
    pub(crate) fn pairing(&self, vm: VmId) -> Option<&Pairing> {
        self.pairings.get(&vm)
    }

    /// Whether an address is of a VM's pool.
    pub(crate) fn is_pooled(&self, vm: VmId, address: IpAddr) -> bool {
        let pairing = self.pairings.get(&vm);
        pairing.is_some_and(|pairing| pairing.pool().contains(address))
    }

    /// Whether a VM's flow may be translated to this address of the host.
    pub(crate) fn may_be_translated_to(&self, vm: VmId, nat: IpAddr) -> bool {
        let is_own = nat.is_ipv6() && self.routed.contains_key(&vm);
        let pairing = self.pairings.get(&vm);
        is_own || pairing.is_none_or(|pairing| pairing.may_have(nat))
    }

    /// Sets the pool of a VM; an empty one: the routes choose. Returns whether it was another one.
    pub(crate) fn set_pool(&mut self, vm: &VmNet) -> bool {
        let pool = &vm.nat_addresses;
        if pool.is_empty() {
            return self.pairings.remove(&vm.id).is_some();
        }
        match self.pairings.entry(vm.id) {
            Entry::Occupied(mut known) => known.get_mut().change(pool),
            Entry::Vacant(new) => {
                new.insert(Pairing::new(&vm.name, pool.clone()));
                true
            }
        }
    }

    /// Forgets what a VM has of its own: it is removed.
    pub(crate) fn forget(&mut self, vm: VmId) {
        self.set_uplink(vm, None);
        self.set_routes_of(vm, None);
        self.set_ipv6(vm, None);
        self.pairings.remove(&vm);
    }

    /// Whether flows of a VM lead to IPv6: it has IPv6, and its packets to the internet would leave
    /// ([`RouteTable::leads_to_ipv6`]). Nothing else decides this.
    pub(crate) fn has_ipv6(&self, vm: &VmNet) -> bool {
        vm.ipv6.is_some() && matches!(self.route(vm.id, OUT_THERE), Route::Via { .. })
    }

    /// Returns a VM as the DNS proxy has to know it.
    pub(crate) fn guest<'a>(&'a self, vm: &'a VmNet) -> Guest<'a> {
        Guest {
            vm,
            has_ipv6: self.has_ipv6(vm),
            ways: self,
        }
    }

    /// Returns the uplink that a VM has of its own; [`IfIndex::NONE`] while it does not exist.
    pub(crate) fn uplink_of(&self, vm: VmId) -> Option<IfIndex> {
        self.vm_uplinks.get(&vm).copied()
    }

    /// Sets the uplink that a VM has of its own, or that it has none. Returns whether it had another
    /// one.
    pub(crate) fn set_uplink(&mut self, vm: VmId, uplink: Option<IfIndex>) -> bool {
        let before = match uplink {
            Some(uplink) => self.vm_uplinks.insert(vm, uplink),
            None => self.vm_uplinks.remove(&vm),
        };
        before != uplink
    }

    /// Whether a VM has neither an uplink of its own nor other routes than those of the table main.
    pub(crate) fn leaves_as_all(&self, vm: VmId) -> bool {
        self.uplink_of(vm).is_none() && !self.has_routes(vm)
    }

    /// Whether the only uplink by which a VM may leave does not exist.
    pub(super) fn waits(&self, vm: VmId) -> bool {
        let of_all = || self.routes.uplink().filter(|_| !self.has_routes(vm));
        let uplink = self.uplink_of(vm).or_else(of_all);
        uplink.is_some_and(|uplink| !uplink.is_some())
    }

    /// Whether answers of a VM's forward may leave by a link with this address, to which its client
    /// connected: those from another uplink's address would reach nobody, and tell who the guest is.
    pub(crate) fn answers_by(&self, vm: VmId, link: IfIndex, address: IpAddr) -> bool {
        self.leaves_as_all(vm) || self.routes.carries(link, address) || self.is_pooled(vm, address)
    }

    /// Whether packets of two VMs leave by the same uplink and the same routes.
    pub(crate) fn leave_alike(&self, one: VmId, other: VmId) -> bool {
        let way = |vm| {
            let routes = self.vm_routes.get(&vm);
            // No one link is the only one of routes that a policy chooses.
            let of_all = self.routes.uplink().filter(|_| routes.is_none());
            (routes, self.uplink_of(vm).or(of_all))
        };
        way(one) == way(other)
    }

    /// Whether a VM's policy chooses other routes than those of the table main.
    pub(crate) fn has_routes(&self, vm: VmId) -> bool {
        self.vm_routes.contains_key(&vm)
    }

    /// Sets the routes that a VM's policy chooses, or that it chooses none. Returns whether it had
    /// chosen others.
    pub(crate) fn set_routes_of(&mut self, vm: VmId, routes: Option<&EgressRoutes>) -> bool {
        let before = match routes {
            Some(routes) => self.vm_routes.insert(vm, routes.clone()),
            None => self.vm_routes.remove(&vm),
        };
        before.as_ref() != routes
    }

    /// Sets the links. When one changes between having an L2 header and having none, all flows are
    /// examined: next hops are known by it.
    pub(crate) fn set_links(&mut self, links: &[Link], flows: &Flows) {
        let links: HashMap<_, Link, _> = links
            .iter()
            .map(|link| (link.ifindex, link.clone()))
            .collect();
        let differs = links
            .values()
            .any(|link| self.has_l2(link.ifindex) != link.has_l2);
        let before = std::mem::replace(&mut self.links, links);
        for (ifindex, link) in before {
            if !self.links.contains_key(&ifindex) && self.hops.leave_by(ifindex) {
                self.gone.push_back((ifindex, link.name));
            }
        }
        self.gone.drain(..self.gone.len().saturating_sub(MAX_GONE));
        if differs {
            self.hops.forget_known();
            self.following.extend(Difference::everything(), flows);
        }
    }

    /// Returns the links by which flows may leave.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// Returns the name of a link, also of one that went while flows left by it.
    pub(super) fn link_name(&self, ifindex: IfIndex) -> Option<&str> {
        let gone = || self.gone.iter().rfind(|(of, _)| *of == ifindex);
        match self.links.get(&ifindex) {
            Some(link) => Some(&link.name),
            None => gone().map(|(_, name)| name.as_str()),
        }
    }

    /// Whether a link's packets have an L2 header.
    pub(super) fn has_l2(&self, ifindex: IfIndex) -> bool {
        self.links.get(&ifindex).is_none_or(|link| link.has_l2)
    }

    /// Returns the largest packet that a link carries, bytes.
    pub(super) fn link_mtu(&self, ifindex: IfIndex) -> u32 {
        let link = self.links.get(&ifindex);
        link.map_or(DEFAULT_MTU, |link| link.mtu)
    }

    /// Returns the index of the element of `NEXT_HOPS` for a next hop toward `destination`, or 0
    /// when there is none.
    pub(super) fn next_hop(
        &mut self,
        tables: &mut impl Tables,
        mut hop: Hop,
        destination: IpAddr,
    ) -> u32 {
        // A link without L2 has one next hop for all neighbours.
        if !self.has_l2(hop.ifindex) {
            hop.neighbour = Version::of(hop.neighbour).unspecified();
        }
        self.hops.index_of(tables, hop, destination)
    }
}
