//! The watch reports changes of IPv6 addresses and routes.
use std::net::{IpAddr, Ipv6Addr};

use super::{
    super::tests::{until, uplink},
    super::{AddressState, Network, NetworkWatch, Route, RouteKind, Table},
};
use slipgate_abi::link::{NextHopFlags, is_usable};

use super::super::NextHops;
use crate::testing::{datapath, in_netns, run};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn route_to(network: &Network, destination: &str, table: Table) -> Option<Route> {
    let is_it = |r: &&Route| r.destination == ip(destination) && r.table == table;
    network.routes.iter().find(is_it).copied()
}

/// A namespace of the tests may have been made with IPv6 off.
fn enable() {
    for scope in ["all", "default"] {
        run(&format!("sysctl -qw net.ipv6.conf.{scope}.disable_ipv6=0"));
    }
}

#[test]
fn ipv6_is_shown_without_what_every_link_has() {
    in_netns("ipv6_is_shown_without_what_every_link_has", || {
        enable();
        let up0 = uplink();
        run("ip -6 addr add 2001:db8:1::5/64 dev up0 nodad");
        run("ip -6 addr add 2001:db8:1::6/64 dev up0 nodad preferred_lft 0 valid_lft 1000");
        run("ip -6 route add default via fe80::1 dev up0 metric 50 mtu 1400");
        run("ip -6 route add prohibit 2001:db8:dead::/48");
        run(
            "ip -6 route add 2001:db8:2::/48 nexthop via fe80::7 dev up0 nexthop via fe80::8 dev up0",
        );
        run("ip neigh add fe80::1 lladdr 02:00:00:00:00:01 dev up0 nud permanent");
        let mut watch = NetworkWatch::open().unwrap();
        // Routes of the table local come with the carrier.
        until(&mut watch, "an address of its own", |network| {
            route_to(network, "2001:db8:1::5", Table::Local).is_some()
        });
        let network = watch.network();

        let states: Vec<_> = network
            .addresses
            .iter()
            .filter(|a| a.address.is_ipv6() && a.ifindex == up0)
            .map(|a| (a.address, a.prefix_len, a.state))
            .collect();
        let expected = [
            (ip("2001:db8:1::5"), 64, AddressState::Preferred),
            (ip("2001:db8:1::6"), 64, AddressState::Deprecated),
        ];
        assert!(
            expected.iter().all(|own| states.contains(own)),
            "{states:?}"
        );
        assert_eq!(states.len(), 2, "no link-local address: {states:?}");
        let of_links = |address: IpAddr| match address {
            IpAddr::V4(_) => false,
            IpAddr::V6(a) => a.is_unicast_link_local() || a.is_multicast(),
        };
        assert!(network.routes.iter().all(|r| !of_links(r.destination)));

        let default = route_to(network, "::", Table::Main).unwrap();
        let expected = (Some(ip("fe80::1")), Some(up0), 50, Some(1_400), 0);
        let found = (
            default.gateway,
            default.oif,
            default.metric,
            default.mtu,
            default.prefix_len,
        );
        assert_eq!(found, expected);
        let refused = route_to(network, "2001:db8:dead::", Table::Main).unwrap();
        assert_eq!(refused.kind, RouteKind::Refused);
        let many = route_to(network, "2001:db8:2::", Table::Main).unwrap();
        assert_eq!(many.gateway, Some(ip("fe80::7")));
        let own = route_to(network, "2001:db8:1::5", Table::Local).unwrap();
        assert_eq!(own.kind, RouteKind::Local);

        let router = network.neighbours[&(up0, ip("fe80::1"))];
        assert_eq!(router.mac, Some([2, 0, 0, 0, 0, 1]));
        assert!(network.is_next_hop(up0, ip("fe80::1")), "a router");
        assert!(
            network.is_next_hop(up0, ip("2001:db8:1::99")),
            "on the link"
        );
        for other in ["fe80::2", "2001:db8:9::1", "2001:db8:1::5", "::"] {
            assert!(!network.is_next_hop(up0, ip(other)), "{other}");
        }
        assert_eq!(
            network.default_uplink().map(|link| link.ifindex),
            Some(up0),
            "IPv6's alone"
        );
    });
}

#[test]
fn a_router_of_ipv6_is_one_of_an_ipv4_route() {
    in_netns("a_router_of_ipv6_is_one_of_an_ipv4_route", || {
        enable();
        let up0 = uplink();
        run("ip -4 route add default via inet6 fe80::1 dev up0");
        run(
            "ip route add 203.0.113.0/24 nexthop via inet6 fe80::7 dev up0 nexthop via 192.0.2.8 dev up0",
        );
        let watch = NetworkWatch::open().unwrap();
        let network = watch.network();
        let gateway = |to: &str| route_to(network, to, Table::Main).unwrap().gateway;
        assert_eq!(gateway("0.0.0.0"), Some(ip("fe80::1")));
        assert_eq!(gateway("203.0.113.0"), Some(ip("fe80::7")));
        assert!(network.is_next_hop(up0, ip("fe80::1")));
        assert!(network.is_next_hop(up0, ip("fe80::7")));
        assert!(
            !network.is_next_hop(up0, [198, 51, 100, 9].into()),
            "what is behind the router is not on the link"
        );
    });
}

