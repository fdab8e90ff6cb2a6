use super::*;

#[test]
fn a_quiet_host_gives_no_warning() {
    let facts = HostFacts {
        local_ports: Some(32_768..=60_999),
        ..HostFacts::default()
    };
    assert!(facts.warnings(&(61_000..=65_535)).is_empty());
}

#[test]
fn what_is_bypassed_and_what_overlaps_is_said() {
    let facts = HostFacts {
        ip_forward: true,
        local_ports: Some(32_768..=60_999),
        forward_chains: vec!["inet filter forward".into()],
        xfrm_policies: 2,
    };
    let all = facts.warnings(&(50_000..=60_000)).join("\n");
    for part in [
        "inet filter forward",
        "2 IPsec",
        "ip_forward",
        "--nat-ports 50000-60000 overlaps",
        "32768-60999",
    ] {
        assert!(all.contains(part), "{all}\n  not {part}");
    }
}

#[test]
fn the_kernels_range_is_read() {
    assert_eq!(port_range("32768\t60999\n"), Some(32_768..=60_999));
    assert_eq!(port_range("x"), None);
}
