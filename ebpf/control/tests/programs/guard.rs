//! Tests of the XDP program on the uplink.
use std::net::{Ipv4Addr, Ipv6Addr};

use slipgate_abi::{DropReason, Protocol, vm::VmFlags};

use crate::{datapath::*, flow6::*, frame::*, frame6::*, loaded};

#[test]
fn honest_frames_pass() {
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.flags = VmFlags::CHECK_MAC);
    for frame in [
        Frame::tx(Protocol::Tcp).bytes(),
        Frame {
            source: Ipv4Addr::UNSPECIFIED,
            ..Frame::tx(Protocol::Udp)
        }
        .bytes(),
        arp(1, GUEST, GATEWAY),
        // Left to guest_egress, which counts it.
        Frame::tx(Protocol::Tcp).bytes()[..20].to_vec(),
    ] {
        assert!(datapath.guard(&frame), "{frame:02x?}");
    }
    assert_eq!(datapath.tally(), 0);
}

#[test]
fn tagged_and_spoofed_are_dropped() {
    let mut tagged = Frame::tx(Protocol::Tcp).bytes();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    let cases = [
        (DropReason::Tagged, tagged),
        (
            DropReason::Spoofed,
            Frame {
                source: NAT,
                ..Frame::tx(Protocol::Tcp)
            }
            .bytes(),
        ),
        (
            DropReason::Spoofed,
            Frame {
                source_mac: ROUTER_MAC,
                ..Frame::tx(Protocol::Tcp)
            }
            .bytes(),
        ),
    ];
    let by_mac = [None, None, Some(ROUTER_MAC)];
    for ((reason, frame), foreign) in cases.into_iter().zip(by_mac) {
        let datapath = loaded!();
        datapath.vms.change(ROW, |vm| vm.flags = VmFlags::CHECK_MAC);
        assert!(!datapath.guard(&frame));
        assert_eq!(datapath.only_drop(ROW), reason);
        let bytes = datapath.drops.get(ROW).get(reason).bytes;
        assert_eq!(bytes, frame.len() as u64 - 14);
        assert_eq!(datapath.vms.get(ROW).mac_mismatch(), foreign);
    }
}

#[test]
fn denied_destinations_pass_at_the_rate_that_is_answered() {
    let mut datapath = loaded!();
    datapath.deny(24, Ipv4Addr::new(8, 0, 8, 0));
    let frame = Frame::tx(Protocol::Tcp).bytes();
    let started = std::time::Instant::now();
    let passed = (0..1_000).filter(|_| datapath.guard(&frame)).count() as u64;
    let denied = datapath.drops.get(ROW).denied.packets;
    assert_eq!(passed + denied, 1_000);
    // 64 in a window of 100 ms, of which several may begin meanwhile. The clock is a coarse one.
    let windows = started.elapsed().as_millis() as u64 / 90 + 2;
    assert!(
        (64..=64 * windows).contains(&passed),
        "{passed} in {windows} windows"
    );
    assert!(denied > 0, "{passed}");
    let elsewhere = Frame {
        destination: Ipv4Addr::new(8, 0, 9, 8),
        ..Frame::tx(Protocol::Tcp)
    };
    assert!(datapath.guard(&elsewhere.bytes()));
    // Another policy's list does not concern this VM.
    datapath.vms.change(ROW, |vm| vm.policy = 7);
    assert!((0..100).all(|_| datapath.guard(&frame)));
    // The next window.
    datapath.vms.change(ROW, |vm| vm.policy = 6);
    datapath.vms.change(ROW, |vm| vm.guard_passed = 64);
    std::thread::sleep(std::time::Duration::from_millis(120));
    assert!(datapath.guard(&frame));
    assert_eq!(datapath.vms.get(ROW).guard_passed, 1);
}

#[test]
fn services_and_admitted_flows_are_not_denied() {
    let mut datapath = loaded!();
    datapath.deny(0, Ipv4Addr::UNSPECIFIED);
    datapath.admit(Flow::new(Protocol::Tcp));
    let question = Frame {
        destination_port: 53,
        ..Frame::tx(Protocol::Udp)
    };
    let to_gateway = Frame {
        destination: GATEWAY,
        ..Frame::tx(Protocol::Tcp)
    };
    for frame in [Frame::tx(Protocol::Tcp), question, to_gateway] {
        assert!((0..200).all(|_| datapath.guard(&frame.bytes())));
    }
    assert_eq!(datapath.tally(), 0);
    // The same destination by another port is a new flow.
    let new = Frame {
        source_port: 40_001,
        ..Frame::tx(Protocol::Tcp)
    };
    assert!(!(0..1_000).all(|_| datapath.guard(&new.bytes())));
}

