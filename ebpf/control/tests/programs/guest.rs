//! What a guest may not send, and what goes to the engine.
use std::net::Ipv4Addr;

use slipgate_abi::{
    DropReason, Handover, Protocol, Verdict,
    portframe::PortFlags,
    tcp::{Flags, TcpBits},
    vm::VmFlags,
};

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
            "first fragment",
            DropReason::Fragment,
            Frame {
                fragment: 0x2000,
                ..tcp()
            }
            .bytes(),
        ),
        (
            "last fragment",
            DropReason::Fragment,
            Frame {
                fragment: 0x0009,
                ..tcp()
            }
            .bytes(),
        ),
        ("options", DropReason::IpOptions, raw(&|b| b[14] = 0x46)),
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
        if action == SHOT {
            assert_eq!(datapath.only_drop(ROW), DropReason::Spoofed);
        }
        let right = Frame::tx(Protocol::Udp).bytes();
        assert_eq!(datapath.run(EGRESS, &right).action, REDIRECT);
    }
}

#[test]
fn frozen_drops_both_ways() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.vms.change(ROW, |vm| vm.flags = VmFlags::FROZEN);
    datapath.expect_drop(
        EGRESS,
        &Frame::tx(Protocol::Udp).bytes(),
        ROW,
        DropReason::Frozen,
    );
    let run = datapath.run("uplink_ingress", &Frame::rx(Protocol::Udp).bytes());
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.drops.get(ROW).frozen.packets, 2);
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
fn verdicts() {
    for (verdict, why) in [
        (Verdict::Free, Some(Handover::Miss)),
        (Verdict::Engine, Some(Handover::Verdict)),
        (Verdict::Closing, Some(Handover::Verdict)),
        (Verdict::Drop, None),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            verdict,
            ..Flow::new(Protocol::Tcp)
        });
        let frame = Frame::tx(Protocol::Tcp).bytes();
        match why {
            Some(why) => datapath.expect_handover(EGRESS, &frame, why, 0),
            None => datapath.expect_drop(EGRESS, &frame, ROW, DropReason::Denied),
        }
    }
}

#[test]
fn a_syn_is_fast_only_as_its_openers_retransmission() {
    let syn = |sequence| Frame {
        tcp_flags: Flags::SYN,
        sequence,
        ..Frame::tx(Protocol::Tcp)
    };
    let inbound = slipgate_abi::slot::SlotFlags::INBOUND;
    let both = TcpBits::SYN_TX | TcpBits::SYN_RX;
    for (what, tcp, flags, sequence, fast) in [
        ("first", 0, 0, ISN, true),
        ("again", TcpBits::SYN_TX, 0, ISN, true),
        ("another ISN", TcpBits::SYN_TX, 0, ISN + 1, false),
        ("established", both, 0, ISN, false),
        ("after a reset", both | TcpBits::RST, 0, ISN, false),
        ("opened by the world", TcpBits::SYN_RX, inbound, ISN, false),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            tcp,
            flags,
            ..Flow::new(Protocol::Tcp)
        });
        println!("{what}");
        let frame = syn(sequence).bytes();
        if fast {
            assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
            assert_eq!(datapath.slots.get(9).tx_packets, 1);
        } else {
            datapath.expect_handover(EGRESS, &frame, Handover::Syn, 0);
        }
    }
    // The answer to an opener from the world.
    let mut datapath = loaded!();
    datapath.admit(Flow {
        tcp: TcpBits::SYN_RX,
        flags: inbound,
        ..Flow::new(Protocol::Tcp)
    });
    let answer = Frame {
        tcp_flags: Flags::SYN | Flags::ACK,
        ..syn(5)
    };
    assert_eq!(datapath.run(EGRESS, &answer.bytes()).action, REDIRECT);
    assert_eq!(datapath.slots.get(9).tcp, both);
}

#[test]
fn segments_are_noted_and_a_reset_is_taken_back() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Tcp));
    let bits = || TcpBits(slipgate_abi::cell::load32(slot.tcp())).0;
    let both = TcpBits::SYN_TX | TcpBits::SYN_RX;
    let send = |rx: bool, tcp_flags| {
        let (program, frame) = if rx {
            ("uplink_ingress", Frame::rx(Protocol::Tcp))
        } else {
            (EGRESS, Frame::tx(Protocol::Tcp))
        };
        let frame = Frame { tcp_flags, ..frame };
        assert_eq!(datapath.run(program, &frame.bytes()).action, REDIRECT);
    };
    send(true, Flags::RST);
    assert_eq!(bits(), both | TcpBits::RST);
    send(false, Flags::ACK);
    assert_eq!(bits(), both);
    send(true, Flags::FIN | Flags::ACK);
    send(false, Flags::FIN | Flags::ACK);
    send(true, Flags::ACK);
    let closed = TcpBits::FIN_TX | TcpBits::FIN_RX | TcpBits::PEER_CLOSED_FIRST | TcpBits::LAST_ACK;
    assert_eq!(bits(), both | closed);
}

