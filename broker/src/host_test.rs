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

#[test]
fn a_resolver_where_nobody_listens_is_known() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = socket.local_addr().unwrap() else {
        panic!("not IPv4");
    };
    assert_eq!(resolver_problem(address), None);
    drop(socket);
    let problem = resolver_problem(address).unwrap();
    assert!(
        problem.contains("nobody listens at 127.0.0.1:"),
        "{problem}"
    );
    let problem = resolver_problem("255.255.255.255:53".parse().unwrap()).unwrap();
    assert!(problem.contains("can't be reached"), "{problem}");
}
