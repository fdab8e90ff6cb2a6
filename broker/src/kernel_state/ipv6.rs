//! Which guests have IPv6.
//!
//! With `auto` a guest has it once its uplink leads to IPv6, or the routes that its policy names do, and
//! keeps it then: addresses and routes of a host come and go, and a guest that got its own addresses
//! would not notice that they are taken away. While nothing leads there, names have no IPv6 addresses
//! for it, so nothing of the guest waits.
use std::{collections::HashMap, net::IpAddr};

use slipgate_abi::Ip6;
use slipgate_control::{
    netlink::{Network, Route, Table},
    vm,
};
use slipgate_ipc::{client::GuestIpv6Status, engine::VmSpec};
use slipgate_model::{
    GuestIpv6, IfIndex, Ipv6Mode, RouteSnapshot,
    route::{OUT_THERE, RouteTable},
};
use slipgate_policy::EgressRoutes;

use super::{Attached, ServedVm, network_view, vms::ipv6_in_row};
use crate::config::{GuestNetwork, MIN_MTU6, VmConfig};

/// Configured IPv6 of a VM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ipv6Wish {
    mode: Ipv6Mode,
    net: GuestIpv6,
}

impl Ipv6Wish {
    /// That of a VM in these guests' network.
    pub(crate) fn of(config: &VmConfig, network: &GuestNetwork) -> Self {
        Self {
            mode: config.ipv6.unwrap_or(network.ipv6),
            net: GuestIpv6 {
                prefix: config.ipv6_prefix.unwrap_or(network.ipv6_prefix),
                is_routed: config.ipv6.unwrap_or(network.ipv6) == Ipv6Mode::Routed,
            },
        }
    }

    /// Returns the IPv6 network that the VM gets with this MTU of its link; `None`: it has none, or not
    /// yet. `link`: as it is called. `leads`: whether its uplink leads to IPv6.
    pub(crate) fn granted(
        self,
        (name, link, mtu): (&str, &str, u32),
        leads: impl FnOnce() -> bool,
    ) -> Option<GuestIpv6> {
        if self.mode != Ipv6Mode::Off && mtu < MIN_MTU6 {
            tracing::warn!(
                "{name} has no IPv6: the MTU of {link} is {mtu} bytes, and IPv6 takes {MIN_MTU6}"
            );
            return None;
        }
        let is_on = match self.mode {
            Ipv6Mode::Off => false,
            Ipv6Mode::Nat | Ipv6Mode::Routed => true,
            Ipv6Mode::Auto => leads(),
        };
        is_on.then_some(self.net)
    }

    /// Returns the IPv6 network that the VM waits for, until its uplink leads to IPv6; `None`: it
    /// waits for none. `has`: what it has; `mtu`: of its link.
    pub(crate) fn awaited(self, has: Option<GuestIpv6>, mtu: u32) -> Option<GuestIpv6> {
        // One whose link is too narrow was warned of when it came.
        let waits = has.is_none() && self.mode == Ipv6Mode::Auto && mtu >= MIN_MTU6;
        waits.then_some(self.net)
    }
}

/// Whether an uplink leads to IPv6 now. The engine decides the same for names, by the same function.
pub(crate) fn leads_to_ipv6(network: &Network, uplink: IfIndex) -> bool {
    // The other routes of a host may be many, and none of them decides.
    let decides =
        |route: &&Route| !matches!(route.table, Table::Other(_)) && route.covers(OUT_THERE);
    let snapshot = RouteSnapshot {
        uplink_ifindex: Some(uplink),
        addresses: network_view::addresses(network).collect(),
        routes: network_view::routes(network.routes.iter().filter(decides)).collect(),
        ..RouteSnapshot::default()
    };
    RouteTable::new(&snapshot).leads_to_ipv6(Some(uplink))
}

/// How flows of a VM leave, as far as it decides whether they lead to IPv6.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct WayOut {
    /// Only link by which they may leave; `None`: any that the routes name.
    uplink: Option<IfIndex>,
    /// Routes that the policy names.
    routes: Option<EgressRoutes>,
    /// Source address that rules of the host compare, if a pool gives one.
    from: Option<IpAddr>,
}

impl Attached {
    /// Returns the IPv6 network that a VM with this MTU of its link gets; `None`: it has none, or
    /// not yet.
    pub(super) fn guest_ipv6(&self, config: &VmConfig, mtu: u32) -> Option<GuestIpv6> {
        self.ipv6_wish(config)
            .granted((&config.name, &config.tap, mtu), || {
                self.leads(&self.way_out(config))
            })
    }

    fn way_out(&self, vm: &VmConfig) -> WayOut {
        let Some(routes) = self.routes_of(vm) else {
            return WayOut {
                uplink: self.uplink_of(vm),
                routes: None,
                from: None,
            };
        };
        let names_one = self.uplink_named_by(vm).is_some();
        WayOut {
            // One that does not exist is none of the host's.
            uplink: names_one.then(|| self.uplink_of(vm).unwrap_or(IfIndex::NONE)),
            routes: Some(routes.clone()),
            from: self.pool_of(vm).of_family(true).next(),
        }
    }

