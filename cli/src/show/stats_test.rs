use serde_json::json;
use slipgate_abi::RuleIndex;

use super::*;

fn counter(packets: u64, bytes: u64) -> Counter {
    Counter { packets, bytes }
}

#[test]
fn json_has_the_documented_fields() {
    let mut counters = VmCounters {
        engine_rx_from_guest: counter(1, 40),
        engine_tx_to_guest: counter(2, 80),
        ended_tx: counter(3, 300),
        ended_rx: counter(4, 400),
        lost_after_redirect: 5,
        admitted: 6,
        ..VmCounters::default()
    };
    counters.refused.rule = 7;
    let drops = DropCounters {
        spoofed: counter(8, 800),
        ..DropCounters::default()
    };
    let vm = VmStats::new("a".into(), &counters, &drops, &[]);
    let json = serde_json::to_value(&vm).unwrap();
    let expected = json!({
        "vm": "a",
        "kernel": {"tx_packets": 3, "tx_bytes": 300, "rx_packets": 4, "rx_bytes": 400},
        "engine": {
            "from_guest": {"packets": 1, "bytes": 40},
            "to_guest": {"packets": 2, "bytes": 80},
            "from_world": {"packets": 0, "bytes": 0},
            "to_world": {"packets": 0, "bytes": 0},
        },
        "drops": {"spoofed": {"packets": 8, "bytes": 800}},
        "lost_after_redirect": 5,
        "flows": 0,
        "admitted": 6,
        "refused": {"rule": 7},
        "ports": 0,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&json[field], value, "{field}");
    }
}

#[test]
fn rules_that_refused_are_named() {
    let mut counters = VmCounters {
        refused_by_other_rules: 4,
        records_lost: 2,
        ..VmCounters::default()
    };
    for (place, rule, flows) in [(0, 11, 1), (1, 13, 3)] {
        counters.refused_by_rule[place].rule = rule + 1;
        counters.refused_by_rule[place].flows = flows;
    }
    let texts = |rule: RuleIndex| Some(format!("--deny {rule}"));
    let mut one = VmStats::new("a".into(), &counters, &DropCounters::default(), &[]);
    one.refused_by = rules::of(&counters, texts);
    one.tap_tx_dropped = Some(5);
    one.names = Some(NameCounts {
        new_names: 21,
        asked_again: 22,
        ..NameCounts::default()
    });
    let json = serde_json::to_value(&one).unwrap();
    let expected = json!([
        {"rule": 13, "text": "--deny 13", "flows": 3},
        {"rule": 11, "text": "--deny 11", "flows": 1},
    ]);
    assert_eq!(json["refused_by"], expected);
    assert_eq!(json["refused_by_others"], 4);
    assert_eq!(json["tap_tx_dropped"], 5);
    let mut total = one.clone();
    total.vm = "(all)".into();
    total.add(&one);
    assert_eq!(total.refused_by[0].flows, 6);
    assert_eq!((total.records_lost, total.tap_tx_dropped), (4, Some(10)));
    let text = text(&Stats {
        vms: vec![one],
        total,
        displaced: vec!["eth0: slipgate's program runs behind it".into()],
    });
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in [
        "eth0: slipgate's program runs behind it",
        "a refused by --deny 13 3",
        "a refused by further rules 4",
        "a not taken by the TAP 5",
        "a DNS refused: beyond the limit of new names 21",
        "a DNS refused: beyond the limit of questions asked again 22",
        "(all) refused by --deny 11 2",
        "(all) flow records lost 4",
    ] {
        assert!(lines.iter().any(|l| l == line), "`{line}` in:\n{text}");
    }
}

#[test]
fn a_total_is_the_sum() {
    let counters = VmCounters {
        admitted: 2,
        ended_rx: counter(1, 10),
        ..VmCounters::default()
    };
    let drops = DropCounters {
        denied: counter(3, 30),
        ..DropCounters::default()
    };
    let one = VmStats::new("a".into(), &counters, &drops, &[]);
    let mut total = one.clone();
    total.add(&one);
    assert_eq!(total.admitted, 4);
    assert_eq!(total.kernel.rx_bytes, 20);
    assert_eq!(
        total.drops["denied"],
        Packets {
            packets: 6,
            bytes: 60
        }
    );
}
