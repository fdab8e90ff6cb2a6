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
    let steps = steps_of_mark(rules, mark, false);
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
    let steps = steps_of_mark(std::slice::from_ref(&by_wg_quick), 7, false);
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
    let steps = steps_of_mark(&[to], 7, false);
    assert!(steps[0].is_inverted && steps[0].to.is_some());
}

#[test]
fn what_is_not_looked_at_leaves_the_rest_undecided() {
    let by_port = Rule {
        is_by_more: true,
        ..rule(5, 10)
    };
    let rules = [rule(1, 9), by_port.clone(), rule(6, MAIN)];
    assert_eq!(actions(&rules, 7), [To(9), Undecided { priority: 5 }]);
    // With `not` it is for some of all addresses, also of those that it names.
    let not_by_port = |from: Option<_>| Rule {
        is_inverted: true,
        from,
        ..by_port.clone()
    };
    for from in [None, Some(("198.51.100.8".parse().unwrap(), 30))] {
        let steps = steps_of_mark(&[not_by_port(from), rule(6, MAIN)], 7, false);
        let undecided = RouteStep::all(Undecided { priority: 5 });
        assert_eq!(steps, [undecided], "{from:?}");
    }
    // Of another mark, it is not for these packets in any case.
    let of_another = with_mark(by_port, 8, u32::MAX);
    assert_eq!(actions(&[of_another, rule(6, MAIN)], 7), [Main]);
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
