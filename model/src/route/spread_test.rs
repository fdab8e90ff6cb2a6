use super::{super::*, *};

const UPLINK: IfIndex = IfIndex::new(2);
const OTHER: IfIndex = IfIndex::new(3);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A next hop of the default route with this weight; `is_further`: not the first.
fn hop(gateway: &str, ifindex: IfIndex, weight: u16, is_further: bool) -> RouteEntry {
    let gateway = ip(gateway);
    RouteEntry {
        prefix: match gateway {
            IpAddr::V4(_) => "0.0.0.0/0".parse().unwrap(),
            IpAddr::V6(_) => "::/0".parse().unwrap(),
        },
        kind: RouteKind::Unicast,
        ifindex,
        gateway: Some(gateway),
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: HopShare { weight, is_further },
    }
}

fn address(ifindex: IfIndex, addr: &str) -> HostAddress {
    HostAddress {
        ifindex,
        addr: addr.parse().unwrap(),
        broadcast: None,
        source: SourceUse::Preferred,
    }
}

fn host(routes: Vec<RouteEntry>) -> RouteSnapshot {
    RouteSnapshot {
        uplink_ifindex: Some(UPLINK),
        addresses: vec![
            address(UPLINK, "198.51.100.5/24"),
            address(OTHER, "192.0.2.1/24"),
            address(UPLINK, "2001:db8:1::5/64"),
        ],
        routes,
        ..RouteSnapshot::default()
    }
}

fn flow(port: u16, remote: &str) -> FlowTuple {
    let remote = ip(remote);
    FlowTuple {
        scope: 7,
        local: match remote {
            IpAddr::V4(_) => ip("10.0.2.15"),
            IpAddr::V6(_) => ip("fd00::2"),
        },
        remote,
        local_port: port,
        remote_port: 443,
        protocol: 6,
    }
}

/// The next hop of a flow's present route.
fn next_hop(table: &RouteTable, flow: &FlowTuple, choose: &mut Choose<'_>) -> (IfIndex, IpAddr) {
    let query = Query::to(flow.remote);
    match table.lookup_for(None, &query, choose, &mut ask::nobody) {
        Route::Via {
            ifindex, next_hop, ..
        } => (ifindex, next_hop),
        other => panic!("{other:?}"),
    }
}

const ROUTERS: [[&str; 2]; 2] = [["198.51.100.1", "198.51.100.2"], ["fe80::1", "fe80::2"]];
const REMOTES: [&str; 2] = ["203.0.113.9", "2001:db8:f::9"];
const FLOWS: u16 = 20_000;

#[test]
fn flows_are_spread_by_weight_and_each_has_one_next_hop() {
    for (routers, remote) in ROUTERS.into_iter().zip(REMOTES) {
        let table = RouteTable::new(&host(vec![
            hop(routers[0], UPLINK, 3, false),
            hop(routers[1], UPLINK, 1, true),
        ]));
        let again = table.clone();
        let mut second = 0;
        for port in 0..FLOWS {
            let flow = flow(port, remote);
            let chosen = next_hop(&table, &flow, &mut by_flow(&flow));
            // Others were looked up meanwhile.
            assert_eq!(next_hop(&again, &flow, &mut by_flow(&flow)), chosen);
            assert_eq!(next_hop(&table, &flow, &mut by_flow(&flow)), chosen);
            second += u32::from(chosen.1 == ip(routers[1]));
        }
        // A quarter; 5 standard deviations are 306.
        assert!((4_694..=5_306).contains(&second), "{second}");
    }
}

#[test]
fn every_part_of_the_tuple_chooses() {
    let table = RouteTable::new(&host(vec![
        hop("198.51.100.1", UPLINK, 1, false),
        hop("198.51.100.2", UPLINK, 1, true),
    ]));
    let base = flow(40_000, REMOTES[0]);
    let differs = |change: &dyn Fn(&mut FlowTuple, u8)| {
        let chosen = |number| {
            let mut flow = base;
            change(&mut flow, number);
            next_hop(&table, &flow, &mut by_flow(&flow))
        };
        (1..32).any(|number| chosen(number) != chosen(0))
    };
    assert!(differs(&|flow, n| flow.scope += u32::from(n)));
    assert!(differs(&|flow, n| flow.local = [10, 0, 2, n].into()));
    assert!(differs(&|flow, n| flow.remote = [203, 0, 113, n].into()));
    assert!(differs(&|flow, n| flow.local_port += u16::from(n)));
    assert!(differs(&|flow, n| flow.remote_port += u16::from(n)));
    assert!(differs(&|flow, n| flow.protocol += n));
}

