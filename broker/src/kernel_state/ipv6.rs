//! Which guests have IPv6.
//!
//! With `auto` a guest has it once its uplink leads to IPv6, and keeps it then: addresses and routes
//! of a host come and go, and a guest that got its own addresses would not notice that they are
//! taken away. While the uplink leads nowhere, names have no IPv6 addresses for it, so nothing of
//! the guest waits.
use std::collections::HashMap;

use ipnet::IpNet;
use slipgate_control::{
    netlink::{Network, Table},
    vm,
};
use slipgate_ipc::{client::GuestIpv6Status, engine::VmSpec};
use slipgate_model::{
    GuestIpv6, IfIndex, Ipv6Mode, RouteSnapshot,
    route::{OUT_THERE, RouteTable},
};

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
    let covers = |route: &&slipgate_control::netlink::Route| {
        let prefix = IpNet::new(route.destination, route.prefix_len);
        let is_main = !matches!(route.table, Table::Other(_));
        is_main && prefix.is_ok_and(|prefix| prefix.contains(&std::net::IpAddr::V6(OUT_THERE)))
    };
    let snapshot = RouteSnapshot {
        uplink_ifindex: Some(uplink),
        addresses: network_view::addresses(network).collect(),
        routes: network_view::routes(network.routes.iter().filter(covers)).collect(),
        ..RouteSnapshot::default()
    };
    RouteTable::new(&snapshot).leads_to_ipv6(Some(uplink))
}

impl Attached {
    /// Returns the IPv6 network that a VM with this MTU of its link gets; `None`: it has none, or
    /// not yet.
    pub(super) fn guest_ipv6(&self, config: &VmConfig, mtu: u32) -> Option<GuestIpv6> {
        self.ipv6_wish(config)
            .granted((&config.name, &config.tap, mtu), || {
                self.uplink_of(config)
                    .is_some_and(|uplink| leads_to_ipv6(self.watch.network(), uplink))
            })
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

    /// Gives IPv6 to VMs that have waited for it, because their uplinks lead there now. Returns
    /// them for the engines, each with its worker. To be called after a change of routes or
    /// addresses. It looks at all VMs only while some wait and something leads to IPv6, which is
    /// once, and at each uplink once.
    pub(crate) fn follow_ipv6(&mut self) -> Vec<(usize, VmSpec)> {
        let has_routes = self
            .watch
            .network()
            .routes
            .iter()
            .any(|route| route.destination.is_ipv6() && route.prefix_len <= 3);
        if !has_routes {
            return Vec::new();
        }
        let awaited = |vm: &ServedVm| self.ipv6_wish(&vm.config).awaited(vm.ipv6, vm.mtu);
        let waiting: Vec<(usize, GuestIpv6)> = (0..self.vms.len())
            .filter_map(|at| Some((at, awaited(&self.vms[at])?)))
            .collect();
        let mut told = Vec::new();
        let mut leading = PerUplink::default();
        for (at, net) in waiting {
            let vm = &self.vms[at];
            let uplink = self.uplink_of(&vm.config);
            let network = self.watch.network();
            if !uplink.is_some_and(|uplink| leading.of(uplink, |at| leads_to_ipv6(network, at))) {
                continue;
            }
            vm::set_ipv6(self.datapath.maps(), vm.open.row, Some(ipv6_in_row(&net)));
            self.vms[at].ipv6 = Some(net);
            let vm = &self.vms[at];
            tracing::info!("{} has IPv6 now: its uplink leads there", vm.config.name);
            if vm.is_up {
                told.push((vm.worker, self.vm_spec(vm)));
            }
        }
        told
    }

    /// Returns the IPv6 of a VM's guest as clients see it.
    pub(super) fn ipv6_status(&self, vm: &ServedVm) -> Option<GuestIpv6Status> {
        let net = vm.ipv6?;
        let row = self.datapath.maps().vm6(vm.open.row)?.copy();
        let bound = row.guests.into_iter().map(std::net::Ipv6Addr::from);
        Some(GuestIpv6Status {
            prefix: net.prefix.to_string(),
            gateway: net.gateway(),
            addresses: bound.filter(|address| !address.is_unspecified()).collect(),
        })
    }
}

/// Results of checks of uplinks during one event: each is checked once, however many VMs have it.
#[derive(Debug, Default)]
struct PerUplink(HashMap<IfIndex, bool>);

impl PerUplink {
    fn of(&mut self, uplink: IfIndex, look: impl FnOnce(IfIndex) -> bool) -> bool {
        *self.0.entry(uplink).or_insert_with(|| look(uplink))
    }
}

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
