//! A guest configures its IPv6: what it sends to do so, over the programs' own decisions.
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use slipgate_abi::{DropReason, vm6::GUEST_ADDRESSES};
use slipgate_model::{GuestIpv6, VmSpec};

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    datagram::Datagram,
    ndp::{
        addresses,
        schedule::{FIRST_WITHIN_NS, LONGEST_NS},
        wire::{
            self, Message, kind,
            tests::{message, solicitation},
        },
    },
    port::{ETHERTYPE_IPV6, VirtioNetHdr},
};

const PREFIX: &str = "fd00:1:2:3::/64";
pub(super) const LINK_LOCAL: &str = "fe80::ff:fe00:f";
const ADDRESS: &str = "fd00:1:2:3::15";
const GATEWAY6: &str = "fd00:1:2:3::1";
const ALL_ROUTERS: &str = "ff02::2";

fn net() -> GuestIpv6 {
    GuestIpv6 {
        prefix: PREFIX.parse().unwrap(),
        is_routed: false,
    }
}

fn spec6(row: u16) -> VmSpec {
    VmSpec {
        ipv6: Some(net()),
        ..spec(row, &Setup::default())
    }
}

/// Gives a VM IPv6, as the broker does: its row, then the engine.
fn give(rig: &mut Rig, row: u16) {
    give_as(rig, spec6(row));
}

/// The same as a VM's description says.
pub(super) fn give_as(rig: &mut Rig, vm: VmSpec) {
    let net = vm.ipv6.expect("IPv6");
    let local = net.gateway_link_local(vm.gateway_mac);
    let row6 = rig.kernel.borrow().vm6(vm.row.get());
    row6.set(Some((
        net.prefix.network().into(),
        net.gateway().into(),
        local.into(),
    )));
    rig.tell(move |engine| engine.set_vm(vm));
}

/// A rig whose VM 1 has IPv6, and whose first advertisement was sent.
fn rig6() -> Rig {
    let mut rig = Rig::new();
    give(&mut rig, 1);
    rig.pass(FIRST_WITHIN_NS);
    rig.at_guest();
    rig
}

/// VM 1 sends a packet, to a group as the address says.
pub(super) fn send(rig: &mut Rig, packet: &[u8]) -> Handling {
    let vm = rig.kernel.borrow().vm(1);
    // SAFETY: a live row; one thread.
    let (from, gateway) = unsafe { ((*vm.as_ptr()).guest_mac, (*vm.as_ptr()).gateway_mac) };
    let to = if packet[24] == 0xff {
        [0x33, 0x33, 0, 0, 0, 1]
    } else {
        gateway
    };
    let frame = [&to, &from, &ETHERTYPE_IPV6.to_be_bytes()[..], packet].concat();
    let way = rig
        .kernel
        .borrow_mut()
        .guest_sends_frame(1, VirtioNetHdr::default(), &frame);
    rig.turn();
    way
}

pub(super) fn solicit(rig: &mut Rig, from: &str) -> Handling {
    send(
        rig,
        &message(from, ALL_ROUTERS, kind::ROUTER_SOLICITATION, &[0; 4]),
    )
}

/// Duplicate address detection for an address.
pub(super) fn probe(rig: &mut Rig, address: &str) -> Handling {
    let to = wire::solicited_node(address.parse().unwrap()).to_string();
    let rest = solicitation(address, None);
    send(
        rig,
        &message("::", &to, kind::NEIGHBOUR_SOLICITATION, &rest),
    )
}

pub(super) fn udp6(from: &str, port: u16, to: &str, to_port: u16, payload: &[u8]) -> Vec<u8> {
    let at = |addr: &str, port| SocketAddr::new(addr.parse::<IpAddr>().unwrap(), port);
    let datagram = Datagram {
        from: at(from, port),
        to: at(to, to_port),
        payload,
    };
    datagram.emit()
}

/// Takes the messages that the guest got, with their source and destination.
fn got(rig: &mut Rig) -> Vec<(Ipv6Addr, Ipv6Addr, Message)> {
    let packets = rig.at_guest();
    let read = |(_, packet): &(u32, Vec<u8>)| {
        let ndp = wire::parse(packet).expect("a message of neighbour discovery");
        (ndp.source, ndp.destination, ndp.message)
    };
    packets.iter().map(read).collect()
}

