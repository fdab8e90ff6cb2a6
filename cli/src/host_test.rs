use slipgate_control::host::ForwardChain;

use super::*;

#[test]
fn a_quiet_host_gives_no_warning() {
    let facts = HostFacts {
        ip_forward: Some(false),
        local_ports: Some((32_768, 60_999)),
        ..HostFacts::default()
    };
    assert!(warnings(&facts, &(61_000..=65_535)).is_empty());
}

#[test]
fn what_is_bypassed_and_what_overlaps_is_said() {
    let facts = HostFacts {
        ip_forward: Some(true),
        local_ports: Some((32_768, 60_999)),
        forward_chains: Some(vec![ForwardChain {
            table: "filter".into(),
            chain: "forward".into(),
            drops: false,
            rules: 2,
        }]),
        xfrm_policies: Some(2),
        ..HostFacts::default()
    };
    let all = warnings(&facts, &(50_000..=60_000)).join("\n");
    for part in [
        "filter forward",
        "2 IPsec",
        "ip_forward",
        "--nat-ports 50000-60000 overlaps",
        "32768-60999",
    ] {
        assert!(all.contains(part), "{all}\n  not {part}");
    }
}
