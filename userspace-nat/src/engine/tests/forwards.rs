//! What the world opens by a forward, and what it does not.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    DropReason, Handover, Ip4, Protocol, Refusal, Verdict, portframe::PortFlags, tcp::Flags,
};

use super::rig::*;
use crate::{
    datapath::Tables as _,
    engine::{ControlMessage, Forward},
    flow::NewFlow,
    port::VirtioNetHdr,
    rules::Action,
};

/// The host's ports 8,080 (TCP) and 5,353 (UDP) of any address lead to VM 1, and 9,090 of loopback.
pub(super) fn with_forwards(setup: Setup) -> Rig {
    let mut rig = Rig::with(setup);
    set_forwards(&mut rig);
    rig
}

fn set_forwards(rig: &mut Rig) {
    let forward = |protocol, host: [u8; 4], host_port, guest_port| Forward {
        protocol,
        host: host.into(),
        host_port,
        vm: 101,
        vm_row: 1,
        guest_port,
        rule: 12,
    };
    let all = vec![
        forward(Protocol::Tcp, [0; 4], 8_080, 80),
        forward(Protocol::Udp, [0; 4], 5_353, 5_300),
        forward(Protocol::Tcp, [127, 0, 0, 1], 9_090, 90),
    ];
    let message = ControlMessage::Forwards(all);
    rig.broker.messages.borrow_mut().push_back(message);
    rig.turn();
    let mut kernel = rig.kernel.borrow_mut();
    kernel.forwards.insert((NAT, 8_080, 6), (1, 101));
    kernel.forwards.insert((NAT, 5_353, 17), (1, 101));
}

const HTTP: At = (NAT, 8_080);
const WEB: At = (GUEST, 80);

const fn ip(octets: [u8; 4]) -> Ip4 {
    Ip4 { octets }
}

/// Hands a packet over as one to a forward, whatever the programs would do.
fn hand_over(rig: &mut Rig, packet: &[u8]) {
    let vnet = VirtioNetHdr::default();
    rig.kernel
        .borrow_mut()
        .hand_over(1, Handover::Forward, PortFlags::FROM_UPLINK, vnet, packet);
    rig.turn();
}

#[test]
fn what_a_link_brings_for_loopback_is_no_forwards() {
    let mut rig = with_forwards(Setup::default());
    for port in [8_080, 9_090] {
        hand_over(&mut rig, &syn(SERVER, (ip([127, 0, 0, 1]), port), 5));
    }
    hand_over(&mut rig, &udp(SERVER, (ip([127, 8, 8, 8]), 5_353), b"x"));
    assert_eq!((rig.flows(), rig.dropped(1, DropReason::NoFlow)), (0, 3));
    assert!(rig.at_guest().is_empty());
}

#[test]
fn a_predecessors_flow_of_loopback_ends() {
    let mut rig = with_forwards(Setup::default());
    let core = &mut rig.engine.core;
    for (inbound, port) in [(true, 9_090), (false, 61_000)] {
        let flow = NewFlow {
            guest: slipgate_abi::Tuple {
                scope: 101,
                local: GUEST,
                remote: PEER,
                local_port: if inbound { 90 } else { 91 },
                remote_port: 443,
                protocol: 6,
                pad: [0; 3],
            },
            vm_row: 1,
            protocol: Protocol::Tcp,
            nat: ip([127, 0, 0, 1]),
            nat_port: port,
            rule: 12,
            uplink_ifindex: UPLINK,
            next_hop: 0,
            isn: 5,
            inbound,
            verdict: Verdict::Fast,
        };
        let now_ns = rig.kernel.borrow().now_ns;
        core.flows.open(&mut core.datapath, &flow, now_ns).unwrap();
    }
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.pass(crate::clock::SECOND_NS);
    rig.assert_empty();
    let ends: Vec<_> = rig.records().iter().map(|r| r["end"].clone()).collect();
    assert_eq!(ends, ["address-gone", "address-gone"]);
}

