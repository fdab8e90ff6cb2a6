use serde_json::json;

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
