//! IPv6 that is not translated: what the network routes to the host keeps its address and port.
use std::net::Ipv6Addr;

use slipgate_abi::{DropReason, Handover, tcp::Flags};

use super::{super::fragments::data, fragments::cut, *};
use crate::clock::SECOND_NS;

/// Key of VM 1's prefix in `FORWARDS6`.
const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0);

fn rig() -> Rig {
    let rig = Rig::with(routed());
    let key = (PREFIX.into(), 0, 58);
    rig.kernel.borrow_mut().forwards6.insert(key, (1, 101));
    rig
}

fn routed() -> Setup {
    Setup {
        is_routed: true,
        ..setup()
    }
}

fn own() -> Family {
    let [_, six] = families();
    Family {
        nat: six.guest,
        ..six
    }
}

#[test]
fn a_routed_guest_keeps_its_address_and_port() {
    let (mut rig, family) = (rig(), own());
    // One of the range of translated ports is as good as another.
    for port in [40_000, 61_000, 65_535] {
        for opener in family.openers(port) {
            let way = rig.guest(1, &opener);
            assert_eq!(way, Handling::Engine(Handover::Miss));
            let sent = rig.at_world().pop().expect("it goes out");
            let (before, after) = (read(&opener), read(&sent));
            assert_eq!(
                (after.ip.source, after.transport.ports()),
                (before.ip.source, before.transport.ports())
            );
            assert_eq!(after.ip.ttl, before.ip.ttl - 1);
            assert_eq!(rig.world(&family.answer(&sent)), Handling::Fast);
            assert_eq!(rig.at_guest().len(), 1);
            rig.guest(1, &opener);
            assert_eq!(rig.at_world().len(), 1);
        }
    }
    assert_eq!(rig.flows(), 9);
    rig.assert_paired();
    rig.pass(8_000 * SECOND_NS);
    rig.assert_empty();
    // A connection's port is its guest's: it is there again at once.
    for isn in [7, 70_000, 7_000_000] {
        rig.connect_to(family, 40_000, isn);
        rig.pass(SECOND_NS);
        assert_eq!(rig.flows(), 1);
    }
}

/// The address shows whose a fragment is whatever its link, and another's network could guess the rest.
#[test]
fn the_fragments_of_a_datagram_to_a_routed_guest_come_by_one_link() {
    const OTHER: u32 = 77;
    let (mut rig, family) = (rig(), own());
    rig.guest(1, &udp((family.guest, 5_000), family.server(), b"x"));
    let packet = udp(family.server(), (family.guest, 5_000), &data());
    let fragments = cut(&packet, 7);
    let link = rig.kernel.borrow().uplink;
    for (at, link) in [(1, OTHER), (0, link), (2, link)] {
        rig.kernel.borrow_mut().uplink = link;
        let handled = rig.world(&fragments[at]);
        assert_eq!(handled, Handling::Engine(Handover::Fragment));
    }
    assert!(rig.at_guest().is_empty());
    rig.world(&fragments[1]);
    assert_eq!(rig.at_guest().len(), 3, "with the genuine one it is whole");
}

#[test]
fn entries_whose_deletion_failed_are_in_no_routed_flows_way() {
    // That of the guest's side, or both.
    for fails in [1, 2] {
        let (mut rig, family) = (rig(), own());
        let opener = udp((family.guest, 5_000), family.server(), b"x");
        rig.guest(1, &opener);
        rig.kernel.borrow_mut().faults.remove_fails = fails;
        rig.pass(310 * SECOND_NS);
        assert_eq!(rig.flows(), 0);
        assert_eq!(rig.kernel.borrow().flows6.len(), fails as usize);
        rig.at_world();
        rig.guest(1, &opener);
        assert_eq!((rig.flows(), rig.at_world().len()), (1, 1), "{fails}");
        rig.assert_paired();
    }
}

#[test]
fn nobody_gets_in_by_a_routed_prefix() {
    let (mut rig, family) = (rig(), own());
    let (guest, server) = ((family.guest, 80), family.server());
    let fresh = [
        syn(server, guest, 1),
        ack(server, guest, Flags::RST, 1, 1),
        udp(server, guest, b"x"),
        echo(family.peer, family.guest, true, 1, b"x"),
    ];
    for (at, packet) in fresh.iter().enumerate() {
        assert_eq!(rig.world(packet), Handling::Dropped(DropReason::NoFlow));
        assert_eq!((rig.flows(), rig.at_guest().len()), (0, 0), "{at}");
    }
    // Where the prefix is not routed, such packets are the host's.
    rig.kernel.borrow_mut().forwards6.clear();
    assert_eq!(rig.world(&fresh[0]), Handling::Passed);
}

