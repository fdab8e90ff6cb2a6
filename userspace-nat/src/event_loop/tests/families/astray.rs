//! Flows whose destination the host's routes refuse, deliver to the host or lead elsewhere.
use ipnet::IpNet;
use slipgate_abi::{IfIndex, Refusal, tcp::Flags};
use slipgate_model::{HostAddress, Link, NetworkView, RouteEntry, RouteKind};

use super::*;
use crate::clock::SECOND_NS;

/// A link by which no VM leaves.
const OTHER: IfIndex = IfIndex::new(9);

fn route(family: Family, kind: RouteKind, ifindex: IfIndex) -> RouteEntry {
    RouteEntry {
        prefix: IpNet::from(family.peer),
        kind,
        ifindex,
        gateway: None,
        ..network().routes.routes[0]
    }
}

/// What may become of the peer, and the reason for which a new flow there is refused.
fn changes(family: Family) -> Vec<(&'static str, NetworkView, Refusal)> {
    let by = |kind, ifindex| {
        let mut network = network_of_both();
        network.routes.routes.push(route(family, kind, ifindex));
        network
    };
    let mut own = network_of_both();
    own.routes.addresses.push(HostAddress {
        ifindex: OTHER,
        addr: family.peer.into(),
        broadcast: None,
        source: Default::default(),
    });
    let mut elsewhere = by(RouteKind::Unicast, OTHER);
    elsewhere.links.push(Link {
        ifindex: OTHER,
        name: "other".into(),
        mtu: 1_500,
        has_l2: true,
    });
    let none = IfIndex::NONE;
    vec![
        (
            "blackhole",
            by(RouteKind::Blackhole, none),
            Refusal::NoRoute,
        ),
        (
            "unreachable",
            by(RouteKind::Unreachable, none),
            Refusal::NoRoute,
        ),
        ("prohibit", by(RouteKind::Prohibit, none), Refusal::NoRoute),
        ("elsewhere", elsewhere, Refusal::NoRoute),
        ("an address", own, Refusal::Protected),
        (
            "a local route",
            by(RouteKind::Local, IfIndex::new(1)),
            Refusal::Protected,
        ),
    ]
}

/// Type and code of "no route to destination".
fn no_net(family: Family) -> [u8; 2] {
    match family.version {
        Version::V4 => [3, 0],
        Version::V6 => [1, 0],
    }
}

#[test]
fn a_flow_to_what_is_not_reached_any_more_ends_as_a_new_one_is_refused() {
    for family in families() {
        for (change, network, refusal) in changes(family) {
            let mut rig = Rig::with(setup());
            let nat = rig.connect_to(family, 40_000, 7);
            let [_, query, ping] = family.openers(40_001);
            rig.guest(1, &query);
            rig.guest(1, &ping);
            assert_eq!((rig.flows(), rig.at_world().len()), (3, 2));
            rig.follow(network);
            rig.turn();
            let context = (family.version, change);
            // The silent guest is asked for a segment, and reset by it.
            let probed = rig.at_guest();
            assert_eq!(probed.len(), 1, "{context:?}");
            let data = ack((family.guest, 40_000), family.server(), 0, 8, 9_001);
            rig.guest(1, &data);
            let told = rig.at_guest();
            let Transport::Tcp(reset) = read(&told[0].1).transport else {
                panic!("{context:?}");
            };
            assert!(reset.has(Flags::RST), "{context:?}");
            // The others learn it from what they send.
            for opener in [&query, &ping] {
                rig.guest(1, opener);
                let told = rig.at_guest();
                assert_eq!(icmp(&told[0].1), no_net(family), "{context:?}");
            }
            // What still comes from there is not let in, nor answered.
            rig.world(&ack(family.server(), nat, 0, 9_001, 8));
            for (_, packet) in rig.at_guest() {
                let Transport::Tcp(reset) = read(&packet).transport else {
                    panic!("{context:?}");
                };
                assert!(reset.has(Flags::RST), "{context:?}");
            }
            assert_eq!(
                rig.at_world().len(),
                0,
                "{context:?}: nothing is sent there"
            );
            rig.pass(SECOND_NS);
            rig.assert_empty();
            let ends: Vec<_> = rig.records().iter().map(|r| r["end"].clone()).collect();
            assert_eq!(ends, ["route"; 3], "{context:?}");
            rig.guest(1, &query);
            assert_eq!(rig.refused(1, refusal), 1, "{context:?}");
            assert_eq!(rig.at_world().len(), 0, "{context:?}");
        }
    }
}

#[test]
fn a_successor_ends_what_is_not_reached_any_more() {
    for family in families() {
        for (change, network, _) in changes(family) {
            let mut rig = Rig::with(setup());
            rig.connect_to(family, 40_000, 7);
            let mut rig = rig.restart_in_steps(&setup());
            rig.engine.set_network(&network);
            let adoption = rig.engine.finish_adoption().unwrap();
            assert_eq!((adoption.live, adoption.refused), (0, 1), "{change}");
            rig.pass(SECOND_NS);
            rig.assert_empty();
            assert_eq!(rig.records()[0]["end"], "route", "{family:?} {change}");
        }
    }
}

#[test]
fn a_flow_goes_on_where_a_route_is_only_missing_or_leads_to_others() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = rig.connect_to(family, 40_000, 7);
        let mut network = network_of_both();
        network.routes.routes.clear();
        rig.follow(network);
        rig.pass(SECOND_NS);
        let back = ack(family.server(), nat, 0, 9_001, 8);
        assert_eq!(rig.world(&back), Handling::Fast, "{family:?}");
        // A neighbour of the peer is refused; the default route is there again.
        let mut network = network_of_both();
        let mut refused = route(family, RouteKind::Blackhole, IfIndex::NONE);
        refused.prefix = match family.peer {
            IpAddr::V4(addr) => IpAddr::V4((addr.to_bits() ^ 1).into()).into(),
            IpAddr::V6(addr) => IpAddr::V6((addr.to_bits() ^ 1).into()).into(),
        };
        network.routes.routes.push(refused);
        rig.follow(network);
        rig.pass(SECOND_NS);
        assert_eq!(rig.world(&back), Handling::Fast, "{family:?}");
        assert_eq!(rig.flows(), 1);
    }
}