pub(super) fn bound(rig: &Rig) -> Vec<String> {
    let addresses = addresses::bound(rig.kernel.borrow().vm6(1));
    addresses.iter().map(ToString::to_string).collect()
}

#[test]
fn a_guest_that_asks_is_told_its_network_and_binds_what_it_makes() {
    let mut rig = rig6();
    probe(&mut rig, LINK_LOCAL);
    assert_eq!(bound(&rig), [LINK_LOCAL]);
    assert_eq!(got(&mut rig), [], "nobody has it");
    solicit(&mut rig, LINK_LOCAL);
    let router = net().gateway_link_local(spec6(1).gateway_mac);
    let to: Ipv6Addr = LINK_LOCAL.parse().unwrap();
    assert_eq!(got(&mut rig), [(router, to, Message::RouterAdvertisement)]);
    probe(&mut rig, ADDRESS);
    assert_eq!(bound(&rig), [LINK_LOCAL, ADDRESS]);
    assert_eq!(
        rig.kernel
            .borrow()
            .stats(1)
            .snapshot()
            .0
            .router_advertisements,
        2
    );
}

#[test]
fn before_it_has_an_address_the_answer_goes_to_all_nodes() {
    let mut rig = rig6();
    solicit(&mut rig, "::");
    let found = got(&mut rig);
    assert_eq!((found.len(), found[0].1), (1, wire::ALL_NODES));
    assert!(bound(&rig).is_empty());
}

#[test]
fn a_packet_from_a_new_address_binds_it() {
    let mut rig = rig6();
    // The gateway does not listen there, and says so.
    send(&mut rig, &udp6(ADDRESS, 5_000, GATEWAY6, 9, b"x"));
    assert_eq!(bound(&rig), [ADDRESS]);
    assert_eq!(rig.dropped(1, DropReason::Spoofed), 0);
    send(&mut rig, &udp6("fd00:1:2:4::15", 5_000, GATEWAY6, 9, b"x"));
    send(&mut rig, &udp6("2001:db8::15", 5_000, GATEWAY6, 9, b"x"));
    assert_eq!(rig.dropped(1, DropReason::Spoofed), 2);
    assert_eq!(bound(&rig), [ADDRESS]);
}

#[test]
fn addresses_beyond_the_bound_are_dropped_until_one_falls_silent() {
    let mut rig = rig6();
    let most = GUEST_ADDRESSES as u16 - 1;
    let address = |host: u16| format!("fd00:1:2:3::1:{host:x}");
    for host in 1..=most {
        send(&mut rig, &udp6(&address(host), 5_000, GATEWAY6, 9, b"x"));
    }
    assert_eq!(bound(&rig).len(), usize::from(most));
    let beyond = address(most + 1);
    send(&mut rig, &udp6(&beyond, 5_000, GATEWAY6, 9, b"x"));
    probe(&mut rig, &beyond);
    assert_eq!(rig.dropped(1, DropReason::AddressBound), 2);
    assert!(!bound(&rig).contains(&beyond));
    rig.pass(addresses::MIN_SILENCE_NS);
    for host in 2..=most {
        send(&mut rig, &udp6(&address(host), 5_000, GATEWAY6, 9, b"x"));
    }
    send(&mut rig, &udp6(&beyond, 5_000, GATEWAY6, 9, b"x"));
    assert!(bound(&rig).contains(&beyond) && !bound(&rig).contains(&address(1)));
    assert_eq!(rig.dropped(1, DropReason::AddressBound), 2);
}

#[test]
fn a_clone_with_the_same_addresses_has_its_own_bound() {
    let mut rig = rig6();
    give(&mut rig, 2);
    probe(&mut rig, ADDRESS);
    let of_other = addresses::bound(rig.kernel.borrow().vm6(2));
    assert!(
        of_other.is_empty(),
        "clones have the same addresses, each its own"
    );
}

