use ipnet::IpNet;

use super::{super::*, *};

const MAIN: IfIndex = IfIndex::new(2);
const TUNNEL: IfIndex = IfIndex::new(7);
const OTHER: IfIndex = IfIndex::new(8);

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn route(prefix: &str, kind: RouteKind, ifindex: IfIndex) -> RouteEntry {
    RouteEntry {
        prefix: net(prefix),
        kind,
        ifindex,
        gateway: None,
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
        source: SourceUse::Preferred,
    }
}

const MARK: EgressRoutes = EgressRoutes::Mark(7);
const TABLE: EgressRoutes = EgressRoutes::Table(100);

/// A host with a default route in `main`, and one by a tunnel in the table 100, to which a rule
/// leads packets with the mark 7. The table 200 has a part of the world.
fn host() -> RouteSnapshot {
    use RouteKind::{Blackhole, Throw, Unicast};
    let step = |action| RouteStep::all(action);
    let by_mark = vec![
        RouteStep {
            to: Some(net("192.88.0.0/16")),
            ..step(StepAction::Table(200))
        },
        RouteStep {
            from: Some(net("198.51.100.8/30")),
            ..step(StepAction::Refuse(RouteKind::Prohibit))
        },
        RouteStep {
            suppressed_len: Some(0),
            ..step(StepAction::Main)
        },
        step(StepAction::Table(100)),
        step(StepAction::Main),
    ];
    RouteSnapshot {
        uplink_ifindex: Some(MAIN),
        vm_uplinks: vec![TUNNEL, OTHER],
        addresses: vec![
            address(MAIN, "198.51.100.5/24"),
            address(TUNNEL, "10.9.0.2/24"),
            address(TUNNEL, "2001:db8:9::2/64"),
        ],
        routes: vec![
            route("0.0.0.0/0", Unicast, MAIN),
            route("198.51.100.0/24", Unicast, MAIN),
            route("192.0.2.0/24", Unicast, OTHER),
        ],
        further: FurtherRoutes {
            domains: vec![
                RouteDomain {
                    routes: MARK,
                    ipv4: by_mark,
                    ipv6: vec![step(UNDECIDED)],
                },
                RouteDomain {
                    routes: TABLE,
                    ipv4: vec![step(StepAction::Table(100))],
                    ipv6: vec![step(StepAction::Table(100))],
                },
            ],
            tables: vec![
                (
                    100,
                    vec![
                        route("0.0.0.0/0", Unicast, TUNNEL),
                        route("203.0.113.0/24", Blackhole, IfIndex::NONE),
                        route("8.8.8.0/24", Throw, IfIndex::NONE),
                        route("2001:db8::/32", Unicast, TUNNEL),
                    ],
                ),
                (200, vec![route("192.88.99.0/24", Unicast, OTHER)]),
            ],
        },
    }
}

/// A rule by what is not looked at.
const UNDECIDED: StepAction = StepAction::Undecided {
    priority: 50,
    rules: 1,
};

/// Looks up a route without asking the kernel.
fn lookup(table: &RouteTable, egress: &EgressRoutes, query: Query) -> Route {
    table.lookup_for(Some(egress), &query, &mut spread::first, &mut ask::nobody)
}

fn sent(to: &str, from: Option<&str>) -> Query {
    Query {
        source: from.map(addr),
        ..Query::to(addr(to))
    }
}

/// The link by which packets leave, as the look-up says, and what else it says.
fn by(route: Route) -> Result<IfIndex, Route> {
    route.hop().map(|(hop, _)| hop.ifindex).ok_or(route)
}

#[test]
fn a_table_is_asked_instead_of_main_and_nothing_else_is() {
    let table = RouteTable::new(&host());
    let of = |to: &str| by(lookup(&table, &TABLE, Query::to(addr(to))));
    assert_eq!(by(table.lookup(addr("1.1.1.1"))), Ok(MAIN));
    assert_eq!(of("1.1.1.1"), Ok(TUNNEL));
    // The network of the main uplink too: the table has no route of its own to it.
    assert_eq!(of("198.51.100.77"), Ok(TUNNEL));
    assert_eq!(of("203.0.113.9"), Err(Route::Refused(RouteKind::Blackhole)));
    assert_eq!(of("8.8.8.8"), Err(Route::Unreachable), "not by main");
    assert_eq!(of("198.51.100.5"), Err(Route::HostLocal));
    assert_eq!(of("2001:db8::1"), Ok(TUNNEL));
    assert_eq!(of("2001:db9::1"), Err(Route::Unreachable));
    let route = lookup(&table, &TABLE, Query::to(addr("1.1.1.1")));
    assert_eq!(route.hop().unwrap().1, addr("10.9.0.2"));
    // By another device than the table's, or of a domain that is not known, there is no way.
    let by_other = Query {
        uplink: Some(OTHER),
        ..Query::to(addr("1.1.1.1"))
    };
    let elsewhere = lookup(&table, &TABLE, by_other);
    assert_eq!(elsewhere, Route::OtherUplink { ifindex: TUNNEL });
    let unknown = EgressRoutes::Vrf("blue".to_owned());
    let unknown = lookup(&table, &unknown, Query::to(addr("1.1.1.1")));
    assert_eq!(unknown, Route::Unreachable);
}

