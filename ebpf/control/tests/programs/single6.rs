//! A VM with a single IPv6 address, which the network routes to it.
use std::net::Ipv6Addr;

use slipgate_abi::{DropReason, ForwardKey6, Handover, Protocol, vm6::Vm6Flags};

use crate::{datapath::*, flow6::*, frame6::*, loaded};

const EGRESS: &str = "guest_egress";
const INGRESS: &str = "uplink_ingress";
/// The gateway's address is of no network of the guest's.
const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 1);

/// Gives the VM under test a single address.
fn single(datapath: &mut Loaded, address: Ipv6Addr) {
    datapath.vms6.change(ROW, |row| {
        row.flags |= Vm6Flags::SINGLE;
        row.prefix = address.into();
        row.gateway = GATEWAY.into();
    });
    let key = ForwardKey6::of_routed_address(address.into());
    let key = (Ipv6Addr::from(key.host), key.port, Protocol::Icmpv6);
    datapath.forward6(key, (VM, 0));
}

#[test]
fn a_guest_sends_from_its_single_address_and_no_other_of_its_prefix() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
        let mut datapath = loaded!();
        single(&mut datapath, GUEST6);
        let own = Frame6::tx(protocol);
        datapath.expect_handover(EGRESS, &own.bytes(), Handover::Miss, 0);
        let mut datapath = loaded!();
        single(&mut datapath, GUEST6);
        let beside = Frame6 {
            source: UNBOUND,
            ..own
        };
        datapath.expect_drop(EGRESS, &beside.bytes(), ROW, DropReason::Spoofed);
    }
    // Bound or not: what it may use is its row's to say.
    let mut datapath = loaded!();
    single(&mut datapath, UNBOUND);
    let former = Frame6::tx(Protocol::Udp);
    datapath.expect_drop(EGRESS, &former.bytes(), ROW, DropReason::Spoofed);
}

#[test]
fn the_gateways_network_is_local_and_the_guests_own_is_not() {
    let to = |destination| Frame6 {
        destination,
        ..Frame6::tx(Protocol::Udp)
    };
    for (destination, why) in [(GATEWAY, Handover::Local), (UNBOUND, Handover::Miss)] {
        let mut datapath = loaded!();
        single(&mut datapath, GUEST6);
        datapath.expect_handover(EGRESS, &to(destination).bytes(), why, 0);
    }
}

#[test]
fn packets_to_the_address_are_the_vms_and_those_beside_it_the_hosts() {
    for (program, from) in [(INGRESS, 0), ("uplink_ingress_l3", 14)] {
        let to = |destination| Frame6 {
            destination,
            ..Frame6::rx(Protocol::Udp)
        };
        let mut datapath = loaded!();
        single(&mut datapath, GUEST6);
        datapath.expect_unnoticed(program, &to(UNBOUND).bytes()[from..]);
        let run = datapath.run(program, &to(GUEST6).bytes()[from..]);
        assert_eq!(run.action, SHOT, "{program}");
        assert_eq!(datapath.only_reason(ROW), DropReason::NoFlow);
    }
}