#[test]
fn a_successor_adopts_flows_that_are_not_translated() {
    let (mut rig, family) = (rig(), own());
    rig.connect_to(family, 61_000, 7);
    let (mut rig, _) = rig.restart(&routed());
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
    let more = ack((family.guest, 61_000), family.server(), 0, 8, 9_001);
    assert_eq!(rig.guest(1, &more), Handling::Fast);
    // They end with the mode.
    let (mut rig, _) = rig.restart(&setup());
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 0);
    rig.pass(100 * SECOND_NS);
    assert_eq!(rig.records().last().unwrap()["end"], "prefix");
}

#[test]
fn a_routed_flow_outlives_the_hosts_addresses() {
    let (mut rig, family) = (rig(), own());
    rig.connect_to(family, 40_000, 7);
    let mut network = network_of_both();
    network
        .routes
        .addresses
        .retain(|own| own.addr.addr().is_ipv4());
    rig.engine.set_network(&network);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    // Nor does a new one need them.
    rig.guest(1, &family.openers(41_000)[0]);
    assert_eq!((rig.flows(), rig.at_world().len()), (2, 1));
    // One that is translated does.
    let mut rig = Rig::with(setup());
    rig.connect_to(families()[1], 40_000, 7);
    rig.engine.set_network(&network);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 0);
}

#[test]
fn a_routed_guest_has_no_address_of_the_host() {
    let (mut rig, family) = (rig(), own());
    let of_host = Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0x77);
    let mut network = network_of_both();
    let mut own = *network.routes.addresses.last().unwrap();
    own.addr = ipnet::IpNet::new(of_host.into(), 128).unwrap();
    network.routes.addresses.push(own);
    rig.engine.set_network(&network);
    let from = |host: Ipv6Addr| udp((IpAddr::V6(host), 40_000), family.server(), b"x");
    rig.guest(1, &from(of_host));
    assert_eq!((rig.dropped(1, DropReason::Spoofed), rig.flows()), (1, 0));
    rig.guest(1, &from(Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0x78)));
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_single_address_is_routed_and_its_neighbours_are_not() {
    let setup = Setup {
        ipv6: Some(ipnet::Ipv6Net::new(GUEST6, 128).unwrap()),
        ..routed()
    };
    let (mut rig, family) = (Rig::with(setup), own());
    let key = (GUEST6.into(), 128, 58);
    rig.kernel.borrow_mut().forwards6.insert(key, (1, 101));
    for opener in family.openers(40_000) {
        assert_eq!(rig.guest(1, &opener), Handling::Engine(Handover::Miss));
        let sent = rig.at_world().pop().expect("it goes out");
        assert_eq!(read(&sent).ip.source, family.guest);
        assert_eq!(rig.world(&family.answer(&sent)), Handling::Fast);
    }
    assert_eq!((rig.flows(), rig.at_guest().len()), (3, 3));
    let beside = IpAddr::V6(Ipv6Addr::from_bits(GUEST6.to_bits() ^ 1));
    let spoofed = udp((beside, 40_000), family.server(), b"x");
    let dropped = Handling::Dropped(DropReason::Spoofed);
    assert_eq!(rig.guest(1, &spoofed), dropped);
    // Of the world's packets only those to the address itself are the VM's.
    let to = |guest: IpAddr| syn(family.server(), (guest, 80), 1);
    let no_flow = Handling::Dropped(DropReason::NoFlow);
    assert_eq!(rig.world(&to(family.guest)), no_flow);
    assert_eq!(rig.world(&to(beside)), Handling::Passed);
    // It may be the neighbour's.
    let key = (GUEST6.to_bits() ^ 1, 128, 58);
    let key = (Ipv6Addr::from_bits(key.0).into(), key.1, key.2);
    rig.kernel.borrow_mut().forwards6.insert(key, (2, 102));
    assert_eq!(rig.world(&to(beside)), no_flow);
    assert_eq!(rig.dropped(2, DropReason::NoFlow), 1);
}
