//! Neighbour solicitations of the guest: the program answers those for the gateway.
use std::net::Ipv6Addr;

use slipgate_abi::{DropReason, Handover, Protocol, portframe::PortFlags, vm::VmFlags};

use crate::{datapath::*, flow6::*, frame6::*, loaded};

const EGRESS: &str = "guest_egress";

/// A solicitation for a target, with the guest's MAC.
fn solicitation(source: Ipv6Addr, target: Ipv6Addr) -> Frame6 {
    let [.., a, b, c] = target.octets();
    let option = [&[1, 1][..], &GUEST_MAC].concat();
    let l4 = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), &option].concat();
    Frame6 {
        destination_mac: [0x33, 0x33, 0xff, a, b, c],
        source,
        destination: Ipv6Addr::new(
            0xff02,
            0,
            0,
            0,
            0,
            1,
            0xff00 | u16::from(a),
            u16::from_be_bytes([b, c]),
        ),
        hop_limit: 255,
        l4,
        ..Frame6::tx(Protocol::Icmpv6)
    }
}

#[test]
fn the_gateway_s_addresses_are_answered() {
    for target in [GATEWAY6, GATEWAY_LOCAL] {
        for source in [GUEST6, GUEST_LOCAL] {
            let datapath = loaded!();
            let run = datapath.run(EGRESS, &solicitation(source, target).bytes());
            assert_eq!(run.action, REDIRECT, "{:?}", datapath.drops_of(ROW));
            let option = [&[2, 1][..], &GATEWAY_MAC].concat();
            let l4 = [
                &[136, 0, 0, 0, 0xe0, 0, 0, 0][..],
                &target.octets(),
                &option,
            ]
            .concat();
            let expected = Frame6 {
                destination_mac: GUEST_MAC,
                source_mac: GATEWAY_MAC,
                source: target,
                destination: source,
                l4,
                ..solicitation(source, target)
            };
            assert_eq!(run.frame, expected.bytes());
            assert_eq!(datapath.vms6.get(ROW).neighbours_answered, 1);
            assert_eq!(datapath.handed_over(), 0);
        }
    }
}

#[test]
fn other_solicitations_go_to_the_engine() {
    let unbound = solicitation(UNBOUND, GATEWAY6);
    let neighbour = solicitation(GUEST6, UNBOUND);
    let mut without_option = solicitation(GUEST6, GATEWAY6);
    without_option.l4.truncate(24);
    let mut another_option = solicitation(GUEST6, GATEWAY6);
    another_option.l4[24] = 14;
    for frame in [unbound, neighbour, without_option, another_option] {
        let datapath = loaded!();
        datapath.expect_handover(EGRESS, &frame.bytes(), Handover::Ndp, PortFlags::GROUP);
        assert_eq!(datapath.vms6.get(ROW).neighbours_answered, 0);
    }
}

#[test]
fn a_guest_without_a_known_mac_announces_it_by_a_solicitation() {
    let datapath = loaded!();
    datapath
        .vms
        .change(ROW, |vm| vm.guest_mac = slipgate_abi::VmRef::UNKNOWN_MAC);
    datapath.run(EGRESS, &solicitation(GUEST6, GATEWAY6).bytes());
    assert_eq!(datapath.vms.get(ROW).guest_mac, GUEST_MAC);
}

#[test]
fn a_frozen_vm_gets_no_answer() {
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
    datapath.expect_drop(
        EGRESS,
        &solicitation(GUEST6, GATEWAY6).bytes(),
        ROW,
        DropReason::Frozen,
    );
}