#[test]
fn dhcpv6_tells_the_resolver() {
    let mut rig = rig6();
    let request = [11, 1, 2, 3, 0, 6, 0, 2, 0, 23];
    send(&mut rig, &udp6(LINK_LOCAL, 546, "ff02::1:2", 547, &request));
    let replies = rig.at_guest();
    let reply = Datagram::parse(&replies[0].1).expect("a reply");
    assert_eq!(reply.to, SocketAddr::new(LINK_LOCAL.parse().unwrap(), 546));
    let resolver = net().gateway().octets();
    assert!(reply.payload.ends_with(&resolver), "{reply:?}");
    assert_eq!(rig.kernel.borrow().stats(1).snapshot().0.dhcp_messages, 1);
}

#[test]
fn a_guest_is_no_router_and_none_without_ipv6_is_answered() {
    let mut rig = rig6();
    for (kind, len) in [(kind::ROUTER_ADVERTISEMENT, 12), (kind::REDIRECT, 36)] {
        let way = send(
            &mut rig,
            &message(LINK_LOCAL, "ff02::1", kind, &vec![0; len]),
        );
        assert_eq!(way, Handling::Dropped(DropReason::RouterAdvertisement));
    }
    let mut without = Rig::new();
    solicit(&mut without, LINK_LOCAL);
    without.pass(LONGEST_NS);
    assert!(without.at_guest().is_empty());
}

#[test]
fn solicitations_without_end_are_answered_at_a_rate() {
    let mut rig = rig6();
    probe(&mut rig, LINK_LOCAL);
    for _ in 0..100 {
        solicit(&mut rig, LINK_LOCAL);
    }
    assert_eq!(got(&mut rig).len(), 10);
    assert_eq!(rig.dropped(1, DropReason::OverRate), 90);
    rig.pass(SECOND_NS);
    solicit(&mut rig, LINK_LOCAL);
    assert_eq!(got(&mut rig).len(), 1);
}

#[test]
fn advertisements_come_unasked_soon_and_then_every_hour_unless_the_vm_is_paused() {
    let mut rig = Rig::new();
    give(&mut rig, 1);
    rig.pass(FIRST_WITHIN_NS);
    let first = got(&mut rig);
    assert_eq!(first.len(), 1);
    assert_eq!(first[0].1, wire::ALL_NODES);
    rig.pass(3 * LONGEST_NS);
    let in_three_hours = got(&mut rig).len();
    assert!((3..=6).contains(&in_three_hours), "{in_three_hours}");
    rig.kernel.borrow().set_frozen(1, true);
    rig.pass(2 * LONGEST_NS);
    assert!(rig.at_guest().is_empty());
    rig.kernel.borrow().set_frozen(1, false);
    rig.pass(LONGEST_NS);
    assert!(!got(&mut rig).is_empty(), "they go on");
    // IPv6 ends, with a last one.
    rig.tell(|engine| engine.set_vm(spec(1, &Setup::default())));
    assert_eq!(rig.at_guest().len(), 1);
    rig.pass(2 * LONGEST_NS);
    assert!(rig.at_guest().is_empty());
}

/// RFC 4861 section 6.2.5.
#[test]
fn a_network_that_ends_is_told_by_a_last_advertisement() {
    let other = GuestIpv6 {
        prefix: "fd00:1:2:4::/64".parse().unwrap(),
        is_routed: false,
    };
    for next in [None, Some(other)] {
        let mut rig = rig6();
        // The same again is no end.
        rig.tell(|engine| engine.set_vm(spec6(1)));
        assert!(rig.at_guest().is_empty());
        let vm = VmSpec {
            ipv6: next,
            ..spec6(1)
        };
        rig.tell(move |engine| engine.set_vm(vm));
        let got = rig.at_guest();
        assert_eq!(got.len(), 1, "{next:?}");
        let (_, packet) = &got[0];
        assert_eq!(packet[40], kind::ROUTER_ADVERTISEMENT);
        assert_eq!(packet[46..48], [0, 0], "router lifetime");
        let prefix = net().prefix.network().octets();
        let at = packet.windows(16).position(|bytes| bytes == prefix);
        // Valid and preferred lifetime, before four octets that are reserved.
        let at = at.expect("the prefix that ends");
        assert_eq!(packet[at - 12..at], [0; 12]);
    }
}
