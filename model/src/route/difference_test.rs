use super::{super::*, *};
use slipgate_abi::IfIndex;

const UPLINK: IfIndex = IfIndex::new(2);
const OTHER: IfIndex = IfIndex::new(3);

fn net(prefix: &str) -> IpNet {
    prefix.parse().unwrap()
}

fn route(prefix: &str, ifindex: IfIndex, gateway: Option<[u8; 4]>) -> RouteEntry {
    RouteEntry {
        prefix: net(prefix),
        kind: RouteKind::Unicast,
        ifindex,
        gateway: gateway.map(IpAddr::from),
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: Default::default(),
    }
}

fn address(ifindex: IfIndex, addr: &str) -> HostAddress {
    HostAddress {
        ifindex,
        addr: net(addr),
        broadcast: None,
        source: Default::default(),
    }
}

fn host() -> RouteSnapshot {
    RouteSnapshot {
        vm_uplinks: Vec::new(),
        further: Default::default(),
        uplink_ifindex: Some(UPLINK),
        addresses: vec![
            address(UPLINK, "192.0.2.1/24"),
            address(OTHER, "172.17.0.1/16"),
        ],
        routes: vec![
            route("0.0.0.0/0", UPLINK, Some([192, 0, 2, 254])),
            route("192.0.2.0/24", UPLINK, None),
            route("172.17.0.0/16", OTHER, None),
        ],
    }
}

fn changed(change: impl FnOnce(&mut RouteSnapshot)) -> Difference {
    let mut snapshot = host();
    change(&mut snapshot);
    RouteTable::new(&snapshot).difference_from(&RouteTable::new(&host()))
}

fn concerns(difference: &Difference, remote: [u8; 4]) -> bool {
    difference.concerns(remote, [192, 0, 2, 1])
}

#[test]
fn what_is_no_flows_is_no_difference() {
    assert!(changed(|_| {}).is_empty());
    // A worse route to where a better one leads.
    let worse = |s: &mut RouteSnapshot| {
        let default = route("0.0.0.0/0", OTHER, None);
        s.routes.push(RouteEntry {
            metric: 600,
            ..default
        });
    };
    assert!(changed(worse).is_empty());
}

#[test]
fn a_route_concerns_who_is_in_its_prefix() {
    let added = changed(|s| s.routes.push(route("198.51.100.0/24", OTHER, None)));
    let gone = changed(|s| s.routes.truncate(2));
    assert!(concerns(&added, [198, 51, 100, 7]) && !concerns(&added, [198, 51, 101, 7]));
    assert!(concerns(&gone, [172, 17, 0, 9]) && !concerns(&gone, [172, 18, 0, 9]));
    let by_default = changed(|s| s.routes[0].gateway = Some([192, 0, 2, 253].into()));
    assert!(concerns(&by_default, [8, 8, 8, 8]));
    let mtu = changed(|s| s.routes[0].mtu = Some(1_300));
    assert!(concerns(&mtu, [8, 8, 8, 8]));
}

#[test]
fn an_address_that_goes_concerns_who_is_translated_to_it() {
    let gone = changed(|s| s.addresses.truncate(1));
    assert!(gone.concerns([8, 8, 8, 8], [172, 17, 0, 1]));
    assert!(!concerns(&gone, [8, 8, 8, 8]));
    // What was the host's may lead by the uplink now.
    assert!(concerns(&gone, [172, 17, 0, 1]));
    // The uplink's own are what sources are picked from.
    let other = changed(|s| s.addresses[0] = address(UPLINK, "192.0.2.2/24"));
    assert_eq!(other, Difference::everything());
    // One of loopback is no source, wherever it is.
    let loopback = changed(|s| s.addresses.push(address(UPLINK, "127.0.0.5/8")));
    assert!(concerns(&loopback, [127, 0, 0, 5]) && !concerns(&loopback, [8, 8, 8, 8]));
    let uplink = changed(|s| s.uplink_ifindex = Some(OTHER));
    assert_eq!(uplink, Difference::everything());
}

