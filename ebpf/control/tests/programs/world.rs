//! Packets from the world: translated, handed over, or left to the host.
use std::net::Ipv4Addr;

use slipgate_abi::{
    Command, DropReason, Handover, Protocol, Verdict,
    portframe::PortFlags,
    slot::SlotFlags,
    tcp::{Flags, TcpBits},
    vm::VmFlags,
};

use crate::{datapath::*, devices::*, frame::*, loaded, test_name};

const INGRESS: &str = "uplink_ingress";
const UP: u8 = PortFlags::FROM_UPLINK;

#[test]
fn what_is_not_ours_passes_unnoticed() {
    let rx = || Frame::rx(Protocol::Udp);
    let raw = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = rx().bytes();
        change(&mut bytes);
        bytes
    };
    let frames = [
        (
            "another port",
            Frame {
                destination_port: 9,
                ..rx()
            }
            .bytes(),
        ),
        (
            "another peer",
            Frame {
                source_port: 9,
                ..rx()
            }
            .bytes(),
        ),
        (
            "another address",
            Frame {
                destination: GUEST,
                ..rx()
            }
            .bytes(),
        ),
        ("TCP", Frame::rx(Protocol::Tcp).bytes()),
        (
            "SYN",
            Frame {
                tcp_flags: Flags::SYN,
                ..Frame::rx(Protocol::Tcp)
            }
            .bytes(),
        ),
        (
            "ping",
            Frame {
                icmp_type: 8,
                ..Frame::rx(Protocol::Icmp)
            }
            .bytes(),
        ),
        ("pong", Frame::rx(Protocol::Icmp).bytes()),
        (
            "redirect",
            Frame {
                icmp_type: 5,
                ..Frame::rx(Protocol::Icmp)
            }
            .bytes(),
        ),
        (
            "another port's fragment",
            Frame {
                fragment: 0x2000,
                source_port: 9,
                ..rx()
            }
            .bytes(),
        ),
        (
            "GRE",
            Frame {
                protocol: 47,
                ..rx()
            }
            .bytes(),
        ),
        ("options", raw(&|b| b[14] = 0x46)),
        ("malformed", raw(&|b| b[17] += 40)),
        ("cut", raw(&|b| b.truncate(40))),
        ("ARP", raw(&|b| b[13] = 6)),
        ("802.1Q", raw(&|b| b[12] = 0x81)),
        ("IPv6", raw(&|b| b[12..14].copy_from_slice(&[0x86, 0xdd]))),
        (
            "another MAC",
            Frame {
                destination_mac: ROUTER_MAC,
                ..rx()
            }
            .bytes(),
        ),
        (
            "broadcast",
            Frame {
                destination_mac: [0xff; 6],
                ..rx()
            }
            .bytes(),
        ),
    ];
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    for (what, frame) in frames {
        println!("{what}");
        datapath.expect_unnoticed(INGRESS, &frame);
    }
}

#[test]
fn verdicts() {
    for (verdict, why) in [
        (Verdict::Engine, Some(Handover::Verdict)),
        (Verdict::Closing, Some(Handover::Verdict)),
        (Verdict::Drop, None),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            verdict,
            ..Flow::new(Protocol::Tcp)
        });
        let frame = Frame::rx(Protocol::Tcp).bytes();
        match why {
            Some(why) => datapath.expect_handover(INGRESS, &frame, why, UP),
            None => datapath.expect_drop(INGRESS, &frame, ROW, DropReason::Denied),
        }
    }
    let mut datapath = loaded!();
    datapath.admit(Flow {
        verdict: Verdict::Free,
        ..Flow::new(Protocol::Tcp)
    });
    datapath.expect_unnoticed(INGRESS, &Frame::rx(Protocol::Tcp).bytes());
}

/// Whatever their verdict but `Drop`, and though the TAP may be away.
#[test]
fn packets_for_a_vm_that_sleeps_are_handed_over() {
    for verdict in [Verdict::Fast, Verdict::Engine, Verdict::Closing] {
        for tap in [TAP, 0] {
            let mut datapath = loaded!();
            datapath.admit(Flow {
                verdict,
                ..Flow::new(Protocol::Tcp)
            });
            datapath.vms.change(ROW, |vm| {
                vm.flags |= VmFlags::ASLEEP;
                vm.tap_ifindex = tap;
            });
            let frame = Frame::rx(Protocol::Tcp).bytes();
            datapath.expect_handover(INGRESS, &frame, Handover::Asleep, UP);
        }
    }
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Tcp));
    datapath
        .vms
        .change(ROW, |vm| vm.flags |= VmFlags::ASLEEP | VmFlags::FROZEN);
    let frame = Frame::rx(Protocol::Tcp).bytes();
    datapath.expect_drop(INGRESS, &frame, ROW, DropReason::Frozen);
}

