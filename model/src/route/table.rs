//! The compiled route table.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};
use slipgate_abi::IfIndex;

use super::{
    Choose, HostAddress, Route, RouteEntry, RouteKind, RouteSnapshot, SourceUse, domain::Domains,
    recent::Recent, source, spread,
};
use slipgate_policy::PrefixMap;

/// An address to which only a route to all of the internet leads: the first one of the space that
/// is assigned (RFC 4291 section 2.4), which is nobody's.
pub const OUT_THERE: Ipv6Addr = Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0);

/// Routes of a table, by their prefix.
pub(super) type Routes = PrefixMap<Vec<RouteEntry>>;

/// Compiled routes for look-ups. The default table has no route.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    pub(super) uplink: Option<IfIndex>,
    /// Further links by which flows may leave, sorted.
    pub(super) vm_uplinks: Vec<IfIndex>,
    /// Routes of each prefix that a look-up may take, the best first, then the best by each of
    /// `vm_uplinks`.
    pub(super) routes: Routes,
    /// Those of VMs whose policies choose them.
    pub(super) domains: Domains,
    /// Addresses and networks of the host with their link, in the kernel's order. Loopback
    /// addresses are left out, because no link may carry them: a host on the link could answer to
    /// one, and so reach services that listen on loopback only. So are unusable ones.
    pub(super) sources: Vec<HostAddress>,
    /// The host's own and broadcast addresses, sorted.
    pub(super) host: Vec<IpAddr>,
    /// Those of `sources`, sorted.
    own: Vec<IpAddr>,
    /// The host's addresses that may not be used.
    unusable: Vec<IpAddr>,
    /// Look-ups in `routes`, and by the fields above.
    recent: Recent,
}

impl RouteTable {
    /// Compiles a snapshot into a table.
    pub fn new(snapshot: &RouteSnapshot) -> Self {
        let mut host: Vec<IpAddr> = snapshot
            .addresses
            .iter()
            .flat_map(|address| [Some(address.addr.addr()), address.broadcast.map(Into::into)])
            .flatten()
            .chain(snapshot.routes.iter().filter_map(own_address))
            .collect();
        host.sort_unstable();
        host.dedup();

        let (mut own, unusable): (Vec<HostAddress>, Vec<HostAddress>) = snapshot
            .addresses
            .iter()
            .partition(|address| address.source != SourceUse::Unusable);
        own.retain(|address| !address.addr.addr().is_loopback());
        let only = |all: &[HostAddress]| -> Vec<IpAddr> {
            let mut only: Vec<IpAddr> = all.iter().map(|own| own.addr.addr()).collect();
            only.sort_unstable();
            only
        };
        Self {
            own: only(&own),
            unusable: only(&unusable),
            uplink: snapshot.uplink_ifindex,
            vm_uplinks: snapshot.vm_uplinks.clone(),
            routes: compiled(snapshot.routes.clone(), snapshot),
            domains: Domains::new(snapshot),
            sources: own,
            host,
            recent: Recent::new(),
        }
    }

    /// Looks up the route to `addr`.
    pub fn lookup(&self, addr: impl Into<IpAddr>) -> Route {
        self.lookup_by(addr, self.uplink)
    }

    /// Looks up the route to `addr` by an uplink; `None`: by any link.
    pub fn lookup_by(&self, addr: impl Into<IpAddr>, uplink: Option<IfIndex>) -> Route {
        self.lookup_from(addr.into(), uplink, None, &mut spread::first)
    }

    /// As [`RouteTable::lookup_by`], for packets that have a source address already, which need not
    /// be the host's (`None`: the host's is selected), and of a flow that has one of several next hops.
    #[inline]
    pub(super) fn lookup_from(
        &self,
        addr: IpAddr,
        uplink: Option<IfIndex>,
        source: Option<IpAddr>,
        choose: &mut Choose<'_>,
    ) -> Route {
        self.recent.answer((addr, uplink, source), || {
            let mut is_for_all = true;
            let mut choosing = |hops: &[&RouteEntry]| {
                is_for_all = false;
                choose(hops)
            };
            let by = (uplink, source);
            let from_table = || self.answer(&self.routes, addr, by, None, &mut choosing);
            let known = self.without_table(addr).or_else(from_table);
            (known.unwrap_or(Route::Unreachable), is_for_all)
        })
    }

    /// Returns the result of a look-up that no table decides.
    pub(super) fn without_table(&self, addr: IpAddr) -> Option<Route> {
        if self.is_host(addr) {
            return Some(Route::HostLocal);
        }
        // Addresses that need a link beside them to mean something, which no packet names.
        match addr {
            IpAddr::V6(addr) if addr.is_unicast_link_local() || addr.is_multicast() => {
                Some(Route::Unreachable)
            }
            _ => None,
        }
    }