#[test]
fn differences_add_up_within_bounds() {
    let mut sum = Difference::default();
    assert!(sum.is_empty());
    sum.add(changed(|s| {
        s.routes.push(route("198.51.100.0/24", OTHER, None))
    }));
    sum.add(changed(|s| s.routes.truncate(2)));
    assert!(concerns(&sum, [198, 51, 100, 7]) && concerns(&sum, [172, 17, 0, 9]));
    assert!(!concerns(&sum, [8, 8, 8, 8]));
    sum.add(changed(|s| {
        s.routes
            .extend((0..100).map(|n| route(&format!("10.{n}.0.0/16"), OTHER, None)));
    }));
    assert_eq!(sum, Difference::everything());
}

#[test]
fn a_route_by_a_vms_own_uplink_concerns_who_is_in_its_prefix() {
    let by_other = |s: &mut RouteSnapshot| {
        s.vm_uplinks = vec![OTHER];
        s.routes.push(RouteEntry {
            metric: 600,
            ..route("0.0.0.0/0", OTHER, None)
        });
    };
    assert_eq!(changed(by_other), Difference::everything());
    let (mut before, mut after) = (host(), host());
    before.vm_uplinks = vec![OTHER];
    by_other(&mut after);
    let difference = |after: &RouteSnapshot, before: &RouteSnapshot| {
        RouteTable::new(after).difference_from(&RouteTable::new(before))
    };
    assert!(concerns(&difference(&after, &before), [8, 8, 8, 8]));
    // Its addresses are what sources are picked from, as the uplink's are.
    before = after.clone();
    after.addresses[1] = address(OTHER, "172.17.0.2/16");
    assert_eq!(difference(&after, &before), Difference::everything());
}

#[test]
fn a_change_of_ipv6_concerns_flows_of_ipv6_only() {
    let route6 = |prefix: &str, ifindex| RouteEntry {
        prefix: net(prefix),
        ..route("0.0.0.0/0", ifindex, None)
    };
    let added = changed(|s| s.routes.push(route6("2001:db8::/32", UPLINK)));
    let v6 = |text: &str| text.parse::<IpAddr>().unwrap();
    assert!(added.concerns(v6("2001:db8::1"), v6("2001:db8:1::5")));
    assert!(!added.concerns(v6("2001:db9::1"), v6("2001:db8:1::5")));
    assert!(!concerns(&added, [8, 8, 8, 8]));
    // The uplink has none: any of the host's may be the source.
    let first = changed(|s| s.addresses.push(address(OTHER, "2001:db8:1::5/64")));
    assert_eq!(first, Difference::everything());
    // It has one: those of other links are none of its flows' business.
    let (mut before, mut after) = (host(), host());
    before.addresses.push(address(UPLINK, "2001:db8:1::5/64"));
    after.addresses.clone_from(&before.addresses);
    after.addresses.push(address(OTHER, "2001:db8:2::5/64"));
    let difference = RouteTable::new(&after).difference_from(&RouteTable::new(&before));
    assert!(!concerns(&difference, [8, 8, 8, 8]));
    assert!(difference.concerns(v6("2001:db8:2::5"), v6("2001:db8:1::5")));
    // An address that is deprecated gives way to another.
    before.addresses.push(address(UPLINK, "2001:db8:1::6/64"));
    after.addresses.clone_from(&before.addresses);
    after.addresses[2].source = SourceUse::Deprecated;
    let difference = RouteTable::new(&after).difference_from(&RouteTable::new(&before));
    assert_eq!(difference, Difference::everything());
}

#[test]
fn a_prefix_that_is_delivered_no_more_concerns_who_is_translated_into_it() {
    let local = RouteEntry {
        kind: RouteKind::Local,
        ..route("198.18.7.0/30", OTHER, None)
    };
    let mut with_local = host();
    with_local.routes.push(local);
    let (with, without) = (RouteTable::new(&with_local), RouteTable::new(&host()));
    let gone = without.difference_from(&with);
    assert!(gone.concerns([8, 8, 8, 8], [198, 18, 7, 1]));
    assert!(!gone.concerns([8, 8, 8, 8], [198, 18, 7, 4]));
    let added = with.difference_from(&without);
    assert!(!added.concerns([8, 8, 8, 8], [198, 18, 7, 1]));
}