#[test]
fn a_syn_is_fast_only_as_its_openers_retransmission() {
    let both = TcpBits::SYN_TX | TcpBits::SYN_RX;
    for (tcp, flags, sequence, fast) in [
        (TcpBits::SYN_RX, SlotFlags::INBOUND, ISN, true),
        (0, SlotFlags::INBOUND, ISN, true),
        (TcpBits::SYN_RX, SlotFlags::INBOUND, ISN + 1, false),
        (both, SlotFlags::INBOUND, ISN, false),
        (TcpBits::SYN_TX, 0, ISN, false),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            tcp,
            flags,
            ..Flow::new(Protocol::Tcp)
        });
        let frame = Frame {
            tcp_flags: Flags::SYN,
            sequence,
            ..Frame::rx(Protocol::Tcp)
        }
        .bytes();
        if fast {
            assert_eq!(datapath.run(INGRESS, &frame).action, REDIRECT);
        } else {
            datapath.expect_handover(INGRESS, &frame, Handover::Syn, UP);
        }
    }
}

#[test]
fn ttl_and_the_taps_mtu() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    let frame = Frame {
        ttl: 1,
        ..Frame::rx(Protocol::Udp)
    };
    datapath.expect_handover(INGRESS, &frame.bytes(), Handover::TtlExpired, UP);

    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.vms.change(ROW, |vm| vm.mtu = 1000);
    let frame = |l3_len: usize| Frame {
        payload: vec![1; l3_len - 28],
        ..Frame::rx(Protocol::Udp)
    };
    assert_eq!(datapath.run(INGRESS, &frame(1000).bytes()).action, REDIRECT);
    datapath.expect_handover(INGRESS, &frame(1001).bytes(), Handover::TooBig, UP);
    // Segments of a frame are looked at one by one, and counted so.
    let run = datapath.run_gso(INGRESS, &frame(2828).bytes(), 900);
    assert_eq!(run.action, REDIRECT);
    let slot = datapath.slots.get(9);
    assert_eq!(
        (slot.rx_packets, slot.rx_bytes),
        (1 + 4, 1000 + 2800 + 4 * 28)
    );
}

#[test]
fn a_flow_whose_vm_is_gone_is_dropped() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.vms.change(ROW, |vm| vm.id = VM + 1);
    datapath.expect_drop(
        INGRESS,
        &Frame::rx(Protocol::Udp).bytes(),
        0,
        DropReason::StaleVm,
    );
}

#[test]
fn a_vm_whose_tap_is_away_loses_by_name() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.vms.change(ROW, |vm| vm.tap_ifindex = 0);
    let frame = Frame::rx(Protocol::Udp);
    datapath.expect_drop(INGRESS, &frame.bytes(), ROW, DropReason::StaleVm);
    assert_eq!(datapath.slots.get(9).rx_packets, 0);
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.tap_ifindex = 0);
    let frame = command(Command::ToGuest, VM, &frame);
    datapath.expect_drop("engine_port", &frame, ROW, DropReason::StaleVm);
    // As it is with its TAP.
    datapath.vms.change(ROW, |vm| vm.tap_ifindex = TAP);
    assert_eq!(datapath.run("engine_port", &frame).action, REDIRECT);
}

/// The host holds the forward's port by a socket of its own, which must not answer before the
/// engine has opened the flow.
#[test]
fn a_flow_being_opened_leaves_its_packets_to_the_forward() {
    let mut datapath = loaded!();
    datapath.admit(Flow {
        verdict: Verdict::Free,
        flags: SlotFlags::INBOUND,
        nat_port: 8080,
        ..Flow::new(Protocol::Tcp)
    });
    datapath.forward((NAT, 8080, Protocol::Tcp), (VM, 80));
    let frame = Frame {
        destination_port: 8080,
        tcp_flags: Flags::SYN,
        sequence: ISN,
        ..Frame::rx(Protocol::Tcp)
    };
    datapath.expect_handover(INGRESS, &frame.bytes(), Handover::Forward, UP);
}

/// A host that is a router gets packets by its MAC that are another's.
#[test]
fn a_forward_of_any_address_takes_the_hosts_own_only() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        ip("addr add 192.0.2.9/24 dev world0");
        ip("route add 198.51.100.0/24 dev guest0");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("route");
        bed.datapath
            .forward((Ipv4Addr::UNSPECIFIED, 8080, Protocol::Udp), (VM, 80));
        let ours = Frame {
            destination_port: 8080,
            ..from_world(Protocol::Udp)
        };
        bed.world.send(Vnet::default(), &ours.bytes());
        let (_, frame) = bed.port.receive();
        assert_eq!(handed(&frame).0.code, Handover::Forward as u8);
        let routed = Frame {
            destination: Ipv4Addr::new(198, 51, 100, 7),
            ..ours
        };
        bed.world.send(Vnet::default(), &routed.bytes());
        // The host asks for its next hop.
        let (_, frame) = bed.guest.receive();
        assert_eq!(frame[12..14], [8, 6]);
        assert_eq!(bed.port.poll(), None);
    });
}

