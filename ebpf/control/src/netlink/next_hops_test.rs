use std::net::Ipv4Addr;

use slipgate_abi::IfIndex;

use super::*;
use crate::netlink::Link;

fn element() -> NextHop {
    NextHop {
        sequence: 0,
        ifindex: 7,
        mtu: 0,
        flags: 0,
        neighbour_mac: [0; 6],
        uplink_mac: [0; 6],
        neighbour: Ipv4Addr::new(192, 0, 2, 1).into(),
        owner: 1,
        route_mtu: 0,
        neighbour6: slipgate_abi::Ip6::UNSPECIFIED,
        pad: [0; 8],
    }
}

fn of(mac: u8) -> Wanted {
    Wanted {
        mtu: 1_500,
        flags: 0,
        neighbour_mac: [mac; 6],
        uplink_mac: [mac; 6],
    }
}

#[test]
fn what_an_element_says_already_is_not_written() {
    let mut element = element();
    // SAFETY: it outlives the reference.
    let hop = unsafe { NextHopRef::new(&raw mut element) };
    let sequence = || hop.sequence().load(Acquire);
    assert!(write(hop, sequence(), of(1)));
    let written = sequence();
    assert!(is_usable(written));
    assert!(write(hop, written, of(1)));
    assert_eq!(sequence(), written, "programs go on using it");
    assert!(write(hop, written, of(2)));
    assert_ne!(sequence(), written);
}

/// The broker has read an element; then the engine releases it and claims it for another neighbour,
/// whose first packet must not go to the old one.
#[test]
fn an_element_that_is_another_ones_meanwhile_is_not_put_into_use() {
    let mut element = element();
    // SAFETY: it outlives the reference.
    let hop = unsafe { NextHopRef::new(&raw mut element) };
    let seen = hop.sequence().load(Acquire);
    hop.withdraw();
    assert!(!write(hop, seen, of(1)));
    assert!(!is_usable(hop.sequence().load(Acquire)));
    // Also if it has the contents wanted for the previous claim already.
    let seen = hop.sequence().load(Acquire);
    assert!(write(hop, seen, of(1)));
    let seen = hop.sequence().load(Acquire);
    hop.withdraw();
    write(hop, seen, of(1));
    assert!(!is_usable(hop.sequence().load(Acquire)));
}

#[test]
fn the_lesser_of_the_links_and_the_routes_mtu_counts() {
    let mut network = Network::default();
    let link = Link {
        mtu: 1_400,
        has_l2: false,
        arp: false,
        ..Link::ethernet(IfIndex::new(7), "up0")
    };
    network.links.insert(link);
    for (route_mtu, mtu) in [(0, 1_400), (1_300, 1_300), (9_000, 1_400)] {
        let claim = Claim {
            ifindex: IfIndex::new(7),
            neighbour: Ipv4Addr::UNSPECIFIED.into(),
            route_mtu,
        };
        assert_eq!(wanted(&network, claim).map(|wanted| wanted.mtu), Some(mtu));
    }
}