#[test]
fn a_flow_keeps_its_next_hop_while_the_route_has_it() {
    let three = [1, 2, 3].map(|n| format!("198.51.100.{n}"));
    let hops: Vec<_> = (three.iter().enumerate())
        .map(|(at, router)| hop(router, UPLINK, 1, at > 0))
        .collect();
    let all = RouteTable::new(&host(hops.clone()));
    let mut two = vec![hops[0], hops[2]];
    let without = RouteTable::new(&host(two.clone()));
    two.truncate(1);
    let one = RouteTable::new(&host(two));
    let mut moved = [0; 3];
    for port in 0..300 {
        let flow = flow(port, REMOTES[0]);
        let present = next_hop(&all, &flow, &mut by_flow(&flow));
        let then = next_hop(&without, &flow, &mut keeping(Some(present), &flow));
        let is_gone = present.1 == ip(&three[1]);
        assert_eq!(then != present, is_gone, "{port}");
        if is_gone {
            moved[usize::from(then.1 == ip(&three[2])) * 2] += 1;
        }
        // It comes again: nobody changes back.
        assert_eq!(next_hop(&all, &flow, &mut keeping(Some(then), &flow)), then);
        let last = next_hop(&one, &flow, &mut keeping(Some(then), &flow));
        assert_eq!(last.1, ip(&three[0]));
    }
    assert!(moved[0] > 10 && moved[2] > 10, "{moved:?}");
    // A link without neighbours is the next hop itself.
    let by_links = RouteTable::new(&RouteSnapshot {
        uplink_ifindex: None,
        ..host(vec![hops[0], hop("192.0.2.254", OTHER, 1, true)])
    });
    for port in 0..20 {
        let flow = flow(port, REMOTES[0]);
        let tunnel = Some((OTHER, ip("0.0.0.0")));
        let kept = next_hop(&by_links, &flow, &mut keeping(tunnel, &flow));
        assert_eq!(kept.0, OTHER);
    }
}

#[test]
fn next_hops_by_other_links_are_not_the_uplinks() {
    let routes = vec![
        hop("192.0.2.254", OTHER, 1, false),
        hop("198.51.100.1", UPLINK, 1, true),
        hop("192.0.2.253", OTHER, 1, true),
        hop("198.51.100.2", UPLINK, 1, true),
        // A worse route, and one of the same metric that was appended.
        hop("198.51.100.3", UPLINK, 1, false),
        hop("198.51.100.4", UPLINK, 1, true),
    ];
    let seen = |uplink: Option<IfIndex>, vm_uplinks: Vec<IfIndex>| {
        let table = RouteTable::new(&RouteSnapshot {
            uplink_ifindex: uplink,
            vm_uplinks,
            ..host(routes.clone())
        });
        let mut seen: Vec<_> = (0..200)
            .map(|port| {
                let flow = flow(port, REMOTES[0]);
                next_hop(&table, &flow, &mut by_flow(&flow)).1.to_string()
            })
            .collect();
        seen.sort();
        seen.dedup();
        seen
    };
    let by_uplink = ["198.51.100.1", "198.51.100.2"];
    assert_eq!(seen(Some(UPLINK), Vec::new()), by_uplink);
    assert_eq!(seen(Some(UPLINK), vec![OTHER]), by_uplink);
    assert_eq!(
        seen(Some(OTHER), vec![UPLINK]),
        ["192.0.2.253", "192.0.2.254"]
    );
    assert_eq!(seen(None, Vec::new()).len(), 4, "of the first route");
    let table = RouteTable::new(&RouteSnapshot {
        uplink_ifindex: Some(IfIndex::new(9)),
        ..host(routes)
    });
    assert_eq!(
        table.lookup(ip(REMOTES[0])),
        Route::OtherUplink { ifindex: OTHER }
    );
}

#[test]
fn what_is_left_of_a_worse_route_is_no_next_hop_of_the_better() {
    let third = IfIndex::new(4);
    let worse = |hop: RouteEntry| RouteEntry { metric: 9, ..hop };
    let table = RouteTable::new(&RouteSnapshot {
        uplink_ifindex: None,
        vm_uplinks: vec![UPLINK],
        ..host(vec![
            hop("192.0.2.254", OTHER, 1, false),
            // Its first next hop is of no use.
            worse(hop("203.0.113.1", third, 1, false)),
            worse(hop("198.51.100.1", UPLINK, 1, true)),
        ])
    });
    for port in 0..50 {
        let flow = flow(port, REMOTES[0]);
        let chosen = next_hop(&table, &flow, &mut by_flow(&flow));
        assert_eq!(chosen, (OTHER, ip("192.0.2.254")));
    }
    let own = table.lookup_by(ip(REMOTES[0]), Some(UPLINK));
    assert!(
        matches!(
            own,
            Route::Via {
                ifindex: UPLINK,
                ..
            }
        ),
        "{own:?}"
    );
}

#[test]
fn one_next_hop_is_chosen_by_nobody_and_remembered_for_all() {
    let one = RouteTable::new(&host(vec![hop("198.51.100.1", UPLINK, 5, false)]));
    let flow = flow(1, REMOTES[0]);
    for _ in 0..2 {
        let mut nobody = |_: &[&RouteEntry]| -> usize { panic!("asked") };
        assert_eq!(next_hop(&one, &flow, &mut nobody).1, ip("198.51.100.1"));
    }
    // Of several, each look-up asks.
    let two = RouteTable::new(&host(vec![
        hop("198.51.100.1", UPLINK, 5, false),
        hop("198.51.100.2", UPLINK, 5, true),
    ]));
    for number in [0, 1, 0, 7] {
        let mut choose = |_: &[&RouteEntry]| number;
        let expected = ["198.51.100.1", "198.51.100.2"][number % 7];
        assert_eq!(next_hop(&two, &flow, &mut choose).1, ip(expected));
    }
}
