use proptest::prelude::*;
use slipgate_abi::IfIndex;

use super::{super::HostAddress, *};

const UPLINK: IfIndex = IfIndex::new(2);
const OTHER: IfIndex = IfIndex::new(3);

fn route(
    prefix: &str,
    kind: RouteKind,
    ifindex: IfIndex,
    gateway: Option<&str>,
    metric: u32,
) -> RouteEntry {
    RouteEntry {
        prefix: prefix.parse().unwrap(),
        kind,
        ifindex,
        gateway: gateway.map(|addr| addr.parse().unwrap()),
        prefsrc: None,
        metric,
        mtu: None,
        share: Default::default(),
    }
}

fn address(ifindex: IfIndex, addr: &str, broadcast: Option<&str>) -> HostAddress {
    HostAddress {
        ifindex,
        addr: addr.parse().unwrap(),
        broadcast: broadcast.map(|addr| addr.parse().unwrap()),
        source: SourceUse::Preferred,
    }
}

/// A host with an uplink of two addresses, a second network behind another link.
fn host() -> RouteSnapshot {
    use RouteKind::{Blackhole, Local, Unicast, Unreachable};
    RouteSnapshot {
        vm_uplinks: Vec::new(),
        further: Default::default(),
        uplink_ifindex: Some(UPLINK),
        addresses: vec![
            address(IfIndex::new(1), "127.0.0.1/8", None),
            address(UPLINK, "198.51.100.5/24", Some("198.51.100.255")),
            address(UPLINK, "203.0.113.5/24", None),
            address(OTHER, "192.0.2.1/24", Some("192.0.2.255")),
        ],
        routes: vec![
            route("0.0.0.0/0", Unicast, OTHER, Some("192.0.2.254"), 600),
            route("0.0.0.0/0", Unicast, UPLINK, Some("198.51.100.1"), 100),
            route("198.51.100.0/24", Unicast, UPLINK, None, 0),
            route("203.0.113.0/24", Unicast, UPLINK, None, 0),
            route("192.0.2.0/24", Unicast, OTHER, None, 0),
            route("11.0.0.0/8", Blackhole, IfIndex::NONE, None, 0),
            route("11.1.0.0/16", Unicast, UPLINK, Some("203.0.113.1"), 0),
            route("12.0.0.0/8", Unreachable, IfIndex::NONE, None, 0),
            route("13.0.0.7/32", Local, IfIndex::new(1), None, 0),
        ],
    }
}

fn via(next_hop: &str, source: &str) -> Route {
    Route::Via {
        ifindex: UPLINK,
        next_hop: next_hop.parse().unwrap(),
        source: source.parse().unwrap(),
        mtu: None,
    }
}

#[test]
fn longest_prefix_then_lowest_metric() {
    let table = RouteTable::new(&host());
    let lookup = |addr: &str| table.lookup(addr.parse::<IpAddr>().unwrap());
    assert_eq!(lookup("1.1.1.1"), via("198.51.100.1", "198.51.100.5"));
    assert_eq!(
        lookup("198.51.100.77"),
        via("198.51.100.77", "198.51.100.5")
    );
    assert_eq!(
        lookup("203.0.113.77"),
        via("203.0.113.77", "203.0.113.5"),
        "the source is of the next hop's network"
    );
    assert_eq!(lookup("11.1.2.3"), via("203.0.113.1", "203.0.113.5"));
    assert_eq!(lookup("11.2.2.3"), Route::Refused(RouteKind::Blackhole));
    assert_eq!(lookup("12.2.2.3"), Route::Refused(RouteKind::Unreachable));
    assert_eq!(lookup("192.0.2.9"), Route::OtherUplink { ifindex: OTHER });
}