#[test]
fn padding_is_not_counted() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    let mut frame = Frame {
        payload: vec![1, 2],
        ..Frame::rx(Protocol::Udp)
    }
    .bytes();
    frame.resize(60, 0);
    assert_eq!(datapath.run(INGRESS, &frame).action, REDIRECT);
    assert_eq!(datapath.slots.get(9).rx_bytes, 30);
}

#[test]
fn forwards_go_to_their_vm() {
    for (host, protocol, flags, hit) in [
        (NAT, Protocol::Tcp, Flags::SYN, true),
        (
            Ipv4Addr::new(192, 0, 2, 10),
            Protocol::Tcp,
            Flags::SYN,
            false,
        ),
        (NAT, Protocol::Tcp, Flags::ACK, false),
        (NAT, Protocol::Udp, 0, true),
    ] {
        let mut datapath = loaded!();
        datapath.forward((host, 8080, protocol), (VM, 80));
        let frame = Frame {
            destination_port: 8080,
            tcp_flags: flags,
            ..Frame::rx(protocol)
        };
        if hit {
            datapath.expect_handover(INGRESS, &frame.bytes(), Handover::Forward, UP);
        } else {
            datapath.expect_unnoticed(INGRESS, &frame.bytes());
        }
    }
    let mut datapath = loaded!();
    datapath.forward((NAT, 8080, Protocol::Udp), (VM + 1, 80));
    let frame = Frame {
        destination_port: 8080,
        ..Frame::rx(Protocol::Udp)
    };
    datapath.expect_drop(INGRESS, &frame.bytes(), 0, DropReason::StaleVm);
}

/// Any neighbour on the link may send to loopback with the host's MAC. The host drops such packets,
/// but only after the programs.
#[test]
fn loopback_is_no_forwards_whatever_leads_there() {
    let loopback = Ipv4Addr::new(127, 0, 0, 1);
    for (protocol, host) in [
        (Protocol::Tcp, loopback),
        (Protocol::Udp, loopback),
        (Protocol::Tcp, Ipv4Addr::UNSPECIFIED),
        (Protocol::Udp, Ipv4Addr::UNSPECIFIED),
    ] {
        let mut datapath = loaded!();
        datapath.forward((host, 8080, protocol), (VM, 80));
        let frame = Frame {
            destination: loopback,
            destination_port: 8080,
            tcp_flags: Flags::SYN,
            ..Frame::rx(protocol)
        };
        datapath.expect_unnoticed(INGRESS, &frame.bytes());
    }
}

#[test]
fn icmp_errors_about_our_packets_go_to_the_engine() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
        let flow = Flow::new(protocol);
        let quoted = Frame {
            source: NAT,
            source_port: flow.nat_port,
            ..Frame::tx(protocol)
        };
        for icmp_type in [3, 11, 12] {
            let mut datapath = loaded!();
            datapath.admit(flow);
            let error = icmp_error(icmp_type, &quoted).bytes();
            datapath.expect_handover(INGRESS, &error, Handover::Icmp, UP);
        }
        let mut datapath = loaded!();
        datapath.admit(flow);
        let other = Frame {
            source_port: 9,
            ..quoted.clone()
        };
        datapath.expect_unnoticed(INGRESS, &icmp_error(3, &other).bytes());
        let mut cut = icmp_error(3, &quoted);
        cut.payload.truncate(27);
        datapath.expect_unnoticed(INGRESS, &cut.bytes());
        let fragment = Frame {
            fragment: 5,
            ..quoted.clone()
        };
        datapath.expect_unnoticed(INGRESS, &icmp_error(3, &fragment).bytes());
        // Source quench is long dead.
        datapath.expect_unnoticed(INGRESS, &icmp_error(4, &quoted).bytes());
    }
}

#[test]
fn handed_over_from_an_uplink_without_l2_it_gets_an_ethernet_header() {
    let mut datapath = loaded!();
    datapath.admit(Flow {
        verdict: Verdict::Engine,
        ..Flow::new(Protocol::Tcp)
    });
    let frame = Frame::rx(Protocol::Tcp).bytes();
    let run = datapath.run("uplink_ingress_l3", &frame[14..]);
    assert_eq!(run.action, REDIRECT);
    let (header, rest) = handed(&run.frame);
    assert_eq!((header.code, header.flags), (Handover::Verdict as u8, UP));
    assert_eq!(rest, &frame[12..]);
}

#[test]
fn packets_of_a_flow_that_arrive_by_another_uplink_are_dropped() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
        let mut datapath = loaded!();
        datapath.uplink = TAP + 1;
        datapath.admit(Flow::new(protocol));
        let rx = Frame::rx(protocol).bytes();
        datapath.expect_drop(INGRESS, &rx, ROW, DropReason::NoFlow);
        assert_eq!(datapath.slots.get(9).rx_packets, 0);
    }
}