#[test]
fn ttl_and_mtu_are_looked_at_before_anything_is_changed() {
    for ttl in [0, 1] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        let frame = Frame {
            ttl,
            ..Frame::tx(Protocol::Udp)
        };
        datapath.expect_handover(EGRESS, &frame.bytes(), Handover::TtlExpired, 0);
    }
    for (l3_len, fits) in [(1400, true), (1401, false)] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        datapath.hops.change(HOP, |hop| hop.mtu = 1400);
        let frame = Frame {
            payload: vec![7; l3_len - 28],
            ..Frame::tx(Protocol::Udp)
        };
        if fits {
            assert_eq!(datapath.run(EGRESS, &frame.bytes()).action, REDIRECT);
        } else {
            datapath.expect_handover(EGRESS, &frame.bytes(), Handover::TooBig, 0);
        }
    }
}

#[test]
fn without_a_valid_next_hop_the_devices_mtu_counts() {
    // Loopback's is 65,536, so nothing is too big, and the MACs stay for the kernel to write.
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.hops.change(HOP, |hop| {
        hop.valid = 0;
        hop.mtu = 40;
    });
    let run = datapath.run(EGRESS, &Frame::tx(Protocol::Udp).bytes());
    assert_eq!(run.action, REDIRECT);
    assert_eq!(run.frame[..6], GATEWAY_MAC);
    assert_eq!(datapath.slots.get(9).tx_packets, 1);
    // A device that is gone.
    datapath
        .slots
        .change(9, |slot| slot.uplink_ifindex = 0x7fff_0000);
    let run = datapath.run(EGRESS, &Frame::tx(Protocol::Udp).bytes());
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.only_drop(ROW), DropReason::KernelRefused);
    assert_eq!(datapath.slots.get(9).tx_packets, 1);
}

#[test]
fn gso_frames_count_as_their_segments() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Tcp));
    let frame = Frame {
        payload: vec![3; 3000],
        ..Frame::tx(Protocol::Tcp)
    };
    // Whole it is larger than the link; its segments are not.
    let run = datapath.run_gso(EGRESS, &frame.bytes(), 1400);
    assert_eq!(run.action, REDIRECT);
    assert_eq!(slipgate_abi::cell::load64(slot.tx_packets()), 3);
    assert_eq!(slipgate_abi::cell::load64(slot.tx_bytes()), 3000 + 3 * 40);
    let run = datapath.run_gso(EGRESS, &frame.bytes(), 1461);
    assert_eq!(handed(&run.frame).0.code, Handover::TooBig as u8);
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
    datapath.vms.change(ROW, |vm| vm.taken_in = 12);
    assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
    // No port: nowhere to go.
    datapath.vms.change(ROW, |vm| vm.port_ifindex = 0);
    assert_eq!(datapath.run(EGRESS, &frame).action, SHOT);
    assert_eq!(datapath.drops.get(ROW).engine_busy.packets, 1);
    assert_eq!(datapath.handed_over(), 13);
}

#[test]
fn arp_for_the_gateway_is_answered_in_place() {
    for sender in [GUEST, Ipv4Addr::UNSPECIFIED] {
        let datapath = loaded!();
        datapath.vms.change(ROW, |vm| vm.credits = 0);
        let run = datapath.run(EGRESS, &arp(1, sender, GATEWAY));
        assert_eq!(run.action, REDIRECT);
        let mut expected = Vec::from(GUEST_MAC);
        expected.extend(GATEWAY_MAC);
        expected.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        expected.extend(GATEWAY_MAC);
        expected.extend(GATEWAY.octets());
        expected.extend(GUEST_MAC);
        expected.extend(sender.octets());
        assert_eq!(run.frame, expected);
        assert_eq!(datapath.vms.get(ROW).arp_answered, 1);
        assert_eq!(datapath.tally(), 1);
    }
}

#[test]
fn other_arp_goes_to_the_engine_or_is_dropped() {
    let other = Ipv4Addr::new(10, 0, 2, 3);
    for frame in [
        arp(1, GUEST, other),
        arp(2, GUEST, GATEWAY),
        arp(1, GUEST, GUEST),
    ] {
        let datapath = loaded!();
        datapath.expect_handover(EGRESS, &frame, Handover::Arp, PortFlags::GROUP);
    }
    let datapath = loaded!();
    datapath.expect_drop(EGRESS, &arp(1, other, GATEWAY), ROW, DropReason::Spoofed);
    for (at, reason) in [
        (15, DropReason::Malformed),
        (16, DropReason::Malformed),
        (18, DropReason::Malformed),
    ] {
        let datapath = loaded!();
        let mut frame = arp(1, GUEST, GATEWAY);
        frame[at] ^= 1;
        datapath.expect_drop(EGRESS, &frame, ROW, reason);
    }
    let datapath = loaded!();
    let short = &arp(1, GUEST, GATEWAY)[..41];
    datapath.expect_drop(EGRESS, short, ROW, DropReason::Malformed);
    // A sender MAC that is not the guest's would poison a cache.
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.flags = VmFlags::CHECK_MAC);
    let mut frame = arp(1, GUEST, GATEWAY);
    frame[22] ^= 1;
    datapath.expect_drop(EGRESS, &frame, ROW, DropReason::Spoofed);
}
