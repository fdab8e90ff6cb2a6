use slipgate_abi::{DropCounters, RuleIndex, VmCounters};
use slipgate_ipc::engine::{GuestTcpCounts, MappingCounts, RelayedCounts};

use super::*;

const ROOM: Room = Room {
    sizes: Sizes {
        slots: 1_024,
        vms: 70,
        rules: 90,
    },
    vms: 1,
    rules: 5,
};

fn vm(name: &str, refused_by: Vec<stats::RefusedBy>) -> VmStats {
    let counters = VmCounters {
        admitted: 7,
        ended_tx: slipgate_abi::Counter {
            packets: 3,
            bytes: 300,
        },
        ..VmCounters::default()
    };
    let drops = DropCounters {
        spoofed: slipgate_abi::Counter {
            packets: 8,
            bytes: 800,
        },
        ..DropCounters::default()
    };
    VmStats {
        refused_by,
        ..VmStats::new(name.into(), &counters, &drops, &[])
    }
}

fn by(rule: u32, text: String) -> stats::RefusedBy {
    stats::RefusedBy {
        rule: RuleIndex::new(rule),
        text,
        flows: 1,
    }
}

#[test]
fn counters_have_their_vm_and_reason_and_the_end_is_marked() {
    let names = NameCounts {
        refused_names: 5,
        elsewhere: 6,
        over_rate: 7,
        new_names: 8,
        asked_again: 9,
        open: 2,
        ..NameCounts::default()
    };
    let mut one = vm("a \"b\"", vec![by(3, "--deny \"x\"\n".into())]);
    one.relayed = Some(RelayedCounts {
        flows: 1,
        begun: 12,
        ended: 11,
        tx_packets: 13,
        rx_bytes: 14_000,
        ..RelayedCounts::default()
    });
    one.tcp = Some(GuestTcpCounts {
        kept_bytes: 18,
        not_kept: 19,
        urgent: 20,
    });
    one.mappings = Some(MappingCounts {
        udp: 15,
        tcp: 16,
        open: 17,
    });
    let labels = Labels::from(
        [("example.com/tenant", "x"), ("secret", "y")].map(|(k, v)| (k.to_owned(), v.to_owned())),
    );
    let page = Page {
        records_lost_of_none: 9,
        made_s: 1_000,
        vms: vec![one],
        flows: BTreeMap::from([(("a \"b\"".to_owned(), "tcp"), 4)]),
        names: BTreeMap::from([("a \"b\"".to_owned(), names)]),
        labels: shown_labels(
            &BTreeMap::from([("a \"b\"".to_owned(), labels)]),
            &["example.com/tenant".to_owned(), "none".to_owned()],
        ),
        room: ROOM,
    };
    let text = page.text();
    assert!(!text.contains("secret"), "{text}");
    for line in [
        r#"slipgate_vm_info{vm="a \"b\"",label_example_com_tenant="x"} 1"#,
        r#"slipgate_packets_total{vm="a \"b\"",direction="tx"} 3"#,
        r#"slipgate_bytes_total{vm="a \"b\"",direction="tx"} 300"#,
        r#"slipgate_dropped_packets_total{vm="a \"b\"",reason="spoofed"} 8"#,
        r#"slipgate_flows{vm="a \"b\"",protocol="tcp"} 4"#,
        r#"slipgate_flows_admitted_total{vm="a \"b\""} 7"#,
        r#"slipgate_flows_refused_by_rule_total{rule="--deny \"x\"\n"} 1"#,
        r#"slipgate_relayed_flows{vm="a \"b\""} 1"#,
        r#"slipgate_relayed_flows_begun_total{vm="a \"b\""} 12"#,
        r#"slipgate_relayed_packets_total{vm="a \"b\"",direction="tx"} 13"#,
        r#"slipgate_relayed_bytes_total{vm="a \"b\"",direction="rx"} 14000"#,
        r#"slipgate_tcp_kept_bytes{vm="a \"b\""} 18"#,
        r#"slipgate_tcp_not_kept_total{vm="a \"b\""} 19"#,
        r#"slipgate_tcp_urgent_total{vm="a \"b\""} 20"#,
        r#"slipgate_dns_refused_total{vm="a \"b\"",reason="name"} 5"#,
        r#"slipgate_dns_refused_total{vm="a \"b\"",reason="elsewhere"} 6"#,
        r#"slipgate_dns_refused_total{vm="a \"b\"",reason="over_rate"} 7"#,
        r#"slipgate_dns_refused_total{vm="a \"b\"",reason="new_names"} 8"#,
        r#"slipgate_dns_refused_total{vm="a \"b\"",reason="asked_again"} 9"#,
        r#"slipgate_inspected_refused_total{vm="a \"b\"",reason="no_name"} 0"#,
        r#"slipgate_dns_open_addresses{vm="a \"b\""} 2"#,
        r#"slipgate_eim_mappings{vm="a \"b\"",protocol="udp"} 15"#,
        r#"slipgate_eim_mappings{vm="a \"b\"",protocol="tcp"} 16"#,
        r#"slipgate_limit{of="vms"} 70"#,
        r#"slipgate_limit_used{of="rules"} 5"#,
        r#"slipgate_records_lost_total{vm=""} 9"#,
        "# TYPE slipgate_packets counter",
        "# TYPE slipgate_flows gauge",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nin:\n{text}");
    }
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn rules_are_told_apart_up_to_a_number() {
    let many = (0..1_000).map(|rule| by(rule, format!("--deny {rule}")));
    let page = Page {
        records_lost_of_none: 9,
        made_s: 1_000,
        vms: vec![vm("a", many.collect())],
        flows: BTreeMap::new(),
        names: BTreeMap::new(),
        labels: BTreeMap::new(),
        room: ROOM,
    };
    let (named, others) = page.refused_by_rule();
    assert_eq!(
        (named.len(), others),
        (MOST_RULES, 1_000 - MOST_RULES as u64)
    );
    assert!(named.contains_key("--deny 0"), "the first of the policy");
}