#[test]
fn an_own_uplink_has_the_best_of_its_routes_of_the_longest_prefix() {
    let mut host = host();
    host.vm_uplinks = vec![OTHER];
    host.routes.extend([
        route("198.51.100.0/24", RouteKind::Unicast, OTHER, None, 7),
        route("11.0.0.0/8", RouteKind::Unicast, OTHER, None, 7),
    ]);
    let table = RouteTable::new(&host);
    let lookup = |addr: &str| table.lookup_by(addr.parse::<IpAddr>().unwrap(), Some(OTHER));
    let by_other = |next_hop: &str| Route::Via {
        ifindex: OTHER,
        next_hop: next_hop.parse().unwrap(),
        source: "192.0.2.1".parse().unwrap(),
        mtu: None,
    };
    assert_eq!(lookup("1.1.1.1"), by_other("192.0.2.254"));
    assert_eq!(lookup("198.51.100.9"), by_other("198.51.100.9"));
    assert_eq!(
        lookup("203.0.113.7"),
        Route::OtherUplink { ifindex: UPLINK },
        "a network behind another link is not reached by the default route"
    );
    assert_eq!(lookup("11.2.2.3"), Route::Refused(RouteKind::Blackhole));
    assert_eq!(lookup("198.51.100.5"), Route::HostLocal);
    let absent = table.lookup_by("1.1.1.1".parse::<IpAddr>().unwrap(), Some(IfIndex::NONE));
    assert_eq!(absent, Route::OtherUplink { ifindex: UPLINK });
    let carries = |link, addr: &str| table.carries(link, addr.parse::<IpAddr>().unwrap());
    assert!(carries(OTHER, "192.0.2.1") && !carries(OTHER, "198.51.100.5"));
    assert!(carries(IfIndex::new(9), "198.51.100.5"), "it has none");
    let default = table.lookup("1.1.1.1".parse::<IpAddr>().unwrap());
    assert_eq!(default, via("198.51.100.1", "198.51.100.5"));
}

#[test]
fn the_hosts_own_addresses_are_never_put_on_the_wire() {
    let table = RouteTable::new(&host());
    for addr in [
        "127.0.0.1",
        "127.9.9.9",
        "198.51.100.5",
        "203.0.113.5",
        "192.0.2.1",
        "198.51.100.255",
        "192.0.2.255",
        "13.0.0.7",
    ] {
        assert_eq!(
            table.lookup(addr.parse::<IpAddr>().unwrap()),
            Route::HostLocal,
            "{addr}"
        );
    }
    let own = &table.host;
    assert!(
        own.contains(&"13.0.0.7".parse().unwrap()) && own.contains(&"192.0.2.255".parse().unwrap())
    );
}

#[test]
fn without_a_restriction_every_link_is_an_uplink() {
    let table = RouteTable::new(&RouteSnapshot {
        uplink_ifindex: None,
        ..host()
    });
    let expected = Route::Via {
        ifindex: OTHER,
        next_hop: "192.0.2.9".parse().unwrap(),
        source: "192.0.2.1".parse().unwrap(),
        mtu: None,
    };
    assert_eq!(
        table.lookup("192.0.2.9".parse::<IpAddr>().unwrap()),
        expected
    );
}

#[test]
fn a_preferred_source_is_taken() {
    let mut snapshot = host();
    snapshot.routes[1].prefsrc = Some("203.0.113.5".parse().unwrap());
    let table = RouteTable::new(&snapshot);
    assert_eq!(
        table.lookup("1.1.1.1".parse::<IpAddr>().unwrap()),
        via("198.51.100.1", "203.0.113.5")
    );
}

#[test]
fn the_uplinks_addresses_are_listed_in_order() {
    let table = RouteTable::new(&host());
    let on_uplink = table.sources.iter().filter(|own| own.ifindex == UPLINK);
    let sources: Vec<String> = on_uplink.map(|own| own.addr.addr().to_string()).collect();
    assert_eq!(sources, ["198.51.100.5", "203.0.113.5"]);
}

#[test]
fn nothing_known_means_unreachable() {
    let anywhere: IpAddr = "1.1.1.1".parse().unwrap();
    assert_eq!(RouteTable::default().lookup(anywhere), Route::Unreachable);
    let snapshot = RouteSnapshot {
        addresses: Vec::new(),
        ..host()
    };
    assert_eq!(
        RouteTable::new(&snapshot).lookup(anywhere),
        Route::Unreachable,
        "no source address"
    );
}

