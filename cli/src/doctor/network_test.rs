use std::net::UdpSocket;

use slipgate_abi::IfIndex;
use slipgate_control::netlink::Link;

use super::*;

#[test]
fn an_uplink_that_is_not_there_is_named() {
    let finding = &network_found(Some("nosuchdev0"), |_| Vec::new())[0];
    assert_eq!(finding.state, State::Missing);
    assert!(finding.found.contains("nosuchdev0"));
}

#[test]
fn an_uplink_s_offloads_are_told() {
    // Loopback always has it.
    let finding = offloads("lo");
    assert_eq!(finding.what, "offloads");
    assert_eq!(finding.state, State::Ok, "{finding:?}");
}

#[test]
fn the_loopback_is_no_uplink() {
    let findings = network_found(Some("lo"), |_| Vec::new());
    assert_eq!(findings[0].state, State::Missing, "{findings:?}");
}

#[test]
fn taps_are_told_with_who_can_open_them_and_engine_ports_are_not() {
    let mut network = Network::default();
    for (index, name) in [(5, "tap0"), (6, "sgport1")] {
        let link = Link {
            kind: Some("tun".into()),
            is_multi_queue_tap: Some(true),
            ..Link::ethernet(IfIndex::new(index), name)
        };
        network.links.insert(link);
    }
    let found: Vec<_> = taps_found(&network).collect();
    assert_eq!(found.len(), 1);
    assert!(found[0].found.starts_with("tap0: made with multi_queue"));
    assert_eq!(found[0].state, State::Ok);
}

#[test]
fn without_a_resolver_that_can_be_asked_dns_is_named() {
    // An address of its own: another test may get the port at the usual one.
    let unused = UdpSocket::bind("127.81.0.1:0").unwrap();
    let address = unused.local_addr().unwrap();
    assert_eq!(resolvers_found(&[address]).state, State::Ok);
    drop(unused);
    for resolvers in [&[address][..], &[]] {
        let finding = resolvers_found(resolvers);
        assert_eq!(finding.state, State::Note, "{finding:?}");
        assert!(finding.remedy.unwrap().contains("--dns"));
    }
}