#[test]
fn rules_are_taken_in_turn_until_a_table_has_a_route() {
    let table = RouteTable::new(&host());
    let of = |to: &str, from: Option<&str>| by(lookup(&table, &MARK, sent(to, from)));
    // Another table about these destinations, where it knows them.
    assert_eq!(of("192.88.99.1", None), Ok(OTHER));
    assert_eq!(of("192.88.1.1", None), Ok(TUNNEL));
    // Main first, except for its default route, and by its own uplink only.
    assert_eq!(of("198.51.100.77", None), Ok(MAIN));
    let other = Route::OtherUplink { ifindex: OTHER };
    assert_eq!(of("192.0.2.9", None), Err(other));
    assert_eq!(of("1.1.1.1", None), Ok(TUNNEL));
    assert_eq!(
        of("203.0.113.9", None),
        Err(Route::Refused(RouteKind::Blackhole))
    );
    assert_eq!(of("8.8.8.8", None), Ok(MAIN), "the table 100 passes it on");
    // By the source, where packets have one.
    let refused = Err(Route::Refused(RouteKind::Prohibit));
    assert_eq!(of("1.1.1.1", Some("198.51.100.9")), refused);
    assert_eq!(of("1.1.1.1", Some("198.51.100.5")), Ok(TUNNEL));
    let undecided = Route::Undecided { priority: 50 };
    assert_eq!(of("2001:db8::1", None), Err(undecided));
}

#[test]
fn a_route_that_refuses_is_not_passed_over_by_its_length() {
    let mut host = host();
    let of = |host: &RouteSnapshot, to: &str| {
        let table = RouteTable::new(host);
        by(lookup(&table, &MARK, Query::to(addr(to))))
    };
    assert_eq!(of(&host, "1.1.1.1"), Ok(TUNNEL));
    host.routes[0] = route("0.0.0.0/0", RouteKind::Blackhole, IfIndex::NONE);
    let refused = Err(Route::Refused(RouteKind::Blackhole));
    assert_eq!(of(&host, "1.1.1.1"), refused);
    host.routes[0].kind = RouteKind::Throw;
    assert_eq!(of(&host, "1.1.1.1"), Ok(TUNNEL));
}

#[test]
fn an_inverted_step_is_for_all_others() {
    let mut host = host();
    let steps = &mut host.further.domains[0].ipv4;
    steps[1].is_inverted = true;
    let table = RouteTable::new(&host);
    let of = |from| by(lookup(&table, &MARK, sent("1.1.1.1", Some(from))));
    assert_eq!(of("198.51.100.9"), Ok(TUNNEL));
    assert_eq!(of("198.51.100.5"), Err(Route::Refused(RouteKind::Prohibit)));
}

#[test]
fn a_change_of_another_table_concerns_its_destinations() {
    let before = RouteTable::new(&host());
    let mut host = host();
    assert!(RouteTable::new(&host).difference_from(&before).is_empty());
    host.further.tables[1].1[0].prefix = net("192.88.98.0/24");
    let now = RouteTable::new(&host).difference_from(&before);
    let nat = addr("198.51.100.5");
    assert!(now.concerns(addr("192.88.99.1"), nat) && now.concerns(addr("192.88.98.1"), nat));
    assert!(!now.concerns(addr("192.88.97.1"), nat));
    host.further.domains[0].ipv4.pop();
    let now = RouteTable::new(&host).difference_from(&before);
    assert!(
        now.concerns(addr("192.88.97.1"), nat),
        "the steps are others"
    );
}

const HOST: EgressRoutes = EgressRoutes::Host { mark: 0 };

/// The same host, with the steps of the host's own packets.
fn by_hosts_rules(steps: &[RouteStep]) -> RouteTable {
    let mut host = host();
    host.further.domains.push(RouteDomain {
        routes: HOST,
        ipv4: steps.to_vec(),
        ipv6: steps.to_vec(),
    });
    RouteTable::new(&host)
}