#[test]
fn a_snapshot_survives_the_channel() {
    let text = serde_json::to_string(&host()).unwrap();
    assert_eq!(
        serde_json::from_str::<RouteSnapshot>(&text).unwrap(),
        host()
    );
}

fn entries() -> impl Strategy<Value = Vec<RouteEntry>> {
    let entry = (
        0_u32..64,
        prop_oneof![2 => 26_u8..=32, 1 => 0_u8..=8],
        2_u32..4,
        0_u32..4,
        0_u8..8,
    );
    prop::collection::vec(entry, 0..30).prop_map(|list| {
        list.into_iter()
            .map(|(low, len, ifindex, metric, kind)| RouteEntry {
                prefix: IpNet::new(Ipv4Addr::from_bits(0x0b00_0000 | low).into(), len)
                    .unwrap()
                    .trunc(),
                kind: if kind == 0 {
                    RouteKind::Unreachable
                } else {
                    RouteKind::Unicast
                },
                ifindex: IfIndex::new(ifindex),
                gateway: None,
                prefsrc: None,
                metric,
                mtu: None,
                share: Default::default(),
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn a_lookup_is_what_comparing_all_routes_says(routes in entries(), lows in prop::collection::vec(0_u32..80, 1..30)) {
        let snapshot = RouteSnapshot { routes, ..host() };
        let table = RouteTable::new(&snapshot);
        for low in lows {
            let addr = IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 | low));
            let mut best: Option<&RouteEntry> = None;
            for route in snapshot.routes.iter().filter(|route| route.prefix.contains(&addr)) {
                let rank = |r: &RouteEntry| (std::cmp::Reverse(r.prefix.prefix_len()), r.metric);
                if best.is_none_or(|best| rank(route) < rank(best)) {
                    best = Some(route);
                }
            }
            // Of the routes of that prefix the uplink's, unless one that refuses precedes.
            let best = best.map(|best| {
                let is_its = |r: &&RouteEntry| r.prefix.trunc() == best.prefix.trunc();
                let mut same: Vec<_> = snapshot.routes.iter().filter(is_its).collect();
                same.sort_by_key(|route| route.metric);
                let is_taken = |r: &&&RouteEntry| r.kind != RouteKind::Unicast || r.ifindex == UPLINK;
                **same.iter().find(is_taken).unwrap_or(&best)
            });
            let expected = match best {
                None => Route::Unreachable,
                Some(r) if r.kind == RouteKind::Unreachable => Route::Refused(r.kind),
                Some(r) if r.ifindex == OTHER => Route::OtherUplink { ifindex: OTHER },
                Some(_) => via(&addr.to_string(), "198.51.100.5"),
            };
            prop_assert_eq!(table.lookup(addr), expected, "{}", addr);
        }
    }
}

#[test]
fn a_route_has_an_mtu_of_its_own_or_none() {
    let mut snapshot = host();
    let mtu = |snapshot: &RouteSnapshot| match RouteTable::new(snapshot)
        .lookup("1.1.1.1".parse::<IpAddr>().unwrap())
    {
        Route::Via { mtu, .. } => mtu,
        other => panic!("{other:?}"),
    };
    assert_eq!(mtu(&snapshot), None);
    for (said, counts) in [(1_300, Some(1_300)), (0, None), (10, Some(68))] {
        snapshot.routes[1].mtu = Some(said);
        assert_eq!(mtu(&snapshot), counts);
    }
}

#[test]
fn loopback_is_never_the_source() {
    let mut snapshot = host();
    snapshot.addresses.insert(
        0,
        HostAddress {
            ifindex: UPLINK,
            addr: "127.0.0.5/8".parse().unwrap(),
            broadcast: None,
            source: SourceUse::Preferred,
        },
    );
    snapshot.routes[1].prefsrc = Some("127.0.0.1".parse().unwrap());
    let table = RouteTable::new(&snapshot);
    assert_eq!(
        table.lookup("1.1.1.1".parse::<IpAddr>().unwrap()),
        via("198.51.100.1", "198.51.100.5")
    );
    assert!(
        table
            .sources
            .iter()
            .all(|own| !own.addr.addr().is_loopback())
    );
}

/// The same host with IPv6: two routers, one by each link.
fn dual() -> RouteSnapshot {
    use RouteKind::{Local, Prohibit, Unicast};
    let mut host = host();
    host.addresses.extend([
        address(UPLINK, "2001:db8:1::5/64", None),
        address(UPLINK, "fe80::5/64", None),
        address(OTHER, "2001:db8:2::5/64", None),
    ]);
    host.routes.extend([
        route("::/0", Unicast, OTHER, Some("fe80::ff"), 1_024),
        route("::/0", Unicast, UPLINK, Some("fe80::1"), 1_024),
        route("2001:db8:1::/64", Unicast, UPLINK, None, 256),
        route("2001:db8:2::/64", Unicast, OTHER, None, 256),
        route("2001:db8:dead::/48", Prohibit, IfIndex::new(1), None, 1_024),
        route("2001:db8:1::/128", Local, UPLINK, None, 0),
    ]);
    host
}

#[test]
fn routes_of_ipv6_are_looked_up_as_those_of_ipv4() {
    let table = RouteTable::new(&dual());
    let lookup = |addr: &str| table.lookup(addr.parse::<IpAddr>().unwrap());
    let own = "2001:db8:1::5";
    let out = lookup("2001:db8:ffff::1");
    assert_eq!(out, via("fe80::1", own));
    assert_eq!(lookup("2001:db8:1::77"), via("2001:db8:1::77", own));
    let other = Route::OtherUplink { ifindex: OTHER };
    assert_eq!(lookup("2001:db8:2::77"), other);
    let refused = Route::Refused(RouteKind::Prohibit);
    assert_eq!(lookup("2001:db8:dead::1"), refused);
    for host in ["::1", own, "fe80::5", "2001:db8:1::", "2001:db8:2::5"] {
        assert_eq!(lookup(host), Route::HostLocal, "{host}");
    }
    assert_eq!(lookup("1.1.1.1"), via("198.51.100.1", "198.51.100.5"));
}

#[test]
fn a_host_leads_to_ipv6_by_a_route_and_an_address() {
    let leads = |change: &dyn Fn(&mut RouteSnapshot)| {
        let mut snapshot = dual();
        change(&mut snapshot);
        RouteTable::new(&snapshot).leads_to_ipv6(Some(UPLINK))
    };
    let is_link_local = |own: &HostAddress| own.addr.to_string().starts_with("fe80");
    assert!(leads(&|_| {}));
    assert!(!leads(&|s| s
        .routes
        .retain(|route| route.prefix.prefix_len() != 0)));
    assert!(!leads(&|s| s.routes.retain(|r| r.ifindex != UPLINK)));
    assert!(
        !leads(&|s| s.addresses.retain(is_link_local)),
        "one of the link is no source"
    );
    assert!(!leads(&|s| for own in &mut s.addresses {
        own.source = SourceUse::Unusable
    }));
    let refuses = route("2000::/3", RouteKind::Unreachable, IfIndex::NONE, None, 0);
    assert!(!leads(&|s| s.routes.push(refuses)));
    let ula = address(UPLINK, "fd00::5/64", None);
    assert!(leads(&|s| s.addresses = vec![ula]));
    assert!(!RouteTable::new(&host()).leads_to_ipv6(None));
    assert!(
        RouteTable::new(&dual()).leads_to_ipv6(Some(OTHER)),
        "which is a VM's own"
    );
}

#[test]
fn an_ipv6_route_has_at_least_its_familys_mtu() {
    let mut snapshot = dual();
    for (said, counts) in [(1_400, Some(1_400)), (0, None), (600, Some(1_280))] {
        for route in &mut snapshot.routes {
            route.mtu = Some(said);
        }
        let route = RouteTable::new(&snapshot).lookup("2001:db8::1".parse::<IpAddr>().unwrap());
        let Route::Via { mtu, .. } = route else {
            panic!("{route:?}");
        };
        assert_eq!(mtu, counts);
    }
}

#[test]
fn sources_are_the_hosts_own_or_delivered_to_it() {
    let unusable = |addr: &str| HostAddress {
        ifindex: IfIndex::new(2),
        addr: addr.parse().unwrap(),
        broadcast: Some([192, 0, 2, 255].into()),
        source: SourceUse::Unusable,
    };
    let own = HostAddress {
        source: SourceUse::Preferred,
        ..unusable("192.0.2.1/24")
    };
    let local = |prefix: &str| RouteEntry {
        prefix: prefix.parse().unwrap(),
        kind: RouteKind::Local,
        ifindex: IfIndex::new(1),
        gateway: None,
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: Default::default(),
    };
    let table = RouteTable::new(&RouteSnapshot {
        addresses: vec![own, unusable("2001:db8::1/64")],
        routes: vec![
            local("198.18.7.0/30"),
            local("203.0.113.9/32"),
            local("2001:db8::1/128"),
            local("127.0.0.0/8"),
            RouteEntry {
                kind: RouteKind::Unicast,
                ..local("198.18.7.2/32")
            },
        ],
        ..RouteSnapshot::default()
    });
    let may = |addr: &str| table.may_send_from(addr.parse().unwrap());
    assert!(may("192.0.2.1") && may("198.18.7.3") && may("203.0.113.9"));
    for addr in [
        "192.0.2.255",
        "192.0.2.2",
        "198.18.7.2",
        "198.18.7.4",
        "127.0.0.1",
        "2001:db8::1",
    ] {
        assert!(!may(addr), "{addr}");
    }
    assert!(table.is_delivered([192, 0, 2, 255]) && table.is_delivered([198, 18, 7, 3]));
    assert!(!table.is_delivered([198, 18, 7, 2]));
}

#[test]
fn an_ipv4_destination_may_be_behind_an_ipv6_router() {
    let mut snapshot = dual();
    snapshot.routes[1].gateway = Some("fe80::1".parse().unwrap());
    let lookup = |snapshot: &RouteSnapshot| {
        RouteTable::new(snapshot).lookup("1.1.1.1".parse::<IpAddr>().unwrap())
    };
    // The link's first address, or the route's own.
    assert_eq!(lookup(&snapshot), via("fe80::1", "198.51.100.5"));
    snapshot.routes[1].prefsrc = Some("203.0.113.5".parse().unwrap());
    assert_eq!(lookup(&snapshot), via("fe80::1", "203.0.113.5"));
    // The link has none: the host's first.
    snapshot.routes[1].prefsrc = None;
    snapshot.addresses.retain(|own| own.ifindex != UPLINK);
    assert_eq!(lookup(&snapshot), via("fe80::1", "192.0.2.1"));
}

#[test]
fn addresses_of_the_host_are_found_by_their_prefix() {
    let mut snapshot = host();
    let unusable = HostAddress {
        source: SourceUse::Unusable,
        ..address(OTHER, "2001:db8:2::9/64", None)
    };
    let usable = address(UPLINK, "2001:db8:4::1/128", None);
    snapshot.addresses.extend([unusable, usable]);
    let table = RouteTable::new(&snapshot);
    let has = |prefix: &str| table.has_address_in(prefix.parse().unwrap());
    for prefix in [
        "2001:db8:2::/64",
        "2001:db8:4::/64",
        "2001:db8:4::1/128",
        "2001:db8::/32",
    ] {
        assert!(has(prefix), "{prefix}");
    }
    for prefix in [
        "2001:db8:1::/64",
        "2001:db8:3::/64",
        "2001:db8:4::2/128",
        "2001:db8:5::/64",
    ] {
        assert!(!has(prefix), "{prefix}");
    }
    assert!(!RouteTable::default().has_address_in("::/0".parse().unwrap()));
}