#[test]
fn a_guests_syn_on_a_flow_of_the_world_is_judged() {
    let mut rig = with_forwards(Setup {
        default: Action::Deny,
        ..Setup::default()
    });
    // The first number is the forged SYN's own.
    for isn in [5, 7] {
        rig.world(&syn(SERVER, HTTP, 5));
        assert_eq!(rig.at_guest().len(), 1);
        rig.guest(1, &syn(WEB, SERVER, isn));
        assert!(rig.at_world().is_empty(), "{isn}");
        assert_eq!(rig.at_guest().pop().unwrap().1[33] & Flags::RST, Flags::RST);
    }
    assert_eq!(rig.refused(1, Refusal::Default), 2);
    // The same when the engine carries the flow.
    rig.world(&syn(SERVER, HTTP, 5));
    let slot = rig.kernel.borrow().slots_in_use().pop().unwrap();
    rig.kernel.borrow().slot(slot).set_verdict(Verdict::Engine);
    rig.guest(1, &syn(WEB, SERVER, 5));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Default), 3);
    // Who answers is not asked for a rule.
    rig.at_guest();
    rig.world(&syn(SERVER, HTTP, 5));
    assert_eq!(rig.guest(1, &syn_ack(WEB, SERVER, 9, 6)), Way::Fast);
    assert_eq!(rig.at_world().len(), 1);
    rig.assert_paired();
}

#[test]
fn a_guests_syn_that_the_rules_let_out_is_a_flow_of_the_guests() {
    let mut rig = with_forwards(Setup::default());
    rig.world(&syn(SERVER, HTTP, 5));
    rig.at_guest();
    rig.guest(1, &syn(WEB, SERVER, 5));
    let sent = rig.at_world().pop().expect("the SYN goes out");
    assert_ne!(sent[20..22], 8_080u16.to_be_bytes());
    let inbound = rig.engine.core.flows.count_from_world(1);
    assert_eq!((rig.engine.core.flows.count(1), inbound), (1, 0));
    // It is that SYN which opened it, so the same one again is a retransmission.
    assert_eq!(rig.guest(1, &syn(WEB, SERVER, 5)), Way::Fast);
    rig.assert_paired();
}

#[test]
fn whom_a_forward_lets_in() {
    let mut rig = with_forwards(Setup::default());
    let never = [
        [0, 0, 0, 0],
        [0, 1, 2, 3],
        // The gateway, the resolver, the guest, nobody: of the guest's own network.
        [10, 0, 2, 2],
        [10, 0, 2, 3],
        [10, 0, 2, 15],
        [10, 0, 2, 77],
        [127, 0, 0, 1],
        [169, 254, 9, 9],
        [169, 254, 169, 254],
        [100, 100, 100, 200],
        [168, 63, 129, 16],
        // The host.
        [192, 0, 2, 1],
        [224, 0, 0, 251],
        [240, 0, 0, 1],
        [255, 255, 255, 255],
    ];
    for octets in never {
        rig.world(&syn((ip(octets), 50_000), HTTP, 5));
        rig.world(&udp((ip(octets), 50_000), (NAT, 5_353), b"x"));
        assert_eq!(rig.flows(), 0, "{octets:?}");
    }
    assert_eq!(
        rig.refused(1, Refusal::Protected),
        2 * never.len() as u64,
        "each packet is in the books"
    );
    assert!(rig.at_guest().is_empty());
    let clients = [
        [198, 51, 100, 7],
        [10, 9, 9, 9],
        [172, 16, 3, 4],
        [192, 168, 1, 2],
        [100, 64, 1, 1],
    ];
    for octets in clients {
        rig.world(&syn((ip(octets), 50_000), HTTP, 5));
        rig.world(&udp((ip(octets), 50_000), (NAT, 5_353), b"x"));
    }
    assert_eq!(rig.flows(), 2 * clients.len());
}

#[test]
fn flows_of_whom_a_forward_would_not_let_in_are_not_taken_over() {
    let mut rig = with_forwards(Setup::default());
    let client = (ip([10, 9, 9, 9]), 50_000);
    rig.world(&syn(client, HTTP, 5));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let looked_at = rig.engine.core.datapath.slot(slot);
    assert_eq!(looked_at.verdict().load(Relaxed), Verdict::Fast as u32);
    let allowed = |rig: &Rig| rig.engine.core.refused_flows(0, |_| false).cut.len();
    assert_eq!(allowed(&rig), 0);
    // The address is the host's own from now on.
    let ControlMessage::Routes {
        routes,
        mut local,
        links,
    } = routes()
    else {
        panic!("routes")
    };
    local.host.push(client.0.into());
    let message = ControlMessage::Routes {
        routes,
        local,
        links,
    };
    rig.broker.messages.borrow_mut().push_back(message);
    rig.turn();
    assert_eq!(allowed(&rig), 1);
}
