use super::*;

fn rule(priority: u32, table: u32) -> Rule {
    Rule {
        priority,
        table,
        ..Rule::default()
    }
}

fn with_mark(rule: Rule, mark: u32, mask: u32) -> Rule {
    Rule { mark, mask, ..rule }
}

fn actions(rules: &[Rule], mark: u32) -> Vec<StepAction> {
    let steps = steps_of_mark(rules, (mark, Main), false);
    steps.into_iter().map(|step| step.action).collect()
}

use StepAction::{Main, Refuse, Table as To, Undecided};

#[test]
fn rules_about_the_mark_come_in_their_order_and_others_not_at_all() {
    let rules = [
        rule(0, LOCAL),
        rule(32_766, MAIN),
        with_mark(rule(100, 10), 0x10, 0x30),
        with_mark(rule(90, 9), 7, u32::MAX),
        rule(32_767, 253),
        Rule {
            is_ipv6: true,
            ..rule(1, 66)
        },
    ];
    assert_eq!(actions(&rules, 0x17), [To(10), Main, To(253)]);
    assert_eq!(actions(&rules, 7), [To(9), Main, To(253)]);
    assert_eq!(actions(&rules, 0x20), [Main, To(253)]);
    assert_eq!(actions(&[], 7), [Main], "a kernel without rules");
}

#[test]
fn rules_that_are_for_others_than_the_hosts_own_packets_are_passed_over() {
    let of_others = [
        Rule {
            iif: Some("eth0".to_owned()),
            ..rule(1, 10)
        },
        Rule {
            oif: Some("eth0".to_owned()),
            ..rule(2, 11)
        },
        Rule {
            is_of_vrfs: true,
            ..rule(3, 0)
        },
        Rule {
            iif: Some("lo".to_owned()),
            ..rule(4, 12)
        },
    ];
    assert_eq!(actions(&of_others, 7), [To(12)]);
}

#[test]
fn not_holds_for_all_other_marks_with_what_is_passed_over() {
    let by_wg_quick = Rule {
        is_inverted: true,
        suppressed_len: Some(0),
        ..with_mark(rule(5, 51_820), 51_820, u32::MAX)
    };
    let steps = steps_of_mark(std::slice::from_ref(&by_wg_quick), (7, Main), false);
    assert_eq!(steps[0].action, To(51_820));
    assert_eq!(
        (steps[0].is_inverted, steps[0].suppressed_len),
        (false, Some(0))
    );
    assert_eq!(actions(&[by_wg_quick], 51_820), []);
    let to = Rule {
        is_inverted: true,
        to: Some(("192.0.2.0".parse().unwrap(), 24)),
        ..rule(6, 10)
    };
    let steps = steps_of_mark(&[to], (7, Main), false);
    assert!(steps[0].is_inverted && steps[0].to.is_some());
}

/// The actions, with undecided ones by their priority alone.
fn priorities(rules: &[Rule], mark: u32) -> Vec<Result<StepAction, u32>> {
    let actions = actions(rules, mark).into_iter();
    let each = actions.map(|action| match action {
        Undecided { priority, .. } => Err(priority),
        action => Ok(action),
    });
    each.collect()
}

fn by_port() -> Rule {
    Rule {
        more: vec![0; 8],
        ..rule(5, 10)
    }
}

#[test]
fn what_is_not_looked_at_is_undecided_and_what_comes_behind_it_is_known() {
    let rules = [rule(1, 9), by_port(), rule(6, MAIN)];
    assert_eq!(priorities(&rules, 7), [Ok(To(9)), Err(5), Ok(Main)]);
    // With `not` it is for some of all addresses, also of those that it names.
    let not_by_port = |from: Option<_>| Rule {
        is_inverted: true,
        from,
        ..by_port()
    };
    for from in [None, Some(("198.51.100.8".parse().unwrap(), 30))] {
        let steps = steps_of_mark(&[not_by_port(from), rule(6, MAIN)], (7, Main), false);
        let undecided = RouteStep::all(steps[0].action);
        assert!(matches!(steps[0].action, Undecided { priority: 5, .. }));
        assert_eq!(steps, [undecided, RouteStep::all(Main)], "{from:?}");
    }
    // Of another mark, it is not for these packets in any case.
    let of_another = with_mark(by_port(), 8, u32::MAX);
    assert_eq!(actions(&[of_another, rule(6, MAIN)], 7), [Main]);
}

#[test]
fn an_undecided_step_tells_of_each_change_of_the_rules() {
    let steps = |rules: &[Rule]| actions(rules, 7);
    let before = steps(&[by_port(), rule(6, MAIN)]);
    assert_eq!(before, steps(&[by_port(), rule(6, MAIN)]));
    let other_port = Rule {
        more: vec![1; 8],
        ..by_port()
    };
    assert_ne!(before[0], steps(&[other_port, rule(6, MAIN)])[0]);
    let behind = [by_port(), rule(6, MAIN), rule(7, 100)];
    assert_ne!(before[0], steps(&behind)[0]);
}

#[test]
fn tables_that_the_kernel_may_name_are_followed() {
    let goto = Rule {
        action: RuleKind::Goto(40),
        ..rule(20, 0)
    };
    let of_ipv6 = Rule {
        is_ipv6: true,
        ..rule(21, 66)
    };
    let mut rules = vec![
        by_port(),
        goto,
        rule(30, 100),
        with_mark(rule(31, 200), 8, u32::MAX),
        of_ipv6,
        rule(40, MAIN),
    ];
    let tables = |rules: &[Rule]| {
        let network = Network {
            rules: rules.to_vec(),
            ..Network::default()
        };
        let routes = EgressRoutes::Host { mark: 7 };
        Vec::from_iter(tables_of(&network, &[domain(&network, &routes)]))
    };
    // What is behind the jump too: the undecided rule may lead there.
    assert_eq!(tables(&rules), [10, 66, 100]);
    rules.remove(0);
    assert_eq!(tables(&rules), [66]);
}

