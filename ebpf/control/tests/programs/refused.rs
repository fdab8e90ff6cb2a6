//! Packets that a guest must not send.
use std::net::Ipv4Addr;

use slipgate_abi::{DropReason, Protocol, vm::VmFlags};

use crate::{datapath::*, frame::*, loaded};

const EGRESS: &str = "guest_egress";

#[test]
fn what_no_guest_may_send_is_dropped_by_its_reason() {
    let tcp = || Frame::tx(Protocol::Tcp);
    let raw = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = tcp().bytes();
        change(&mut bytes);
        bytes
    };
    let ether_type = |number: u16| raw(&|b| b[12..14].copy_from_slice(&number.to_be_bytes()));
    let cases: Vec<(&str, DropReason, Vec<u8>)> = vec![
        ("802.1Q", DropReason::Tagged, ether_type(0x8100)),
        ("802.1ad", DropReason::Tagged, ether_type(0x88a8)),
        ("IPv6", DropReason::Ipv6, ether_type(0x86dd)),
        ("LLDP", DropReason::EtherType, ether_type(0x88cc)),
        (
            "IPv6 multicast",
            DropReason::Group,
            raw(&|b| {
                b[..2].copy_from_slice(&[0x33, 0x33]);
                b[12..14].copy_from_slice(&[0x86, 0xdd]);
            }),
        ),
        (
            "multicast",
            DropReason::Group,
            Frame {
                destination_mac: [1, 0, 0x5e, 0, 0, 1],
                ..Frame::tx(Protocol::Udp)
            }
            .bytes(),
        ),
        (
            "another's address",
            DropReason::Spoofed,
            Frame {
                source: Ipv4Addr::new(10, 0, 2, 16),
                ..tcp()
            }
            .bytes(),
        ),
        (
            "no address, no DHCP",
            DropReason::Spoofed,
            Frame {
                source: Ipv4Addr::UNSPECIFIED,
                ..Frame::tx(Protocol::Udp)
            }
            .bytes(),
        ),
        (
            "fragment, to all",
            DropReason::Fragment,
            raw(&|b| {
                b[0] = 1;
                b[20] = 0x20;
            }),
        ),
        (
            "options, to all",
            DropReason::IpOptions,
            raw(&|b| {
                b[0] = 1;
                b[14] = 0x46;
            }),
        ),
        ("IHL 4", DropReason::Malformed, raw(&|b| b[14] = 0x44)),
        ("version 5", DropReason::Malformed, raw(&|b| b[14] = 0x55)),
        (
            "longer than the frame",
            DropReason::Malformed,
            raw(&|b| b[17] += 1),
        ),
        (
            "shorter than the frame",
            DropReason::Malformed,
            raw(&|b| b[17] -= 1),
        ),
        (
            "shorter than its header",
            DropReason::Malformed,
            raw(&|b| b[17] = 19),
        ),
        (
            "TCP offset 4",
            DropReason::Malformed,
            raw(&|b| b[46] = 0x40),
        ),
        (
            "TCP offset past the end",
            DropReason::Malformed,
            raw(&|b| b[46] = 0xf0),
        ),
        (
            "cut in the TCP header",
            DropReason::Malformed,
            raw(&|b| {
                b.truncate(14 + 20 + 12);
                b[17] = 32;
            }),
        ),
        ("UDP longer than its packet", DropReason::Malformed, {
            let mut bytes = Frame::tx(Protocol::Udp).bytes();
            bytes[39] += 1;
            bytes
        }),
        ("UDP shorter than its header", DropReason::Malformed, {
            let mut bytes = Frame::tx(Protocol::Udp).bytes();
            bytes[38..40].copy_from_slice(&[0, 7]);
            bytes
        }),
        (
            "GRE",
            DropReason::IpProtocol,
            Frame {
                protocol: 47,
                ..tcp()
            }
            .bytes(),
        ),
    ];
    for (what, reason, frame) in cases {
        let mut datapath = loaded!();
        for (slot, protocol) in [(1, Protocol::Tcp), (2, Protocol::Udp)] {
            datapath.admit(Flow {
                slot,
                ..Flow::new(protocol)
            });
        }
        datapath.vms6.change(ROW, |row| row.flags = 0);
        println!("{what}");
        datapath.expect_drop(EGRESS, &frame, ROW, reason);
    }
}

#[test]
fn mac_is_checked_when_asked_for() {
    let frame = Frame {
        source_mac: [0x52, 0x54, 0, 1, 2, 4],
        ..Frame::tx(Protocol::Udp)
    };
    for (flags, action) in [(0, REDIRECT), (VmFlags::CHECK_MAC, SHOT)] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        datapath.vms.change(ROW, |vm| vm.flags = flags);
        assert_eq!(datapath.run(EGRESS, &frame.bytes()).action, action);
        let named = (action == SHOT).then_some(frame.source_mac);
        if action == SHOT {
            assert_eq!(datapath.only_drop(ROW), DropReason::Spoofed);
        }
        let right = Frame::tx(Protocol::Udp).bytes();
        assert_eq!(datapath.run(EGRESS, &right).action, REDIRECT);
        assert_eq!(datapath.vms.get(ROW).mac_mismatch(), named);
    }
}

#[test]
fn a_tap_that_is_nobodys_carries_nothing() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    let frame = Frame::tx(Protocol::Udp).bytes();
    // The row is another VM's by now.
    datapath.set_tap(TAP, VM + 1, ROW);
    datapath.expect_drop(EGRESS, &frame, 0, DropReason::StaleVm);
    datapath.set_tap(TAP, VM, 1_000_000);
    assert_eq!(datapath.run(EGRESS, &frame).action, SHOT);
    // A free row has id 0.
    datapath.set_tap(TAP, 0, 9);
    assert_eq!(datapath.run(EGRESS, &frame).action, SHOT);
    assert_eq!(datapath.drops.get(0).stale_vm.packets, 3);
}

#[test]
fn gso_that_no_connection_has_is_dropped() {
    for (protocol, gso_size, reason) in [
        (Protocol::Tcp, 495, DropReason::GsoBomb),
        (Protocol::Udp, 255, DropReason::GsoBomb),
        (Protocol::Icmp, 1000, DropReason::Malformed),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(protocol));
        let frame = Frame {
            payload: vec![3; 3000],
            ..Frame::tx(protocol)
        };
        let run = datapath.run_gso(EGRESS, &frame.bytes(), gso_size);
        assert_eq!(run.action, SHOT);
        let headers = if protocol == Protocol::Tcp { 40 } else { 28 };
        let packets = 3000u64.div_ceil(gso_size.into());
        let counter = datapath.drops.get(ROW).get(reason);
        assert_eq!(counter.packets, packets);
        assert_eq!(counter.bytes, 3000 + packets * headers);
        let run = datapath.run_gso(EGRESS, &frame.bytes(), gso_size + 1);
        assert_eq!(run.action == REDIRECT, protocol != Protocol::Icmp);
    }
    // Segments are made of the frame: bytes after the packet would become some.
    let datapath = loaded!();
    let mut frame = Frame {
        payload: vec![3; 3000],
        ..Frame::tx(Protocol::Tcp)
    }
    .bytes();
    frame[16..18].copy_from_slice(&100u16.to_be_bytes());
    assert_eq!(datapath.run_gso(EGRESS, &frame, 1400).action, SHOT);
    assert_ne!(datapath.drops.get(ROW).malformed.packets, 0);
}
