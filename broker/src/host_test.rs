use slipgate_control::host::ForwardChain;

use super::*;

#[test]
fn a_quiet_host_gives_no_warning() {
    let facts = HostFacts {
        ip_forward: Some(false),
        ..HostFacts::default()
    };
    assert!(warnings(&facts).is_empty());
}

#[test]
fn what_is_bypassed_is_said() {
    let facts = HostFacts {
        ip_forward: Some(true),
        forward_chains: Some(vec![ForwardChain {
            table: "filter".into(),
            chain: "forward".into(),
            drops: false,
            rules: 2,
        }]),
        xfrm_policies: Some(2),
        ..HostFacts::default()
    };
    let all = warnings(&facts).join("\n");
    for part in ["filter forward", "2 IPsec", "ip_forward"] {
        assert!(all.contains(part), "{all}\n  not {part}");
    }
}

#[test]
fn a_resolver_where_nobody_listens_is_known() {
    for loopback in ["127.0.0.1:0", "[::1]:0"] {
        let socket = UdpSocket::bind(loopback).unwrap();
        let address = socket.local_addr().unwrap();
        assert_eq!(resolver_problem(address), None);
        drop(socket);
        let problem = resolver_problem(address).unwrap();
        let nobody = format!("nobody listens at {address} ");
        assert!(problem.contains(&nobody), "{problem}");
    }
    let problem = resolver_problem("255.255.255.255:53".parse().unwrap()).unwrap();
    assert!(problem.contains("can't be reached"), "{problem}");
}

fn link(name: &str, is_multi_queue_tap: Option<bool>) -> Link {
    Link {
        is_multi_queue_tap,
        ..Link::ethernet(slipgate_abi::IfIndex::new(1), name)
    }
}

#[test]
fn big_tcp_is_said_with_its_remedy() {
    let with = |gro_max_size| Link {
        gro_max_size,
        ..link("eth0", None)
    };
    for ordinary in [None, Some(0), Some(65_536)] {
        assert_eq!(big_tcp_problem(&with(ordinary)), None);
    }
    let said = big_tcp_problem(&with(Some(185_000))).unwrap();
    assert!(said.contains("185000 bytes"), "{said}");
    assert!(
        said.ends_with("ip link set dev eth0 gro_max_size 65536"),
        "{said}"
    );
}

#[test]
fn a_tap_s_queues_are_said_to_those_who_choose_a_vmm() {
    assert!(tap_hints([link("eth0", None)].iter()).is_empty());
    let links = [
        link("eth0", None),
        link("tap0", Some(true)),
        link("tap1", Some(false)),
        link("tap2", Some(true)),
    ];
    let [many, one] = &tap_hints(links.iter())[..] else {
        panic!("not two hints")
    };
    assert!(many.starts_with("tap0, tap2: made with multi_queue; Firecracker refuses"));
    assert!(one.starts_with("tap1: made for one queue"));
    let crowd: Vec<_> = (0..1000)
        .map(|n| link(&format!("tap{n}"), Some(false)))
        .collect();
    let hint = &tap_hints(crowd.iter())[0];
    assert!(hint.contains("tap7 and 992 more: "), "{hint}");
}
