//! Packets of a guest that are handed over to the engine, and their limit in flight.
use std::net::Ipv4Addr;

use slipgate_abi::{
    DropReason, Handover, Protocol, Verdict, Vm, maps::MAX_OWNERS, portframe::PortFlags, tcp::Flags,
};

use crate::{datapath::*, frame::*, loaded, pool::Datapath};

const EGRESS: &str = "guest_egress";

#[test]
fn what_needs_a_decision_goes_to_the_engine_as_it_came() {
    let dhcp = |source| Frame {
        source,
        destination: Ipv4Addr::BROADCAST,
        destination_mac: [0xff; 6],
        source_port: 68,
        destination_port: 67,
        ..Frame::tx(Protocol::Udp)
    };
    let cases = [
        (
            "first datagram",
            Handover::Miss,
            0,
            Frame::tx(Protocol::Udp),
        ),
        ("echo", Handover::Miss, 0, Frame::tx(Protocol::Icmp)),
        (
            "SYN",
            Handover::Miss,
            0,
            Frame {
                tcp_flags: Flags::SYN,
                ..Frame::tx(Protocol::Tcp)
            },
        ),
        ("late segment", Handover::Miss, 0, Frame::tx(Protocol::Tcp)),
        (
            "DHCP, no address yet",
            Handover::Dhcp,
            PortFlags::GROUP,
            dhcp(Ipv4Addr::UNSPECIFIED),
        ),
        (
            "DHCP, rebinding",
            Handover::Dhcp,
            PortFlags::GROUP,
            dhcp(GUEST),
        ),
        (
            "DHCP, renewing",
            Handover::Dhcp,
            0,
            Frame {
                destination: GATEWAY,
                destination_mac: GATEWAY_MAC,
                ..dhcp(GUEST)
            },
        ),
        (
            "to the gateway",
            Handover::Local,
            0,
            Frame {
                destination: GATEWAY,
                ..Frame::tx(Protocol::Tcp)
            },
        ),
        (
            "ping of the gateway",
            Handover::Local,
            0,
            Frame {
                destination: GATEWAY,
                ..Frame::tx(Protocol::Icmp)
            },
        ),
        (
            "to its own network",
            Handover::Local,
            0,
            Frame {
                destination: Ipv4Addr::new(10, 0, 2, 99),
                ..Frame::tx(Protocol::Udp)
            },
        ),
        (
            "echo reply",
            Handover::Icmp,
            0,
            Frame {
                icmp_type: 0,
                ..Frame::tx(Protocol::Icmp)
            },
        ),
        (
            "unreachable",
            Handover::Icmp,
            0,
            Frame {
                icmp_type: 3,
                ..Frame::tx(Protocol::Icmp)
            },
        ),
    ];
    for (what, why, flags, frame) in cases {
        let datapath = loaded!();
        println!("{what}");
        datapath.expect_handover(EGRESS, &frame.bytes(), why, flags);
    }
}

/// Only the engine can tell, once it has all, what a fragment belongs to.
#[test]
fn fragments_are_the_engines_to_reassemble_even_with_a_flow() {
    for field in [0x2000, 0x2009, 0x0009] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Tcp));
        let frame = Frame {
            fragment: field,
            ..Frame::tx(Protocol::Tcp)
        };
        datapath.expect_handover(EGRESS, &frame.bytes(), Handover::Fragment, 0);
    }
}

#[test]
fn ip_options_are_the_engines_to_refuse_even_with_a_flow() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Tcp));
    let mut frame = Frame::tx(Protocol::Tcp).bytes();
    frame[14] = 0x46;
    datapath.expect_handover(EGRESS, &frame, Handover::Uncommon, 0);
}

#[test]
fn dns_goes_to_the_engine_even_with_a_flow() {
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            remote_port: 53,
            ..Flow::new(protocol)
        });
        let frame = Frame {
            destination_port: 53,
            ..Frame::tx(protocol)
        };
        datapath.expect_handover(EGRESS, &frame.bytes(), Handover::Miss, 0);
    }
}

#[test]
fn ends_of_the_guests_network_are_by_prefix() {
    for (prefix_len, destination, local) in [
        (24, Ipv4Addr::new(10, 0, 2, 255), true),
        (24, Ipv4Addr::new(10, 0, 3, 0), false),
        (16, Ipv4Addr::new(10, 0, 3, 0), true),
        (30, Ipv4Addr::new(10, 0, 2, 4), false),
        (32, GATEWAY, true),
        (32, Ipv4Addr::new(10, 0, 2, 3), false),
    ] {
        let datapath = loaded!();
        datapath.vms.change(ROW, |vm| vm.prefix_len = prefix_len);
        let frame = Frame {
            destination,
            ..Frame::tx(Protocol::Udp)
        };
        let why = if local {
            Handover::Local
        } else {
            Handover::Miss
        };
        datapath.expect_handover(EGRESS, &frame.bytes(), why, 0);
    }
}

#[test]
fn credits_bound_what_is_on_its_way() {
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| {
        vm.credits = 3;
        vm.handed_over = 10;
        vm.taken_in = 9;
    });
    let frame = Frame::tx(Protocol::Udp).bytes();
    let actions: Vec<i32> = (0..4)
        .map(|_| datapath.run(EGRESS, &frame).action)
        .collect();
    assert_eq!(actions, [REDIRECT, REDIRECT, SHOT, SHOT]);
    assert_eq!(datapath.handed_over(), 12);
    assert_eq!(datapath.drops.get(ROW).no_credit.packets, 2);
    // A frame that the kernel cut in pieces on its way came out as several.
    datapath.vms.change(ROW, |vm| vm.taken_in = 40);
    assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
    datapath.vms.change(ROW, |vm| vm.taken_in = 13);
    assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
    // No port: nowhere to go.
    datapath.vms.change(ROW, |vm| vm.port_ifindex = 0);
    assert_eq!(datapath.run(EGRESS, &frame).action, SHOT);
    assert_eq!(datapath.drops.get(ROW).engine_busy.packets, 1);
    assert_eq!(datapath.handed_over(), 14);
}