#[test]
fn denied_destinations_of_ipv6_pass_at_the_rate_that_is_answered() {
    let mut datapath = loaded!();
    datapath.deny6(48, Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 0));
    let frame = Frame6::tx(Protocol::Udp).bytes();
    let started = std::time::Instant::now();
    let passed = (0..1_000).filter(|_| datapath.guard(&frame)).count() as u64;
    let counted = datapath.drops.get(ROW).denied;
    assert_eq!(passed + counted.packets, 1_000);
    assert_eq!(counted.bytes, counted.packets * (frame.len() as u64 - 14));
    // One allowance for both families, as above.
    let windows = started.elapsed().as_millis() as u64 / 90 + 2;
    assert!(
        (64..=64 * windows).contains(&passed),
        "{passed} in {windows} windows"
    );
    assert!(counted.packets > 0, "{passed}");
    let elsewhere = Frame6 {
        destination: Ipv6Addr::new(0x2001, 0xdb8, 0x86de, 0, 0, 0, 0, 0x53),
        ..Frame6::tx(Protocol::Udp)
    };
    assert!((0..100).all(|_| datapath.guard(&elsewhere.bytes())));
    // Another policy's list does not concern this VM.
    datapath.vms.change(ROW, |vm| vm.policy = 7);
    assert!((0..100).all(|_| datapath.guard(&frame)));
}

#[test]
fn services_links_and_admitted_flows_of_ipv6_are_not_denied() {
    let mut datapath = loaded!();
    datapath.deny6(0, Ipv6Addr::UNSPECIFIED);
    datapath.admit6(flow6(Protocol::Tcp));
    let to = |destination| Frame6 {
        destination,
        ..Frame6::tx(Protocol::Udp)
    };
    let question = Frame6 {
        l4: l4_of(Protocol::Udp, 0, (40_000, 53), 0, b"?"),
        ..Frame6::tx(Protocol::Udp)
    };
    let fragment = Frame6 {
        next_header: 44,
        l4: fragment_of(Protocol::Udp as u8, 1, 7, &[0; 16]),
        ..Frame6::tx(Protocol::Udp)
    };
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
    let own = [
        to(GATEWAY6),
        to(GATEWAY_LOCAL),
        to(group),
        question,
        fragment,
    ];
    for frame in own.into_iter().chain([Frame6::tx(Protocol::Tcp)]) {
        assert!(
            (0..200).all(|_| datapath.guard(&frame.bytes())),
            "{frame:?}"
        );
    }
    assert_eq!(datapath.tally(), 0);
    // The same destination by another port is a new flow, and a ping one by its id.
    let ports = (40_001, 443);
    for (protocol, kind) in [(Protocol::Tcp, 0), (Protocol::Icmpv6, 128)] {
        let new = Frame6 {
            l4: l4_of(protocol, kind, ports, 0x10, b"new"),
            ..Frame6::tx(protocol)
        };
        assert!(!(0..1_000).all(|_| datapath.guard(&new.bytes())), "{new:?}");
    }
}

#[test]
fn ipv6_of_nobodys_address_is_dropped_and_what_a_guest_may_send_passes() {
    let from = |source| Frame6 {
        source,
        ..Frame6::tx(Protocol::Udp)
    };
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.flags = VmFlags::CHECK_MAC);
    // An address that is not bound yet is the engine's to decide about.
    for source in [GUEST6, GUEST_LOCAL, UNBOUND, Ipv6Addr::UNSPECIFIED] {
        assert!(datapath.guard(&from(source).bytes()), "{source}");
    }
    assert!(
        datapath.guard(&from(GUEST6).bytes()[..40]),
        "left to guest_egress"
    );
    assert_eq!(datapath.tally(), 0);
    let spoofed = [REMOTE6, GATEWAY6, GATEWAY_LOCAL, Ipv6Addr::LOCALHOST];
    for (at, source) in spoofed.into_iter().enumerate() {
        let frame = from(source).bytes();
        assert!(!datapath.guard(&frame), "{source}");
        let counted = datapath.drops.get(ROW).get(DropReason::Spoofed);
        assert_eq!(counted.packets, at as u64 + 1);
    }
}

#[test]
fn ipv6_of_a_vm_without_it_is_dropped_for_the_reason_of_guest_egress() {
    let unicast = Frame6::tx(Protocol::Udp);
    let group = Frame6 {
        destination_mac: [0x33, 0x33, 0, 0, 0, 1],
        ..Frame6::tx(Protocol::Udp)
    };
    for (frame, reason) in [(unicast, DropReason::Ipv6), (group, DropReason::Group)] {
        let datapath = loaded!();
        datapath.vms6.change(ROW, |row| row.flags = 0);
        assert!(!datapath.guard(&frame.bytes()));
        assert_eq!(datapath.only_drop(ROW), reason);
    }
}
