//! Which guests have IPv6.
//!
//! With `auto` a guest has it once its uplink leads to IPv6, and keeps it then: addresses and routes
//! of a host come and go, and a guest that got its own addresses would not notice that they are
//! taken away. While the uplink leads nowhere, names have no IPv6 addresses for it, so nothing of
//! the guest waits.
use ipnet::IpNet;
use slipgate_control::vm;
use slipgate_ipc::{client::GuestIpv6Status, engine::VmSpec};
use slipgate_model::{
    GuestIpv6, Ipv6Mode, RouteSnapshot,
    route::{OUT_THERE, RouteTable},
};

use super::{Attached, ServedVm, network_view, vms::ipv6_in_row};
use crate::config::{MIN_MTU6, VmConfig};

impl Attached {
    /// Returns the IPv6 network that a VM with this MTU of its link gets; `None`: it has none, or
    /// not yet.
    pub(super) fn guest_ipv6(&self, config: &VmConfig, mtu: u32) -> Option<GuestIpv6> {
        let network = &self.config.network;
        let net = GuestIpv6 {
            prefix: config.ipv6_prefix.unwrap_or(network.ipv6_prefix),
        };
        let is_on = match config.ipv6.unwrap_or(network.ipv6) {
            Ipv6Mode::Off => false,
            Ipv6Mode::Nat => true,
            Ipv6Mode::Auto => self.leads_to_ipv6(config),
        };
        if is_on && mtu < MIN_MTU6 {
            tracing::warn!(
                "{} has no IPv6: the MTU of {} is {mtu} bytes, and IPv6 takes {MIN_MTU6}",
                config.name,
                config.tap
            );
            return None;
        }
        is_on.then_some(net)
    }

    /// Whether the uplink of a VM leads to IPv6 now. The engine decides the same for names, by the
    /// same function.
    fn leads_to_ipv6(&self, config: &VmConfig) -> bool {
        let network = self.watch.network();
        let uplink = match &config.uplink {
            None => self.uplink.ifindex,
            Some(name) => match network.link_by_name(name) {
                Some(link) => link.ifindex,
                None => return false,
            },
        };
        // The other routes of a host may be many, and none of them decides.
        let covers = |route: &&slipgate_control::netlink::Route| {
            let prefix = IpNet::new(route.destination, route.prefix_len);
            prefix.is_ok_and(|prefix| prefix.contains(&std::net::IpAddr::V6(OUT_THERE)))
        };
        let snapshot = RouteSnapshot {
            uplink_ifindex: Some(uplink),
            addresses: network_view::addresses(network).collect(),
            routes: network_view::routes(network.routes.iter().filter(covers)).collect(),
            ..RouteSnapshot::default()
        };
        RouteTable::new(&snapshot).leads_to_ipv6(Some(uplink))
    }

    /// Gives IPv6 to VMs that have waited for it, because their uplinks lead there now. Returns
    /// them for the engines, each with its worker. To be called after a change of routes or
    /// addresses. It looks at all VMs only while some wait and something leads to IPv6, which is
    /// once.
    pub(crate) fn follow_ipv6(&mut self) -> Vec<(usize, VmSpec)> {
        let default = self.config.network.ipv6;
        let waits = |vm: &ServedVm| {
            vm.ipv6.is_none() && vm.config.ipv6.unwrap_or(default) == Ipv6Mode::Auto
        };
        let has_routes = self
            .watch
            .network()
            .routes
            .iter()
            .any(|route| route.destination.is_ipv6() && route.prefix_len <= 3);
        if !has_routes {
            return Vec::new();
        }
        let waiting: Vec<usize> = (0..self.vms.len())
            .filter(|at| waits(&self.vms[*at]))
            .collect();
        let mut told = Vec::new();
        for at in waiting {
            let vm = &self.vms[at];
            let Some(net) = self.guest_ipv6(&vm.config, vm.mtu) else {
                continue;
            };
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