    fn leads(&self, way: &WayOut) -> bool {
        match (&way.routes, way.uplink) {
            (Some(routes), uplink) => self.domain_leads_to_ipv6(routes, uplink, way.from),
            (None, Some(uplink)) => leads_to_ipv6(self.watch.network(), uplink),
            (None, None) => false,
        }
    }

    fn ipv6_wish(&self, config: &VmConfig) -> Ipv6Wish {
        Ipv6Wish::of(config, &self.config.network)
    }

    /// Returns the uplink of a VM; `None`: its own one is not there.
    pub(super) fn uplink_of(&self, config: &VmConfig) -> Option<IfIndex> {
        let Some(name) = self.uplink_named_by(config) else {
            return Some(self.uplink.ifindex);
        };
        let link = self.watch.network().link_by_name(name);
        link.map(|link| link.ifindex)
    }

    /// Gives IPv6 to VMs that have waited for it, because their uplinks or routes lead there now.
    /// Returns them for the engines, each with its worker. To be called after a change of routes,
    /// addresses or policies. It looks at all VMs only while some wait and something leads to IPv6,
    /// which is once, and at each way out once.
    pub(crate) fn follow_ipv6(&mut self) -> Vec<(usize, VmSpec)> {
        let has_routes = self
            .watch
            .network()
            .routes
            .iter()
            .any(|route| route.covers(OUT_THERE));
        if !has_routes {
            return Vec::new();
        }
        let awaited = |vm: &ServedVm| self.ipv6_wish(&vm.config).awaited(vm.ipv6, vm.mtu);
        let waiting: Vec<(usize, GuestIpv6)> = (0..self.vms.len())
            .filter_map(|at| Some((at, awaited(&self.vms[at])?)))
            .collect();
        let mut told = Vec::new();
        let mut leading = PerWayOut::default();
        for (at, net) in waiting {
            let way = self.way_out(&self.vms[at].config);
            if leading.of(way, |way| self.leads(way)) {
                self.give_ipv6(at, net);
                let vm = &self.vms[at];
                if vm.is_up {
                    told.push((vm.worker, self.vm_spec(vm)));
                }
            }
        }
        told
    }

    /// Gives IPv6 to one VM that has waited for it, if its uplink or routes lead there now. To be
    /// called after a change of its definition; the engine is not told.
    pub(crate) fn follow_ipv6_of(&mut self, at: usize) {
        let vm = &self.vms[at];
        let awaited = self.ipv6_wish(&vm.config).awaited(vm.ipv6, vm.mtu);
        if let Some(net) = awaited
            && self.leads(&self.way_out(&vm.config))
        {
            self.give_ipv6(at, net);
        }
    }

    fn give_ipv6(&mut self, at: usize, net: GuestIpv6) {
        let vm = &self.vms[at];
        vm::set_ipv6(self.datapath.maps(), vm.open.row, Some(ipv6_in_row(&net)));
        let name = &vm.config.name;
        match self.routes_of(&vm.config) {
            None => tracing::info!("{name} has IPv6 now: its uplink leads there"),
            Some(_) => tracing::info!("{name} has IPv6 now: its policy's routes lead there"),
        }
        self.vms[at].ipv6 = Some(net);
    }

    /// Returns the IPv6 of a VM's guest as clients see it.
    pub(super) fn ipv6_status(&self, vm: &ServedVm) -> Option<GuestIpv6Status> {
        let net = vm.ipv6?;
        let row = self.datapath.maps().vm6(vm.open.row)?.copy();
        Some(ipv6_status(&net, row.guests))
    }
}

/// Returns the IPv6 of a guest as clients see it. `bound`: the addresses of its row, `::` in free places.
pub(crate) fn ipv6_status(
    net: &GuestIpv6,
    bound: impl IntoIterator<Item = Ip6>,
) -> GuestIpv6Status {
    let bound = bound.into_iter().filter(|it| !it.is_unspecified());
    GuestIpv6Status {
        prefix: net.prefix.to_string(),
        gateway: net.gateway(),
        addresses: bound.map(std::net::Ipv6Addr::from).collect(),
    }
}

/// Results of checks of ways out during one event: each is checked once, however many VMs have it.
#[derive(Debug, Default)]
struct PerWayOut(HashMap<WayOut, bool>);

impl PerWayOut {
    fn of(&mut self, way: WayOut, look: impl FnOnce(&WayOut) -> bool) -> bool {
        if let Some(known) = self.0.get(&way) {
            return *known;
        }
        let leads = look(&way);
        self.0.insert(way, leads);
        leads
    }
}

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