#[test]
fn changes_of_ipv6_are_followed_and_those_of_links_are_none() {
    in_netns(
        "changes_of_ipv6_are_followed_and_those_of_links_are_none",
        || {
            enable();
            let up0 = uplink();
            let mut watch = NetworkWatch::open().unwrap();
            until(&mut watch, "up", |network| network.links[&up0].up);
            // Its own link-local address becomes usable meanwhile.
            std::thread::sleep(std::time::Duration::from_millis(2_500));
            while watch.update().unwrap().any() {}

            run("ip -6 addr add fe80::77/64 dev up0 nodad");
            let changes = watch.update().unwrap();
            assert!(!changes.addresses && !changes.routes, "{changes:?}");

            let has = |state: Option<AddressState>| {
                move |network: &Network| {
                    let found = network
                        .addresses
                        .iter()
                        .find(|a| a.address == ip("2001:db8:1::5"));
                    found.map(|a| a.state) == state
                }
            };
            run("ip -6 addr add 2001:db8:1::5/64 dev up0");
            until(&mut watch, "probed", has(Some(AddressState::Unusable)));
            until(&mut watch, "usable", has(Some(AddressState::Preferred)));
            run("ip -6 addr change 2001:db8:1::5/64 dev up0 preferred_lft 0");
            until(
                &mut watch,
                "deprecated",
                has(Some(AddressState::Deprecated)),
            );
            run("ip -6 route add default via fe80::1 dev up0");
            let has_default = |network: &Network| route_to(network, "::", Table::Main).is_some();
            until(&mut watch, "a default route", has_default);
            run("ip neigh add fe80::9 lladdr 02:00:00:00:00:09 dev up0 nud reachable");
            let nine = (up0, ip("fe80::9"));
            until(&mut watch, "a neighbour", |n| {
                n.neighbours.contains_key(&nine)
            });
            run("ip -6 route del default");
            until(&mut watch, "no default route", |n| !has_default(n));
            run("ip -6 addr del 2001:db8:1::5/64 dev up0");
            until(&mut watch, "no address", has(None));
            let group: Ipv6Addr = "ff02::1".parse().unwrap();
            assert!(
                watch
                    .network()
                    .routes
                    .iter()
                    .all(|r| r.destination != IpAddr::V6(group))
            );
        },
    );
}

#[test]
fn ipv6_next_hops_have_elements_of_their_own() {
    in_netns("ipv6_next_hops_have_elements_of_their_own", || {
        enable();
        let up0 = uplink();
        run("ip -6 addr add 2001:db8:1::5/64 dev up0 nodad");
        run("ip -6 route add default via fe80::1 dev up0");
        run("ip route add default via 192.0.2.1 dev up0");
        run("ip neigh add 192.0.2.1 lladdr 02:00:00:00:00:04 dev up0 nud permanent");
        let datapath = datapath();
        let maps = datapath.maps();
        let claim = |neighbour: &str| maps.claim_next_hop(5, up0, ip(neighbour), 0).unwrap();
        let [four, six, unknown] = ["192.0.2.1", "fe80::1", "fe80::2"].map(claim);
        assert_eq!(claim("fe80::1"), six, "the same again");
        assert!(four != six && six != unknown);

        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "up", |network| network.links[&up0].up);
        let mut hops = NextHops::new(vec![5]).unwrap();
        let valid = |hops: &mut NextHops, watch: &NetworkWatch| {
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap()
        };
        assert_eq!(valid(&mut hops, &watch), 1, "the IPv4 one");
        let shown = run("ip -6 neigh show dev up0");
        assert!(
            shown.contains("fe80::1") && shown.contains("managed"),
            "{shown}"
        );
        assert!(!shown.contains("fe80::2"), "no route leads by it: {shown}");

        run("ip neigh replace fe80::1 lladdr 02:00:00:00:00:06 dev up0 nud reachable");
        let router = (up0, ip("fe80::1"));
        until(&mut watch, "a MAC", |n| {
            n.neighbours.get(&router).is_some_and(|n| n.mac.is_some())
        });
        assert_eq!(valid(&mut hops, &watch), 2);
        let read = crate::ReadOnlyMaps::open_pinned(&datapath.paths().pin_dir).unwrap();
        let element = read.next_hop(six).unwrap();
        assert!(is_usable(element.sequence));
        assert_eq!(element.neighbour_mac, [2, 0, 0, 0, 0, 6]);
        assert_eq!(element.flags, NextHopFlags::IPV6);
        assert_eq!(IpAddr::from(element.neighbour6), ip("fe80::1"));
        let element = read.next_hop(four).unwrap();
        assert_eq!(
            (element.neighbour_mac, element.flags),
            ([2, 0, 0, 0, 0, 4], 0)
        );
        // An element that is used again for the other family is not taken for the former one.
        maps.free_next_hop(six);
        let again = maps.claim_next_hop(5, up0, ip("192.0.2.9"), 0).unwrap();
        assert_eq!(again, six);
        let element = read.next_hop(again).unwrap();
        assert_eq!((element.flags, element.neighbour6.octets), (0, [0; 16]));
    });
}