#[test]
fn the_hosts_routes_lead_by_any_uplink_and_by_no_other_link() {
    let table = by_hosts_rules(&[RouteStep::all(StepAction::AnyOfMain)]);
    let of = |to| by(lookup(&table, &HOST, Query::to(addr(to))));
    assert_eq!(of("1.1.1.1"), Ok(MAIN));
    assert_eq!(of("192.0.2.9"), Ok(OTHER));
    let by_main = Query {
        uplink: Some(MAIN),
        ..Query::to(addr("192.0.2.9"))
    };
    let other = Err(Route::OtherUplink { ifindex: OTHER });
    assert_eq!(by(lookup(&table, &HOST, by_main)), other);
    let mut host = host();
    host.vm_uplinks = vec![TUNNEL];
    host.further.domains.push(RouteDomain {
        routes: HOST,
        ipv4: vec![RouteStep::all(StepAction::AnyOfMain)],
        ipv6: Vec::new(),
    });
    let table = RouteTable::new(&host);
    let of = |to| by(lookup(&table, &HOST, Query::to(addr(to))));
    assert_eq!(of("192.0.2.9"), other, "the programs are not there");
    assert_eq!(of("1.1.1.1"), Ok(MAIN));
}

#[test]
fn where_a_rule_is_undecided_the_kernels_answer_decides() {
    use Answer::{NoRoute, Refused, Table};
    let steps = [
        RouteStep {
            to: Some(net("1.0.0.0/8")),
            ..RouteStep::all(UNDECIDED)
        },
        RouteStep::all(StepAction::AnyOfMain),
    ];
    let table = by_hosts_rules(&steps);
    let asked = std::cell::Cell::new(0);
    let told = |to, answer| {
        let ask: &mut ask::Ask<'_> = &mut || {
            asked.set(asked.get() + 1);
            answer
        };
        let query = Query::to(addr(to));
        by(table.lookup_for(Some(&HOST), &query, &mut spread::first, ask))
    };
    let undecided = Err(Route::Undecided { priority: 50 });
    assert_eq!(told("1.1.1.1", None), undecided);
    assert_eq!(told("1.1.1.1", Some(Table(100))), Ok(TUNNEL));
    assert_eq!(told("1.1.1.1", Some(Table(254))), Ok(MAIN));
    assert_eq!(told("1.1.1.1", Some(Table(255))), Err(Route::HostLocal));
    assert_eq!(told("1.1.1.1", Some(NoRoute)), Err(Route::Unreachable));
    let prohibited = RouteKind::Prohibit;
    let refused = Err(Route::Refused(prohibited));
    assert_eq!(told("1.1.1.1", Some(Refused(prohibited))), refused);
    // It has no route there in our copy, or there is no copy.
    assert_eq!(told("1.1.1.1", Some(Table(200))), Err(Route::Unreachable));
    assert_eq!(told("1.1.1.1", Some(Table(300))), undecided);
    assert_eq!(asked.take(), 8);
    // Not about what the rule is not for.
    assert_eq!(told("8.8.4.4", Some(Table(100))), Ok(MAIN));
    assert_eq!(asked.take(), 0);
    // Of a mark's routes, those of main by the uplink alone.
    let mut host = host();
    host.routes
        .push(route("2001:db8::/16", RouteKind::Unicast, OTHER));
    let table = RouteTable::new(&host);
    let query = Query::to(addr("2001:db8::1"));
    let ask: &mut ask::Ask<'_> = &mut || Some(Table(254));
    let by_main = table.lookup_for(Some(&MARK), &query, &mut spread::first, ask);
    assert_eq!(by_main, Route::OtherUplink { ifindex: OTHER });
}

#[test]
fn rules_by_the_source_know_that_of_an_answer_which_is_not_given_to_it() {
    let steps = [
        RouteStep {
            from: Some(net("10.9.0.2/32")),
            ..RouteStep::all(StepAction::Table(100))
        },
        RouteStep::all(StepAction::AnyOfMain),
    ];
    let table = by_hosts_rules(&steps);
    let from = |from: &str| Query {
        from: Some(addr(from)),
        ..Query::to(addr("1.1.1.1"))
    };
    assert_eq!(by(lookup(&table, &HOST, from("10.9.0.2"))), Ok(TUNNEL));
    let by_main = lookup(&table, &HOST, from("10.9.0.3"));
    assert_eq!(by_main.hop().unwrap().1, addr("198.51.100.5"));
}

#[test]
fn another_digest_of_the_rules_concerns_all_flows() {
    let with = |rules| {
        let action = StepAction::Undecided {
            priority: 50,
            rules,
        };
        by_hosts_rules(&[RouteStep::all(action)])
    };
    assert!(with(1).difference_from(&with(1)).is_empty());
    let now = with(2).difference_from(&with(1));
    assert!(now.concerns(addr("8.8.8.8"), addr("198.51.100.5")));
}
