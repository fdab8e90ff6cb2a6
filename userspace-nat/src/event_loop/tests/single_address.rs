//! A guest with a single IPv6 address takes it by DHCPv6, over the programs' own decisions.
use std::net::{Ipv6Addr, SocketAddr};

use slipgate_abi::DropReason;
use slipgate_model::{GuestIpv6, VmSpec};

use super::{rig::*, slaac::*};
use crate::{
    clock::SECOND_NS,
    datagram::Datagram,
    ndp::schedule::{FIRST_WITHIN_NS, LONGEST_NS},
};

const OWN: &str = "2001:db8:7::17";
const SERVERS: &str = "ff02::1:2";
const CLIENT_ID: [u8; 14] = [0, 1, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 15];

fn net() -> GuestIpv6 {
    GuestIpv6 {
        prefix: format!("{OWN}/128").parse().unwrap(),
        is_routed: true,
    }
}

/// A rig whose VM 1 has a single address, and whose first advertisement was sent.
fn rig() -> Rig {
    let mut rig = Rig::new();
    let vm = VmSpec {
        ipv6: Some(net()),
        ..spec(1, &Setup::default())
    };
    give_as(&mut rig, vm);
    rig.pass(FIRST_WITHIN_NS);
    rig.at_guest();
    rig
}

/// Sends a message with an association that has these addresses. Returns the answer's type and the
/// addresses in it with the time for which they are valid.
fn ask(rig: &mut Rig, kind: u8, server: &[u8], addresses: &[&str]) -> (u8, Vec<(Ipv6Addr, u32)>) {
    let mut association = vec![0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
    for address in addresses {
        let address: Ipv6Addr = address.parse().unwrap();
        association.extend([0, 5, 0, 24]);
        association.extend(address.octets());
        association.extend([0; 8]);
    }
    let mut message = [&[kind, 1, 2, 3], &CLIENT_ID[..]].concat();
    if !server.is_empty() {
        message.extend([0, 2, 0, server.len() as u8]);
        message.extend(server);
    }
    message.extend([0, 3, 0, association.len() as u8]);
    message.extend(association);
    send(rig, &udp6(LINK_LOCAL, 546, SERVERS, 547, &message));
    let replies = rig.at_guest();
    let [(_, reply)] = &replies[..] else {
        panic!("one answer: {replies:?}");
    };
    let reply = Datagram::parse(reply).expect("an answer");
    assert_eq!(reply.to, SocketAddr::new(LINK_LOCAL.parse().unwrap(), 546));
    let given = reply.payload.windows(4).enumerate();
    let given = given.filter(|(_, head)| *head == [0, 5, 0, 24]);
    let addresses = given.map(|(at, _)| {
        let data = &reply.payload[at + 4..at + 28];
        let address: [u8; 16] = data[..16].try_into().unwrap();
        let valid = u32::from_be_bytes(data[20..].try_into().unwrap());
        (address.into(), valid)
    });
    (reply.payload[0], addresses.collect())
}

/// Identity of the server, made of the gateway's MAC.
fn server() -> Vec<u8> {
    let mac = spec(1, &Setup::default()).gateway_mac;
    [&[0, 3, 0, 1], &mac[..]].concat()
}

#[test]
fn a_guest_takes_its_address_keeps_it_and_gives_it_back() {
    let mut rig = rig();
    solicit(&mut rig, LINK_LOCAL);
    let (_, advertisement) = rig.at_guest().remove(0);
    assert_eq!(advertisement[45], 0xc0, "addresses by DHCPv6");
    let own: Ipv6Addr = OWN.parse().unwrap();
    let given = vec![(own, 2_592_000)];
    assert_eq!(ask(&mut rig, 1, &[], &[]), (2, given.clone()));
    assert_eq!(bound(&rig), [LINK_LOCAL], "it has not asked for it yet");
    assert_eq!(ask(&mut rig, 3, &server(), &[OWN]), (7, given.clone()));
    assert_eq!(bound(&rig), [LINK_LOCAL, OWN]);
    // It renews and rebinds for as long as it likes.
    for hours in [1, 12] {
        rig.pass(hours * 3_600 * SECOND_NS);
        rig.at_guest();
        assert_eq!(ask(&mut rig, 5, &server(), &[OWN]), (7, given.clone()));
        assert_eq!(ask(&mut rig, 6, &[], &[OWN]), (7, given.clone()));
    }
    assert_eq!(ask(&mut rig, 8, &server(), &[OWN]), (7, Vec::new()));
    assert_eq!(bound(&rig), [LINK_LOCAL]);
    // A guest that boots again has it at once.
    assert_eq!(ask(&mut rig, 1, &[], &[]), (2, given));
    assert_eq!(rig.kernel.borrow().stats(1).snapshot().0.dhcp_messages, 8);
}

#[test]
fn no_other_address_is_bound_or_passes() {
    let mut rig = rig();
    ask(&mut rig, 3, &server(), &[]);
    for other in ["2001:db8:7::16", "2001:db8:7::", "fd73:6c69:7067::15"] {
        probe(&mut rig, other);
        let way = send(&mut rig, &udp6(other, 5_000, "2001:db8::9", 9, b"x"));
        assert_eq!(way, Handling::Dropped(DropReason::Spoofed), "{other}");
    }
    assert_eq!(rig.dropped(1, DropReason::Spoofed), 6);
    assert_eq!(bound(&rig), [LINK_LOCAL, OWN]);
}

#[test]
fn the_gateway_is_reached_by_the_default_route() {
    let mut rig = rig();
    ask(&mut rig, 3, &server(), &[]);
    let ping = [128, 0, 0, 0, 0, 7, 0, 1];
    let packet = crate::ndp::wire::tests::message(OWN, "fd73:6c69:7067::1", ping[0], &ping[4..]);
    send(&mut rig, &packet);
    let (_, reply) = rig.at_guest().pop().expect("an echo reply");
    let gateway: Ipv6Addr = "fd73:6c69:7067::1".parse().unwrap();
    assert_eq!(reply[8..24], gateway.octets());
    assert_eq!(reply[40], 129);
}

/// RFC 4861 section 6.2.5.
#[test]
fn its_end_is_told_by_a_last_advertisement() {
    let mut rig = rig();
    rig.tell(|engine| engine.set_vm(spec(1, &Setup::default())));
    let (_, packet) = rig.at_guest().pop().expect("an advertisement");
    assert_eq!((packet[40], &packet[46..48]), (134, &[0, 0][..]));
    rig.pass(2 * LONGEST_NS);
    assert!(rig.at_guest().is_empty());
}
