use proptest::prelude::*;

use super::{
    wire::{
        kind,
        tests::{message, solicitation},
    },
    *,
};
use crate::test_vm;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 15];
const LOCAL: &str = "fe80::ff:fe00:f";
const GUEST: &str = "fd00:1:2:3::15";
const GATEWAY: &str = "fd00:1:2:3::1";

fn ip(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

fn told(vm: &VmNet, packet: &[u8]) -> Result<Outcome, DropReason> {
    handle(vm, &vm.ipv6.unwrap(), packet)
}

fn ask(vm: &VmNet, from: &str, target: &str) -> Result<Outcome, DropReason> {
    let to = wire::solicited_node(ip(target)).to_string();
    let mac = (from != "::").then_some(MAC);
    let rest = solicitation(target, mac);
    told(vm, &message(from, &to, kind::NEIGHBOUR_SOLICITATION, &rest))
}

/// Returns source, destination, flags, target and MAC of a neighbour advertisement.
fn read(reply: &Reply) -> (Ipv6Addr, Ipv6Addr, u8, Ipv6Addr, Vec<u8>) {
    let Reply::Packet(packet) = reply else {
        panic!("{reply:?}");
    };
    let ndp = wire::parse(packet).expect("valid");
    let Message::NeighbourAdvertisement { target } = ndp.message else {
        panic!("{ndp:?}");
    };
    let icmp = &packet[wire::HEADER_LEN..];
    (
        ndp.source,
        ndp.destination,
        icmp[4],
        target,
        icmp[26..].to_vec(),
    )
}

#[test]
fn the_gateways_addresses_are_answered_with_its_mac() {
    let vm = test_vm::vm6(1);
    let link_local = vm
        .ipv6
        .unwrap()
        .gateway_link_local(vm.gateway_mac)
        .to_string();
    for target in [GATEWAY, &link_local] {
        let outcome = ask(&vm, LOCAL, target).unwrap();
        let expected = (
            ip(target),
            ip(LOCAL),
            0xe0,
            ip(target),
            vm.gateway_mac.to_vec(),
        );
        assert_eq!(read(&outcome.reply), expected);
        assert_eq!(outcome.address, Some(ip(LOCAL)), "the sender's is bound");
    }
    assert_eq!(vm.stats.snapshot().0.ndp_answers, 2);
}

#[test]
fn other_addresses_of_the_prefix_are_answered_by_proxy_and_of_the_link_not() {
    let vm = test_vm::vm6(1);
    let outcome = ask(&vm, GUEST, "fd00:1:2:3::77").unwrap();
    let (_, to, flags, _, mac) = read(&outcome.reply);
    assert_eq!((to, flags, mac), (ip(GUEST), 0xc0, vm.gateway_mac.to_vec()));
    assert_eq!(ask(&vm, GUEST, "fe80::77"), Err(DropReason::ServiceReject));
    assert_eq!(
        ask(&vm, GUEST, "2001:db8::1"),
        Err(DropReason::ServiceReject)
    );
}

#[test]
fn rfc4862_probes_find_every_address_free_but_the_gateways() {
    let vm = test_vm::vm6(1);
    for own in [LOCAL, GUEST] {
        let expected = Outcome {
            reply: Reply::None,
            address: Some(ip(own)),
        };
        assert_eq!(ask(&vm, "::", own), Ok(expected), "{own}");
    }
    let taken = ask(&vm, "::", GATEWAY).unwrap();
    let (source, to, flags, ..) = read(&taken.reply);
    assert_eq!((source, to, flags), (ip(GATEWAY), wire::ALL_NODES, 0xa0));
    assert_eq!(taken.address, None);
    assert_eq!(ask(&vm, "::", "2001:db8::1"), Err(DropReason::Spoofed));
    // The anycast address of the prefix's routers is no guest's.
    assert_eq!(ask(&vm, "::", "fd00:1:2:3::"), Err(DropReason::Spoofed));
}

#[test]
fn router_solicitations_ask_for_an_advertisement_to_the_sender() {
    let vm = test_vm::vm6(1);
    let solicit = |from: &str| {
        let to = "ff02::2";
        told(&vm, &message(from, to, kind::ROUTER_SOLICITATION, &[0; 4]))
    };
    let found = solicit(LOCAL).unwrap();
    assert_eq!(found.reply, Reply::RouterAdvertisement(ip(LOCAL)));
    assert_eq!(found.address, Some(ip(LOCAL)));
    let found = solicit("::").unwrap();
    assert_eq!(found.reply, Reply::RouterAdvertisement(wire::ALL_NODES));
    assert_eq!(found.address, None);
}

#[test]
fn others_addresses_and_macs_are_spoofed() {
    let mut vm = test_vm::vm6(1);
    for from in ["2001:db8::1", "fd00:1:2:4::15", GATEWAY, "::1", "ff02::1"] {
        assert_eq!(ask(&vm, from, GATEWAY), Err(DropReason::Spoofed), "{from}");
    }
    vm.guest_mac = Some([2, 0, 0, 0, 0, 99]);
    assert_eq!(ask(&vm, LOCAL, GATEWAY), Err(DropReason::Spoofed));
    vm.guest_mac = Some(MAC);
    assert!(ask(&vm, LOCAL, GATEWAY).is_ok());
    let rest = solicitation(GATEWAY, Some([0x33, 0x33, 0, 0, 0, 1]));
    let group = message(LOCAL, GATEWAY, kind::NEIGHBOUR_SOLICITATION, &rest);
    vm.guest_mac = None;
    assert_eq!(
        told(&vm, &group),
        Err(DropReason::Spoofed),
        "no MAC is a group's"
    );
}

#[test]
fn rfc6105_a_guest_is_no_router() {
    let vm = test_vm::vm6(1);
    for (kind, len) in [(kind::ROUTER_ADVERTISEMENT, 12), (kind::REDIRECT, 36)] {
        let packet = message(LOCAL, "ff02::1", kind, &vec![0; len]);
        assert_eq!(told(&vm, &packet), Err(DropReason::RouterAdvertisement));
    }
    assert_eq!(
        told(&vm, &message(LOCAL, "ff02::1", 128, &[0; 4])),
        Err(DropReason::ServiceReject)
    );
    assert_eq!(told(&vm, &[]), Err(DropReason::Malformed));
}

#[test]
fn an_announcement_binds_the_address() {
    let vm = test_vm::vm6(1);
    let announce = |target| {
        let rest = solicitation(target, None);
        told(
            &vm,
            &message(LOCAL, "ff02::1", kind::NEIGHBOUR_ADVERTISEMENT, &rest),
        )
        .unwrap()
    };
    assert_eq!(announce(GUEST).address, Some(ip(GUEST)));
    assert_eq!(announce(GATEWAY).address, None);
}

#[test]
fn a_single_address_is_the_only_one_that_is_bound() {
    let mut vm = test_vm::vm6(1);
    vm.ipv6 = Some(GuestIpv6 {
        prefix: "2001:db8:7::17/128".parse().unwrap(),
        is_routed: true,
    });
    let probed = |target: &str| ask(&vm, "::", target).map(|outcome| outcome.address);
    for own in ["2001:db8:7::17", LOCAL] {
        assert_eq!(probed(own), Ok(Some(ip(own))));
        assert!(ask(&vm, own, "fd73:6c69:7067::1").is_ok());
    }
    // A neighbour's of the same /64, another prefix's, and the gateway's network.
    for other in ["2001:db8:7::16", GUEST, "fd73:6c69:7067::15"] {
        assert_eq!(probed(other), Err(DropReason::Spoofed), "{other}");
        let spoofed = ask(&vm, other, "fd73:6c69:7067::1");
        assert_eq!(spoofed, Err(DropReason::Spoofed), "{other}");
    }
    // No prefix is on the guest's link, but the gateway's network is answered for.
    let asked = |target: &str| ask(&vm, LOCAL, target).map(|_| ());
    assert_eq!(asked("2001:db8:7::16"), Err(DropReason::ServiceReject));
    assert_eq!(asked("fd73:6c69:7067::99"), Ok(()));
}

proptest! {
    /// Whatever a guest sends: only addresses of its own are bound, and answers go to it alone.
    #[test]
    fn no_message_binds_anothers_address(
        source in prop_oneof![Just(LOCAL), Just(GUEST), Just("::"), Just("2001:db8::1"), Just(GATEWAY)],
        target in any::<[u8; 16]>(), is_near: bool, kind in 133_u8..138,
    ) {
        let vm = test_vm::vm6(1);
        let net = vm.ipv6.unwrap();
        let mut target = Ipv6Addr::from(target);
        if is_near {
            target = Ipv6Addr::from_bits(net.prefix.network().to_bits() | target.to_bits() & 0xff);
        }
        let to = wire::solicited_node(target).to_string();
        let rest = solicitation(&target.to_string(), None);
        if let Ok(outcome) = told(&vm, &message(source, &to, kind, &rest)) {
            let is_own = |address| is_guests(&net, vm.gateway_mac, address);
            prop_assert!(outcome.address.is_none_or(is_own));
            if let Reply::Packet(packet) = &outcome.reply {
                let to = wire::parse(packet).unwrap().destination;
                prop_assert!(to == wire::ALL_NODES || is_own(to));
            }
        }
    }
}
