//! IPv6 packets of the world that are no flow's: errors about flows go to the engine, the rest is the
//! host's.
use std::net::Ipv6Addr;

use slipgate_abi::{Handover, Protocol, portframe::PortFlags};

use crate::{datapath::*, flow6::*, frame6::*, loaded};

const INGRESS: &str = "uplink_ingress";

/// An ICMPv6 error about a packet.
fn error(kind: u8, quoted: &Frame6) -> Frame6 {
    let quote = &quoted.bytes()[14..];
    Frame6 {
        source: Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 1),
        l4: l4_of(Protocol::Icmpv6, kind, (0, 0), 0, quote),
        ..Frame6::rx(Protocol::Icmpv6)
    }
}

#[test]
fn errors_about_a_flow_go_to_the_engine() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
        for kind in 1..=4 {
            for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
                let mut datapath = loaded!();
                datapath.admit6(flow6(protocol));
                let frame = error(kind, &Frame6::tx(protocol).sent_on()).bytes();
                let run = datapath.run(program, &frame[14 - l2..]);
                assert_eq!(run.action, REDIRECT, "{protocol:?} {kind}");
                let (header, rest) = crate::frame::handed(&run.frame);
                assert_eq!(header.code, Handover::Icmp as u8);
                assert_eq!(header.flags, PortFlags::FROM_UPLINK);
                assert_eq!(rest, &frame[12..], "{program} {protocol:?} {kind}");
            }
        }
    }
}

#[test]
fn what_is_no_flow_s_is_the_hosts() {
    let udp = Protocol::Udp;
    let to_another_port = Frame6 {
        l4: l4_of(udp, 0, (443, 61_002), 0, b"data"),
        ..Frame6::rx(udp)
    };
    let neighbour = |kind| Frame6 {
        hop_limit: 255,
        l4: l4_of(Protocol::Icmpv6, kind, (0, 0), 0, &[0; 24]),
        ..Frame6::rx(Protocol::Icmpv6)
    };
    let of_ipv4s_icmp = Frame6 {
        next_header: 1,
        ..Frame6::tx(udp).sent_on()
    };
    let mut frames = vec![
        to_another_port,
        error(1, &Frame6::tx(Protocol::Tcp).sent_on()),
        error(1, &of_ipv4s_icmp),
        error(5, &Frame6::tx(udp).sent_on()),
        Frame6 {
            next_header: 44,
            ..Frame6::rx(udp)
        },
        Frame6 {
            destination_mac: ROUTER_MAC,
            ..Frame6::rx(udp)
        },
    ];
    frames.extend((133..=137).chain([128]).map(neighbour));
    for frame in frames {
        let mut datapath = loaded!();
        datapath.admit6(flow6(udp));
        datapath.expect_unnoticed(INGRESS, &frame.bytes());
    }
}

/// Of another uplink's network, a packet with a flow's tuple is nobody's.
#[test]
fn a_flow_s_packets_come_by_its_uplink() {
    let mut datapath = loaded!();
    datapath.admit6(flow6(Protocol::Udp));
    datapath.slots.change(9, |slot| slot.uplink_ifindex = 77);
    let frame = Frame6::rx(Protocol::Udp).bytes();
    datapath.expect_drop(INGRESS, &frame, ROW, slipgate_abi::DropReason::NoFlow);
    let quoted = error(1, &Frame6::tx(Protocol::Udp).sent_on()).bytes();
    datapath.expect_unnoticed(INGRESS, &quoted);
}