    /// Looks up a route in a table; `None`: it has none. `suppressed_len`: longest prefix whose
    /// routes are passed over, unless they refuse. `choose`: one of several next hops.
    pub(super) fn answer(
        &self,
        table: &Routes,
        addr: IpAddr,
        (uplink, source): (Option<IfIndex>, Option<IpAddr>),
        suppressed_len: Option<u8>,
        choose: &mut Choose<'_>,
    ) -> Option<Route> {
        let (prefix, routes) = table.longest(addr)?;
        let route = match &routes[..] {
            [only] => only,
            routes => taken(routes, uplink, choose)?,
        };
        let is_suppressed = || suppressed_len.is_some_and(|len| prefix.prefix_len() <= len);
        // A route that refuses is not passed over, nor one of the table local, which the kernel asks
        // before.
        if route.kind == RouteKind::Unicast && is_suppressed() {
            return None;
        }
        Some(match route.kind {
            RouteKind::Throw => return None,
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
                match source.or_else(|| self.source(route, addr, next_hop)) {
                    Some(source) => Route::Via {
                        ifindex: route.ifindex,
                        next_hop,
                        source,
                        mtu: super::mtu(route),
                    },
                    None => Route::Unreachable,
                }
            }
        })
    }

    /// Returns the uplink of VMs that have none of their own; `None`: any link.
    pub fn uplink(&self) -> Option<IfIndex> {
        self.uplink
    }

    /// Whether IPv6 packets to the internet leave by an uplink (`None`: by any link): a route leads
    /// there, and the host has an address to send from. It decides whether `--ipv6 auto` is on, and
    /// whether guests learn IPv6 addresses of names.
    ///
    /// A unique local address (RFC 4193) counts: the network beyond may translate it, as slipgate
    /// translates guests'. One of the link's scope does not.
    pub fn leads_to_ipv6(&self, uplink: Option<IfIndex>) -> bool {
        matches!(self.lookup_by(OUT_THERE, uplink), Route::Via { .. })
    }

    /// Whether `addr` is the host's own, loopback, or a broadcast address of one of its networks.
    pub fn is_host(&self, addr: impl Into<IpAddr>) -> bool {
        let addr = addr.into();
        addr.is_loopback() || self.host.binary_search(&addr).is_ok()
    }

    /// Whether one of the host's addresses is in this prefix, whether or not it may be used.
    pub fn has_address_in(&self, prefix: Ipv6Net) -> bool {
        let [first, last] = [prefix.network(), prefix.broadcast()].map(IpAddr::from);
        [&self.own, &self.unusable].into_iter().any(|sorted| {
            let at = sorted.partition_point(|own: &IpAddr| *own < first);
            sorted.get(at).is_some_and(|own| *own <= last)
        })
    }

    /// Whether packets to `addr` are delivered to the host: [`RouteTable::is_host`], or a route of
    /// the table `local` covers it (`ip route add local PREFIX dev lo`).
    pub fn is_delivered(&self, addr: impl Into<IpAddr>) -> bool {
        let addr = addr.into();
        self.is_host(addr) || self.is_in_local_prefix(addr)
    }

    /// Whether `addr` may be the source of packets to the world: it is an address of the host, or
    /// in a prefix that is delivered to it, so that answers come back.
    pub fn may_send_from(&self, addr: IpAddr) -> bool {
        let is_own = self.own.binary_search(&addr).is_ok();
        let is_local = || {
            let is_unusable = self.unusable.binary_search(&addr).is_ok();
            !addr.is_loopback() && !is_unusable && self.is_in_local_prefix(addr)
        };
        is_own || is_local()
    }

    pub(super) fn is_in_local_prefix(&self, addr: IpAddr) -> bool {
        let longest = self.routes.longest(addr);
        let first = longest.and_then(|(_, routes)| routes.first());
        first.is_some_and(|route| route.kind == RouteKind::Local)
    }

    /// Whether a flow to `to` that leaves by `link` may have the source `known`, which other flows of
    /// its guest's port have, instead of `chosen`, which the route gives: the choice was RFC 6724's,
    /// not a route's preferred source, and the link carries either. IPv4 has one source for a route.
    pub fn may_keep_source(
        &self,
        link: IfIndex,
        to: IpAddr,
        chosen: IpAddr,
        known: IpAddr,
    ) -> bool {
        let (IpAddr::V6(to), IpAddr::V6(chosen), IpAddr::V6(known)) = (to, chosen, known) else {
            return false;
        };
        source::select(&self.sources, link, to) == Some(chosen)
            && source::serve_alike(chosen, known)
            && self.may_send_from(known.into())
            && self.carries(link, known)
    }

    /// Whether a link carries a source address: it is the link's, or the link has none of its own
    /// of that family.
    pub fn carries(&self, link: IfIndex, source: impl Into<IpAddr>) -> bool {
        let source = source.into();
        let is_alike = |own: &&HostAddress| {
            own.ifindex == link && own.addr.addr().is_ipv4() == source.is_ipv4()
        };
        let mut own = self.sources.iter().filter(is_alike).peekable();
        own.peek().is_none() || own.any(|own| own.addr.addr() == source)
    }

    /// Source address of packets to `to`. It is never a loopback address.
    fn source(&self, route: &RouteEntry, to: IpAddr, next_hop: IpAddr) -> Option<IpAddr> {
        let preferred = route.prefsrc.filter(|addr| !addr.is_loopback());
        preferred.or_else(|| match (to, next_hop) {
            (IpAddr::V6(to), _) => source::select(&self.sources, route.ifindex, to).map(Into::into),
            (IpAddr::V4(_), IpAddr::V4(hop)) => self.source4(route.ifindex, Some(hop)),
            // A router of IPv6 (`RTA_VIA`) is in no network of IPv4.
            (IpAddr::V4(_), IpAddr::V6(_)) => self.source4(route.ifindex, None),
        })
    }

    /// Source address as the kernel selects it for IPv4: the link's address in the network of the
    /// next hop, else the link's first, else, on a link without address, the host's first.
    fn source4(&self, link: IfIndex, next_hop: Option<Ipv4Addr>) -> Option<IpAddr> {
        let all = self.sources.iter().filter_map(|own| match own.addr {
            IpNet::V4(net) => Some((own.ifindex, net)),
            IpNet::V6(_) => None,
        });
        let mut on_link = all.clone().filter(|(ifindex, _)| *ifindex == link);
        let in_network =
            next_hop.and_then(|next_hop| on_link.clone().find(|(_, net)| net.contains(&next_hop)));
        let found = in_network.or_else(|| on_link.next());
        found
            .or_else(|| all.clone().next())
            .map(|(_, net)| net.addr().into())
    }
}