#[test]
fn the_hosts_routes_are_those_of_main_by_any_device() {
    let network = Network {
        rules: vec![rule(0, LOCAL), rule(32_766, MAIN), rule(32_767, 253)],
        ..Network::default()
    };
    let of = |routes| {
        let domain = domain(&network, &routes);
        let actions = domain.ipv4.iter().map(|step| step.action);
        (actions.collect(), trouble_with(&network, &domain).is_some())
    };
    let any: (Vec<_>, _) = of(EgressRoutes::Host { mark: 0 });
    assert_eq!(any, (vec![StepAction::AnyOfMain, To(253)], false));
    let marked = of(EgressRoutes::Mark(7));
    assert_eq!(marked, (vec![Main, To(253)], true));
}

#[test]
fn rules_refuse_and_lead_on() {
    let refuse = Rule {
        action: RuleKind::Refuse(slipgate_control::netlink::RouteKind::Blackhole),
        ..rule(5, 0)
    };
    let blackhole = Refuse(RouteKind::Blackhole);
    assert_eq!(actions(&[refuse.clone(), rule(6, MAIN)], 7), [blackhole]);
    let goto = Rule {
        action: RuleKind::Goto(6),
        ..rule(1, 0)
    };
    assert_eq!(actions(&[goto, refuse, rule(6, MAIN)], 7), [Main]);
}

fn default_route(ifindex: u32, table: Table) -> Route {
    Route {
        destination: std::net::Ipv6Addr::UNSPECIFIED.into(),
        prefix_len: 0,
        table,
        kind: slipgate_control::netlink::RouteKind::Unicast,
        oif: Some(IfIndex::new(ifindex)),
        gateway: None,
        source: None,
        metric: 1_024,
        mtu: None,
        weight: 1,
        is_further: false,
    }
}

/// A host whose uplink is device 2 and whose device 3 has a global address, with one default route.
fn host_with(route: Route, rules: Vec<Rule>) -> Network {
    let mut network = Network {
        addresses: vec![slipgate_control::netlink::Address {
            ifindex: IfIndex::new(3),
            address: "2001:db8:2::2".parse().unwrap(),
            prefix_len: 64,
            broadcast: None,
            peer: None,
            state: slipgate_control::netlink::AddressState::default(),
        }],
        routes: vec![route],
        rules,
        ..Network::default()
    };
    network.links.insert(Link::ethernet(IfIndex::new(2), "up0"));
    network.links.insert(Link::ethernet(IfIndex::new(3), "up1"));
    network
}

fn leads_by(network: &Network, routes: &EgressRoutes, query: Query) -> bool {
    let is_way_out = |link: &Link| link.name != "tap0";
    let all = (IfIndex::new(2), is_way_out);
    leads(network, domain(network, routes), &query, all)
}

#[test]
fn the_hosts_routes_lead_to_ipv6_by_any_device_with_an_address() {
    let host = EgressRoutes::Host { mark: 0 };
    let there = Query::to(OUT_THERE);
    let by_second = host_with(default_route(3, Table::Main), vec![]);
    assert!(leads_by(&by_second, &host, there));
    let marked = EgressRoutes::Mark(7);
    assert!(!leads_by(&by_second, &marked, there), "by the uplink alone");
    let only = |uplink| Query {
        uplink: Some(IfIndex::new(uplink)),
        ..there
    };
    assert!(leads_by(&by_second, &host, only(3)));
    assert!(!leads_by(&by_second, &host, only(2)));

    let mut by_tap = by_second.clone();
    by_tap.links.insert(Link::ethernet(IfIndex::new(3), "tap0"));
    assert!(!leads_by(&by_tap, &host, there));
    let without_address = Network {
        addresses: vec![],
        ..by_second
    };
    assert!(!leads_by(&without_address, &host, there));
    let nowhere = host_with(
        Route {
            prefix_len: 64,
            destination: "2001:db8::".parse().unwrap(),
            ..default_route(3, Table::Main)
        },
        vec![],
    );
    assert!(!leads_by(&nowhere, &host, there));
}

#[test]
fn rules_decide_whether_the_hosts_routes_lead_to_ipv6() {
    let host = EgressRoutes::Host { mark: 0 };
    let there = Query::to(OUT_THERE);
    let of_ipv6 = |rule| Rule {
        is_ipv6: true,
        ..rule
    };
    let main = of_ipv6(rule(32_766, MAIN));
    let by_table = |first: Rule| {
        let rules = vec![of_ipv6(first), main.clone()];
        host_with(default_route(3, Table::Other(100)), rules)
    };
    assert!(leads_by(&by_table(rule(90, 100)), &host, there));
    assert!(!leads_by(&by_table(rule(90, 101)), &host, there));
    let named = by_table(rule(90, 101));
    assert!(leads_by(&named, &EgressRoutes::Table(100), there));
    // By the address of the VM's pool.
    let from = by_table(Rule {
        from: Some(("2001:db8:9::".parse().unwrap(), 64)),
        ..rule(90, 100)
    });
    assert!(!leads_by(&from, &host, there));
    let of_pool = Query {
        from: Some("2001:db8:9::1".parse().unwrap()),
        ..there
    };
    assert!(leads_by(&from, &host, of_pool));
    // For some ports it is so.
    let by_port = Rule {
        more: vec![0; 8],
        ..rule(90, 100)
    };
    assert!(leads_by(&by_table(by_port), &host, there));
}
