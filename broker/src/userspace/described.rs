//! The guest as the engine is told of it, and its IPv6.
//!
//! As in hybrid mode, a guest with `auto` has IPv6 once the uplink leads there, and keeps it then.
use slipgate_control::{netlink::Network, vm};
use slipgate_ipc::engine::{ToEngine, VmSpec};
use slipgate_model::GuestIpv6;
use slipgate_policy::{
    Settings,
    document::{CliOverrides, ConfigError, LoadedPolicies, RoutesOf},
};

use super::{Served, place::Place};
use crate::{
    config::{Config, VmConfig},
    kernel_state::{GATEWAY_MAC, Ipv6Wish, Uplink, ipv6_in_row, leads_to_ipv6},
};

/// Name of the guest's link in reports.
const LINK: &str = "its link";

/// The guest as the engine knows it.
#[derive(Debug)]
pub(super) struct ServedGuest {
    pub(super) spec: VmSpec,
    pub(super) wish: Ipv6Wish,
    /// Whether it can be given IPv6 while it runs.
    pub(super) takes_ipv6_later: bool,
}

impl Served {
    /// Gives IPv6 to a guest that has waited for it, because the uplink leads there now.
    pub(super) fn follow_ipv6(&mut self) -> anyhow::Result<()> {
        let ServedGuest {
            spec,
            wish,
            takes_ipv6_later,
        } = &mut self.vm;
        let Some(net) = wish.awaited(spec.ipv6, spec.mtu.into()) else {
            return Ok(());
        };
        let (network, uplink) = (self.watch.network(), self.uplink.ifindex);
        if !*takes_ipv6_later || !leads_to_ipv6(network, uplink) {
            return Ok(());
        }
        let maps = &self.place.memory.maps;
        vm::set_ipv6(maps, spec.row, Some(ipv6_in_row(&net)));
        spec.ipv6 = Some(net);
        tracing::info!("{} has IPv6 now: the uplink leads there", spec.name);
        let spec = spec.clone();
        self.send(ToEngine::Vm(spec))
    }
}

/// Refuses what only the kernel's programs do: of the command line, or of the policies.
pub(super) fn check_egress(
    flags: &CliOverrides,
    loaded: &LoadedPolicies,
) -> Result<(), ConfigError> {
    if flags.egress_routes == Some(RoutesOf::Host) {
        return Err(ConfigError::new(
            "--egress-routes",
            "host",
            "user mode needs it not: its sockets leave as the host's do",
            "leave it out, or use --mode hybrid",
        ));
    }
    let mut all = loaded.policies.iter().map(|policy| &policy.settings);
    let is_tcp_mapped = |of: &&Settings| of.nat.tcp.is_mapped();
    if let Some(settings) = all.clone().find(is_tcp_mapped) {
        return Err(ConfigError::new(
            "--policy",
            settings.source(),
            "user mode has endpoint-independent mapping for UDP only: there a guest's TCP ends in a socket \
             of the host's",
            "leave `mapping` out of [nat.tcp], or use --mode hybrid",
        ));
    }
    let asks = |of: &&Settings| !of.nat_addresses.is_empty() || !of.egress.is_default();
    let Some(settings) = all.find(asks) else {
        return Ok(());
    };
    Err(ConfigError::new(
        "--policy",
        settings.source(),
        "user mode has neither nat_addresses nor [egress]: its sockets leave as the host's do",
        "leave them out, or use --mode hybrid; --nat-address is for user mode, too",
    ))
}

/// Returns the IPv6 network that the guest gets; `None`: it has none, or not yet.
pub(super) fn guest_ipv6(
    nat: &Config,
    vm: &VmConfig,
    mtu: u32,
    (network, uplink): (&Network, &Uplink),
) -> Option<GuestIpv6> {
    let wish = Ipv6Wish::of(vm, &nat.network);
    wish.granted((&vm.name, LINK, mtu), || {
        leads_to_ipv6(network, uplink.ifindex)
    })
}

/// Describes the guest. `mtu`: of its link; `ipv6`: its network, if it has one.
pub(super) fn spec(
    nat: &Config,
    vm: &VmConfig,
    place: &Place,
    (mtu, ipv6): (u32, Option<GuestIpv6>),
) -> VmSpec {
    VmSpec {
        id: place.open.id,
        row: place.open.row,
        name: vm.name.clone(),
        labels: vm.labels.clone(),
        guest: vm.ip,
        gateway: nat.network.gateway,
        dns: nat.network.dns,
        prefix_len: nat.network.prefix_len,
        ipv6,
        guest_mac: vm.mac,
        gateway_mac: GATEWAY_MAC,
        mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
        max_flows: vm.limits.max_flows,
        new_flows_per_second: vm.limits.new_flows_per_second,
        policy: place.policies.index_of(&vm.policy),
        host_loopback: vm.host_loopback.clone(),
        dns_per_second: vm.limits.dns_per_second,
        idle_after_s: vm.idle_after.unwrap_or(nat.idle_after),
        uplink: None,
        routes: None,
        nat_addresses: Default::default(),
        is_idle: false,
    }
}

#[cfg(test)]
#[path = "described_test.rs"]
mod tests;