/// Returns that of a prefix's routes, or that next hop of several, which a look-up by an uplink takes.
fn taken<'a>(
    routes: &'a [RouteEntry],
    uplink: Option<IfIndex>,
    choose: &mut Choose<'_>,
) -> Option<&'a RouteEntry> {
    let is_taken = |route: &&RouteEntry| {
        route.kind != RouteKind::Unicast || uplink.is_none_or(|link| link == route.ifindex)
    };
    // A route that refuses holds for all links, as in the kernel.
    let Some(at) = routes.iter().position(|route| is_taken(&route)) else {
        return routes.first();
    };
    let (first, further) = routes[at..].split_first()?;
    if !further.first().is_some_and(|it| it.share.is_further) {
        return Some(first);
    }
    let further = further.iter().take_while(|it| it.share.is_further);
    let hops: Vec<_> = [first]
        .into_iter()
        .chain(further.filter(is_taken))
        .collect();
    match hops[..] {
        [one] => Some(one),
        _ => hops.get(choose(&hops)).copied().or(Some(first)),
    }
}

/// Returns routes by their prefix, those that look-ups may take.
pub(super) fn compiled(mut routes: Vec<RouteEntry>, snapshot: &RouteSnapshot) -> Routes {
    // Of equal metrics the one listed first precedes.
    routes.sort_by_key(|route| (route.prefix.trunc(), route.metric));
    let of_prefix = routes.chunk_by(|a, b| a.prefix.trunc() == b.prefix.trunc());
    PrefixMap::new(of_prefix.map(|routes| (routes[0].prefix, useful(routes, snapshot))))
}

/// Returns those of a prefix's routes, in order, that a look-up by some uplink may take.
fn useful(routes: &[RouteEntry], snapshot: &RouteSnapshot) -> Vec<RouteEntry> {
    let mut useful: Vec<RouteEntry> = Vec::with_capacity(1);
    for hops in routes.chunk_by(|_, next| next.share.is_further) {
        let before = useful.len();
        for hop in hops {
            let is_by_uplink = snapshot.uplink_ifindex == Some(hop.ifindex)
                || snapshot.vm_uplinks.contains(&hop.ifindex);
            let is_refusal = hop.kind != RouteKind::Unicast;
            let is_known = useful[..before].iter().any(|it| it.ifindex == hop.ifindex);
            if before == 0 || is_refusal || is_by_uplink && !is_known {
                useful.push(*hop);
            }
        }
        // Its first one may have been left out.
        if let Some(first) = useful.get_mut(before) {
            first.share.is_further = false;
        }
        if hops.iter().any(|hop| hop.kind != RouteKind::Unicast) {
            break;
        }
    }
    useful
}

fn own_address(route: &RouteEntry) -> Option<IpAddr> {
    let own = matches!(route.kind, RouteKind::Local | RouteKind::Broadcast);
    let is_one = route.prefix.prefix_len() == route.prefix.max_prefix_len();
    (own && is_one).then_some(route.prefix.addr())
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
