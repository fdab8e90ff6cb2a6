//! Builds the engine's view of the host's network from netlink data.
use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::{IpNet, Ipv4Net};
use slipgate_abi::IfIndex;
use slipgate_control::netlink::{self, AddressState, Network, Table};
use slipgate_ipc::engine::{
    FurtherRoutes, HopShare, HostAddress, Link, NetworkView, RouteEntry, RouteKind, RouteSnapshot,
    SourceUse,
};
use slipgate_policy::LocalAddresses;

use crate::config::GuestNetwork;

/// Returns the view of the host's network for the engine. `uplink`: the only device by which flows
/// of VMs without an uplink of their own may leave. `vm_uplinks`: the other VMs' uplinks. `source`:
/// preferred source address of the host's routes by `uplink`.
pub(crate) fn view(
    network: &Network,
    uplink: IfIndex,
    vm_uplinks: &BTreeSet<IfIndex>,
    source: Option<Ipv4Addr>,
    guests: &GuestNetwork,
) -> NetworkView {
    let of_main = network.routes.iter();
    let of_main = of_main.filter(|route| !matches!(route.table, Table::Other(_)));
    let mut routes: Vec<RouteEntry> = self::routes(of_main).collect();
    let by_uplink = |route: &&mut RouteEntry| {
        let is_its = route.ifindex == uplink && route.kind == RouteKind::Unicast;
        is_its && route.prefix.addr().is_ipv4()
    };
    for route in routes.iter_mut().filter(by_uplink) {
        route.prefsrc = source.map(IpAddr::V4).or(route.prefsrc);
    }
    let addresses: Vec<HostAddress> = self::addresses(network).collect();
    let own = addresses.iter().map(|a| a.addr.addr());
    let broadcasts = addresses.iter().filter_map(|a| a.broadcast.map(IpAddr::V4));
    NetworkView {
        local: LocalAddresses {
            host: own.chain(broadcasts).collect(),
            guests: Ipv4Net::new(guests.network(), guests.prefix_len)
                .into_iter()
                .map(IpNet::V4)
                .chain([guests.ipv6_prefix].map(IpNet::V6))
                .chain(guests.ipv6_pool.map(IpNet::V6))
                .collect(),
        },
        routes: RouteSnapshot {
            uplink_ifindex: Some(uplink),
            vm_uplinks: vm_uplinks.iter().copied().collect(),
            addresses,
            routes,
            further: FurtherRoutes::default(),
        },
        // TAPs come and go by the thousand, and no flow leaves by one.
        links: network
            .routed()
            .into_iter()
            .chain([uplink])
            .chain(vm_uplinks.iter().copied())
            .collect::<BTreeSet<_>>()
            .iter()
            .filter_map(|ifindex| network.links.get(ifindex))
            .map(|link| Link {
                ifindex: link.ifindex,
                name: link.name.clone(),
                mtu: link.mtu,
                has_l2: link.has_l2,
            })
            .collect(),
    }
}

/// Returns the host's addresses, in the kernel's order.
pub(super) fn addresses(network: &Network) -> impl Iterator<Item = HostAddress> {
    network.addresses.iter().filter_map(address)
}

/// Converts routes, and leaves out those that are of no use to the engine.
pub(super) fn routes<'n>(
    routes: impl IntoIterator<Item = &'n netlink::Route>,
) -> impl Iterator<Item = RouteEntry> {
    routes.into_iter().filter_map(route)
}

fn address(address: &netlink::Address) -> Option<HostAddress> {
    Some(HostAddress {
        ifindex: address.ifindex,
        addr: IpNet::new(address.address, address.prefix_len).ok()?,
        broadcast: address.broadcast,
        source: match address.state {
            AddressState::Preferred => SourceUse::Preferred,
            AddressState::Temporary => SourceUse::Temporary,
            AddressState::Deprecated => SourceUse::Deprecated,
            AddressState::Unusable => SourceUse::Unusable,
        },
    })
}

fn route(route: &netlink::Route) -> Option<RouteEntry> {
    use netlink::RouteKind as Kernel;
    let kind = match route.kind {
        Kernel::Unicast => RouteKind::Unicast,
        Kernel::Local => RouteKind::Local,
        Kernel::Broadcast => RouteKind::Broadcast,
        Kernel::Blackhole => RouteKind::Blackhole,
        Kernel::Refused => RouteKind::Unreachable,
        Kernel::Throw => RouteKind::Throw,
        // Group addresses are refused by the safe defaults.
        Kernel::Other => return None,
    };
    Some(RouteEntry {
        prefix: IpNet::new(route.destination, route.prefix_len).ok()?,
        kind,
        ifindex: route.oif.unwrap_or(IfIndex::NONE),
        gateway: route.gateway,
        prefsrc: route.source,
        metric: route.metric,
        mtu: route.mtu,
        share: HopShare {
            weight: route.weight,
            is_further: route.is_further,
        },
    })
}
