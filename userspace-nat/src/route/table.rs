//! The compiled route table.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use slipgate_abi::IfIndex;

use super::{Route, RouteEntry, RouteKind, RouteSnapshot};
use slipgate_policy::PrefixMap;

/// Compiled routes for look-ups. The default table has no route.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    pub(super) uplink: Option<IfIndex>,
    /// Further links by which flows may leave, sorted.
    pub(super) vm_uplinks: Vec<IfIndex>,
    /// Routes of each prefix that a look-up may take, the best first, then the best by each of
    /// `vm_uplinks`.
    pub(super) routes: PrefixMap<Vec<RouteEntry>>,
    /// Addresses and networks of the host with their link, in the kernel's order. Loopback
    /// addresses are left out, because no link may carry them: a host on the link could answer to
    /// one, and so reach services that listen on loopback only.
    pub(super) sources: Vec<(IfIndex, Ipv4Net)>,
    /// The host's own and broadcast addresses, sorted.
    pub(super) host: Vec<Ipv4Addr>,
}

impl RouteTable {
    /// Compiles a snapshot into a table.
    pub fn new(snapshot: &RouteSnapshot) -> Self {
        let mut host: Vec<Ipv4Addr> = snapshot
            .addresses
            .iter()
            .flat_map(|address| [Some(address.addr.addr()), address.broadcast])
            .flatten()
            .chain(snapshot.routes.iter().filter_map(own_address))
            .collect();
        host.sort_unstable();
        host.dedup();

        // Of equal metrics the one listed first precedes.
        let mut routes = snapshot.routes.clone();
        routes.sort_by_key(|route| (route.prefix.trunc(), route.metric));
        let of_prefix = routes.chunk_by(|a, b| a.prefix.trunc() == b.prefix.trunc());
        let useful = of_prefix.map(|routes| (routes[0].prefix, useful(routes, snapshot)));

        Self {
            uplink: snapshot.uplink_ifindex,
            vm_uplinks: snapshot.vm_uplinks.clone(),
            routes: PrefixMap::new(useful),
            sources: snapshot
                .addresses
                .iter()
                .map(|address| (address.ifindex, address.addr))
                .filter(|(_, net)| !net.addr().is_loopback())
                .collect(),
            host,
        }
    }

    /// Looks up the route to `addr`.
    pub fn lookup(&self, addr: Ipv4Addr) -> Route {
        self.lookup_by(addr, self.uplink)
    }

    /// Looks up the route to `addr` by an uplink; `None`: by any link.
    pub fn lookup_by(&self, addr: Ipv4Addr, uplink: Option<IfIndex>) -> Route {
        if self.is_host(addr) {
            return Route::HostLocal;
        }
        let Some((_, routes)) = self.routes.longest(addr) else {
            return Route::Unreachable;
        };
        let is_taken = |route: &&RouteEntry| {
            route.kind != RouteKind::Unicast || uplink.is_none_or(|link| link == route.ifindex)
        };
        // A route that refuses holds for all links, as in the kernel.
        let Some(route) = routes.iter().find(is_taken).or(routes.first()) else {
            return Route::Unreachable;
        };
        match route.kind {
            RouteKind::Local | RouteKind::Broadcast => Route::HostLocal,
            RouteKind::Blackhole | RouteKind::Unreachable | RouteKind::Prohibit => {
                Route::Refused(route.kind)
            }
            RouteKind::Unicast if uplink.is_some_and(|uplink| uplink != route.ifindex) => {
                Route::OtherUplink {
                    ifindex: route.ifindex,
                }
            }
            RouteKind::Unicast => {
                let next_hop = route.gateway.unwrap_or(addr);
                match self.source(route, next_hop) {
                    Some(source) => Route::Via {
                        ifindex: route.ifindex,
                        next_hop,
                        source,
                        mtu: super::mtu(route),
                    },
                    None => Route::Unreachable,
                }
            }
        }
    }

    /// Returns the uplink of VMs that have none of their own; `None`: any link.
    pub fn uplink(&self) -> Option<IfIndex> {
        self.uplink
    }

    /// Whether `addr` is the host's own, loopback, or a broadcast address of one of its networks.
    pub fn is_host(&self, addr: Ipv4Addr) -> bool {
        addr.is_loopback() || self.host.binary_search(&addr).is_ok()
    }

    /// Whether a link carries a source address: it is the link's, or the link has none of its own.
    pub fn carries(&self, link: IfIndex, source: Ipv4Addr) -> bool {
        let mut own = self.sources.iter().filter(|(of, _)| *of == link).peekable();
        own.peek().is_none() || own.any(|(_, net)| net.addr() == source)
    }

    /// Source address as the kernel selects it: the route's preferred one, else the link's address
    /// in the network of the next hop, else the link's first, else, on a link without address, the
    /// host's first. It is never a loopback address.
    fn source(&self, route: &RouteEntry, next_hop: Ipv4Addr) -> Option<Ipv4Addr> {
        let mut on_link = self
            .sources
            .iter()
            .filter(|(link, _)| *link == route.ifindex);
        route
            .prefsrc
            .filter(|addr| !addr.is_loopback())
            .or_else(|| {
                on_link
                    .clone()
                    .find(|(_, net)| net.contains(&next_hop))
                    .map(|(_, net)| net.addr())
            })
            .or_else(|| on_link.next().map(|(_, net)| net.addr()))
            .or_else(|| self.sources.first().map(|(_, net)| net.addr()))
    }
}

/// Returns those of a prefix's routes, in order, that a look-up by some uplink may take.
fn useful(routes: &[RouteEntry], snapshot: &RouteSnapshot) -> Vec<RouteEntry> {
    let mut useful: Vec<RouteEntry> = Vec::with_capacity(1);
    for route in routes {
        let is_by_uplink = snapshot.uplink_ifindex == Some(route.ifindex)
            || snapshot.vm_uplinks.contains(&route.ifindex);
        let is_refusal = route.kind != RouteKind::Unicast;
        let is_known = useful.iter().any(|it| it.ifindex == route.ifindex);
        if useful.is_empty() || is_refusal || is_by_uplink && !is_known {
            useful.push(*route);
        }
        if is_refusal {
            break;
        }
    }
    useful
}

fn own_address(route: &RouteEntry) -> Option<Ipv4Addr> {
    let own = matches!(route.kind, RouteKind::Local | RouteKind::Broadcast);
    (own && route.prefix.prefix_len() == 32).then_some(route.prefix.addr())
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