/// With two VMs: one takes what the other leaves of the queue, and the other always has its share.
#[test]
fn a_vm_has_its_share_and_what_others_leave() {
    let mut datapath = loaded!();
    const OTHER: u32 = ROW + 1;
    datapath.owners.change(OWNER, |owner| {
        owner.share = 2;
        owner.common = 6;
    });
    datapath.vms.set(OTHER, Vm { id: VM + 1, ..vm() });
    let frame = Frame::tx(Protocol::Udp).bytes();
    let run = |datapath: &Datapath| datapath.run(EGRESS, &frame).action;
    // Alone, a VM has more than its share, until so many frames are queued.
    let actions: Vec<i32> = (0..8).map(|_| run(&datapath)).collect();
    assert_eq!(actions[..6], [REDIRECT; 6]);
    assert_eq!(actions[6..], [SHOT; 2]);
    assert_eq!(datapath.drops.get(ROW).no_credit.packets, 2);
    let all = |datapath: &Datapath| {
        let owner = datapath.owners.get(OWNER);
        (owner.handed_over, owner.world_handed_over)
    };
    assert_eq!(all(&datapath), (6, 0));
    // The other has its share all the same.
    datapath.set_tap(TAP, VM + 1, OTHER);
    let actions: Vec<i32> = (0..4).map(|_| run(&datapath)).collect();
    assert_eq!(actions, [REDIRECT, REDIRECT, SHOT, SHOT]);
    assert_eq!(all(&datapath), (8, 0));
    assert_eq!(datapath.drops.get(OTHER).no_credit.packets, 2);
    // What the engine took in of either is room for both, beyond their shares.
    datapath.vms.change(ROW, |vm| vm.taken_in = 3);
    datapath.owners.change(OWNER, |owner| owner.taken_in = 3);
    assert_eq!(run(&datapath), REDIRECT);
    assert_eq!(run(&datapath), SHOT);
    // A count that is too high by whatever mistake shuts nobody out.
    datapath.owners.change(OWNER, |owner| owner.taken_in = 99);
    assert_eq!(run(&datapath), REDIRECT);
    // A row that does not exist has no engine.
    datapath.vms.change(OTHER, |vm| vm.owner = MAX_OWNERS);
    assert_eq!(run(&datapath), SHOT);
    assert_eq!(datapath.drops.get(OTHER).stale_vm.packets, 1);
}

#[test]
fn a_packet_takes_the_credits_of_its_fragments() {
    let datapath = loaded!();
    let large = |l3_len: usize| Frame {
        fragment: 0,
        payload: vec![7; l3_len - 28],
        ..Frame::tx(Protocol::Udp)
    };
    datapath.vms.change(ROW, |vm| vm.credits = 6);
    for (l3_len, taken) in [(1_500, 1), (1_501, 1 + 2), (3_000, 1 + 2 + 3)] {
        let frame = large(l3_len).bytes();
        assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT, "{l3_len}");
        assert_eq!(datapath.handed_over(), taken, "{l3_len}");
    }
    assert_eq!(datapath.run(EGRESS, &large(1_501).bytes()).action, SHOT);
    assert_eq!(datapath.only_reason(ROW), DropReason::NoCredit);
}

#[test]
fn the_worlds_frames_take_none_of_the_guests_credits() {
    let mut datapath = loaded!();
    datapath.forward((NAT, 8080, Protocol::Udp), (VM, 80));
    datapath.admit(Flow {
        verdict: Verdict::Engine,
        ..Flow::new(Protocol::Tcp)
    });
    datapath.vms.change(ROW, |vm| {
        vm.credits = 2;
        vm.world_credits = 4;
    });
    let first = Frame {
        destination_port: 8080,
        ..Frame::rx(Protocol::Udp)
    };
    let peers = Frame::rx(Protocol::Tcp);
    let guests = Frame::tx(Protocol::Udp);
    let actions = |program, frame: &Frame| -> Vec<i32> {
        let run = |_| datapath.run(program, &frame.bytes()).action;
        (0..4).map(run).collect()
    };
    // First packets to forwards have half of the world's credits, what the VM's peers send the rest.
    assert_eq!(
        actions("uplink_ingress", &first),
        [REDIRECT, REDIRECT, SHOT, SHOT]
    );
    assert_eq!(
        actions("uplink_ingress", &peers),
        [REDIRECT, REDIRECT, SHOT, SHOT]
    );
    assert_eq!(actions(EGRESS, &guests), [REDIRECT, REDIRECT, SHOT, SHOT]);
    let vm = datapath.vms.get(ROW);
    assert_eq!((vm.handed_over, vm.world_handed_over), (2, 4));
    assert_eq!(datapath.drops.get(ROW).no_credit.packets, 6);
    // The guest's are of no use to the world either.
    datapath.vms.change(ROW, |vm| vm.taken_in = 2);
    assert_eq!(datapath.run("uplink_ingress", &peers.bytes()).action, SHOT);
    datapath.vms.change(ROW, |vm| vm.world_taken_in = 1);
    assert_eq!(
        datapath.run("uplink_ingress", &peers.bytes()).action,
        REDIRECT
    );
}
