//! Between real devices: what a test run can't show. Partial checksums, GSO frames, tags, where a
//! redirect goes, and a guest that lies in its offload header.
use slipgate_abi::{Command, DropReason, Handover, PortHeader, Protocol, Verdict, cell};

use crate::{datapath::*, devices::*, frame::*, test_name};

const BOTH: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

fn sent_on(frame: &Frame) -> Frame {
    Frame {
        destination_mac: ROUTER_MAC,
        source_mac: UPLINK_MAC,
        source: NAT,
        source_port: 61_001,
        ttl: frame.ttl - 1,
        ..frame.clone()
    }
}

fn delivered(frame: &Frame) -> Frame {
    Frame {
        destination_mac: GUEST_MAC,
        source_mac: GATEWAY_MAC,
        destination: GUEST,
        destination_port: 40_000,
        ttl: frame.ttl - 1,
        ..frame.clone()
    }
}

fn from_world(protocol: Protocol) -> Frame {
    Frame {
        destination_mac: UPLINK_MAC,
        ..Frame::rx(protocol)
    }
}

#[test]
fn checksums_stay_right_full_and_partial_both_ways() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        for (slot, protocol) in [(1, Protocol::Tcp), (2, Protocol::Udp), (3, Protocol::Icmp)] {
            bed.datapath.admit(Flow {
                slot,
                ..Flow::new(protocol)
            });
        }
        // Odd and even lengths, and one that does not stay in the linear part.
        bed.datapath.hops.change(HOP, |hop| hop.mtu = 9_000);
        bed.datapath.vms.change(ROW, |vm| vm.mtu = 9_000);
        for len in [0, 1, 1400, 6001] {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
                let payload = vec![0xa5; len];
                let tx = Frame {
                    payload: payload.clone(),
                    ..Frame::tx(protocol)
                };
                let rx = Frame {
                    payload,
                    ..from_world(protocol)
                };
                let hint = Vnet {
                    hdr_len: 14,
                    ..Vnet::default()
                };
                bed.guest.send(hint, &tx.bytes());
                let (vnet, frame) = bed.world.receive();
                assert!(!vnet.needs_csum);
                assert_eq!(frame, sent_on(&tx).bytes(), "{protocol:?} {len}");
                bed.world.send(hint, &rx.bytes());
                let (vnet, frame) = bed.guest.receive();
                assert!(!vnet.needs_csum);
                assert_eq!(frame, delivered(&rx).bytes(), "{protocol:?} {len}");
            }
            for protocol in BOTH {
                let payload = vec![0xa5; len];
                let tx = Frame {
                    payload: payload.clone(),
                    ..Frame::tx(protocol)
                };
                let rx = Frame {
                    payload,
                    ..from_world(protocol)
                };
                let (vnet, bytes) = partial(&tx);
                bed.guest.send(vnet, &bytes);
                let (vnet, frame) = bed.world.receive();
                assert!(vnet.needs_csum, "{protocol:?} {len}");
                assert_eq!(
                    completed(vnet, frame),
                    sent_on(&tx).bytes(),
                    "{protocol:?} {len}"
                );
                let (vnet, bytes) = partial(&rx);
                bed.world.send(vnet, &bytes);
                let (vnet, frame) = bed.guest.receive();
                assert!(vnet.needs_csum, "{protocol:?} {len}");
                assert_eq!(
                    completed(vnet, frame),
                    delivered(&rx).bytes(),
                    "{protocol:?} {len}"
                );
            }
        }
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}

#[test]
fn a_port_that_stays_the_same_is_told_apart_from_a_partial_checksum() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        for (slot, protocol) in [(1, Protocol::Tcp), (2, Protocol::Udp), (3, Protocol::Icmp)] {
            // The second pair is the same number in one's complement.
            for (guest_port, nat_port) in [(61_001, 61_001), (0, 0xffff), (0xffff, 0)] {
                bed.datapath.admit(Flow {
                    slot: slot * 8 + u32::from(guest_port & 3),
                    guest_port,
                    nat_port,
                    ..Flow::new(protocol)
                });
                let tx = Frame {
                    source_port: guest_port,
                    ..Frame::tx(protocol)
                };
                let expected = Frame {
                    source_port: nat_port,
                    ..sent_on(&tx)
                };
                bed.guest.send(Vnet::default(), &tx.bytes());
                let (_, frame) = bed.world.receive();
                assert!(checksums_right(&frame));
                assert_eq!(frame, expected.bytes(), "{protocol:?} {guest_port}");
                if protocol != Protocol::Icmp {
                    let (vnet, bytes) = partial(&tx);
                    bed.guest.send(vnet, &bytes);
                    let (vnet, frame) = bed.world.receive();
                    let frame = completed(vnet, frame);
                    assert_eq!(frame, expected.bytes(), "{protocol:?} {guest_port}");
                }
                bed.datapath.forget(slot * 8 + u32::from(guest_port & 3));
            }
        }
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}

#[test]
fn a_udp_packet_without_checksum_stays_without() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Udp));
        let tx = Frame {
            udp_checksum: false,
            ..Frame::tx(Protocol::Udp)
        };
        bed.guest.send(Vnet::default(), &tx.bytes());
        assert_eq!(bed.world.receive().1, sent_on(&tx).bytes());
        let rx = Frame {
            udp_checksum: false,
            ..from_world(Protocol::Udp)
        };
        bed.world.send(Vnet::default(), &rx.bytes());
        assert_eq!(bed.guest.receive().1, delivered(&rx).bytes());
    });
}

#[test]
fn gso_frames_stay_whole_both_ways() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        for (slot, protocol, gso_type) in [
            (1, Protocol::Tcp, Vnet::TCPV4),
            (2, Protocol::Udp, Vnet::UDP_L4),
        ] {
            if protocol == Protocol::Udp && !bed.guest.uso {
                println!("skipped: UDP GSO: this kernel's TAPs do not take it");
                continue;
            }
            let flow = bed.datapath.admit(Flow {
                slot,
                ..Flow::new(protocol)
            });
            let headers = if protocol == Protocol::Tcp { 40 } else { 28 };
            let gso = |vnet| Vnet {
                gso_type,
                gso_size: 1400,
                // Less than is needed: the kernel must not rely on it, nor we.
                hdr_len: 14,
                ..vnet
            };
            let tx = Frame {
                payload: vec![0x5a; 40_000],
                ..Frame::tx(protocol)
            };
            let rx = Frame {
                payload: vec![0x5a; 40_001],
                ..from_world(protocol)
            };
            let (vnet, bytes) = partial(&tx);
            bed.guest.send(gso(vnet), &bytes);
            let (vnet, frame) = bed.world.receive();
            assert_eq!((vnet.gso_type, vnet.gso_size), (gso_type, 1400));
            assert!(vnet.needs_csum);
            assert_eq!(completed(vnet, frame), sent_on(&tx).bytes());
            let (vnet, bytes) = partial(&rx);
            bed.world.send(gso(vnet), &bytes);
            let (vnet, frame) = bed.guest.receive();
            assert_eq!((vnet.gso_type, vnet.gso_size), (gso_type, 1400));
            assert_eq!(completed(vnet, frame), delivered(&rx).bytes());
            assert_eq!(cell::load64(flow.tx_packets()), 29);
            assert_eq!(cell::load64(flow.tx_bytes()), 40_000 + 29 * headers);
            assert_eq!(cell::load64(flow.rx_packets()), 29);
            assert_eq!(cell::load64(flow.rx_bytes()), 40_001 + 29 * headers);
        }
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}

#[test]
fn a_checksum_placed_over_translated_headers_is_dropped() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        for (slot, protocol) in [(1, Protocol::Tcp), (2, Protocol::Udp), (3, Protocol::Icmp)] {
            bed.datapath.admit(Flow {
                slot,
                ..Flow::new(protocol)
            });
        }
        let mut dropped = 0;
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
            let field = match protocol {
                Protocol::Tcp => 34 + 16,
                Protocol::Udp => 34 + 6,
                Protocol::Icmp => 34 + 2,
            };
            // Both halves of both addresses, both ports, and just before the right place.
            for at in [26, 28, 30, 32, 34, 36, field - 2, field - 1] {
                for start in [20, 26] {
                    if at < start || (protocol == Protocol::Icmp && at == field) {
                        continue;
                    }
                    let lie = Vnet {
                        needs_csum: true,
                        csum_start: start,
                        csum_offset: at - start,
                        ..Vnet::default()
                    };
                    for udp_checksum in [true, false] {
                        let tx = Frame {
                            udp_checksum,
                            ..Frame::tx(protocol)
                        };
                        let what = format!("{protocol:?} {at} {start} {udp_checksum}");
                        bed.guest.send(lie, &tx.bytes());
                        assert_eq!(bed.world.poll(), None, "{what}");
                        dropped += 1;
                        let counted = bed.datapath.drops_of(ROW);
                        assert_eq!(bed.datapath.only_reason(ROW), DropReason::Malformed);
                        assert_eq!(counted[0].1.packets, dropped, "{what}");
                    }
                }
            }
        }
        for slot in 1..4 {
            assert_eq!(bed.datapath.slots.get(slot).tx_packets, 0);
        }
        // ICMP has no pseudo-header, so no driver leaves its checksum to the device.
        let vnet = Vnet {
            needs_csum: true,
            csum_start: 34,
            csum_offset: 2,
            ..Vnet::default()
        };
        bed.guest.send(vnet, &Frame::tx(Protocol::Icmp).bytes());
        assert_eq!(bed.world.poll(), None);
    });
}

#[test]
fn through_the_engine_a_frame_keeps_its_offloads() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow {
            verdict: Verdict::Engine,
            ..Flow::new(Protocol::Tcp)
        });
        let tx = Frame {
            payload: vec![9; 20_000],
            ..Frame::tx(Protocol::Tcp)
        };
        let rx = Frame {
            payload: vec![9; 20_000],
            ..from_world(Protocol::Tcp)
        };
        for (sent, from, to, what, expected) in [
            (&tx, &bed.guest, &bed.world, Command::Forward, sent_on(&tx)),
            (
                &rx,
                &bed.world,
                &bed.guest,
                Command::Deliver,
                delivered(&rx),
            ),
        ] {
            let (vnet, bytes) = partial(sent);
            let vnet = Vnet {
                gso_type: Vnet::TCPV4,
                gso_size: 1400,
                hdr_len: 54,
                ..vnet
            };
            from.send(vnet, &bytes);
            let (vnet, mut frame) = bed.port.receive();
            let (header, rest) = handed(&frame);
            assert_eq!((header.code, header.id), (Handover::Verdict as u8, VM));
            assert_eq!(rest, &bytes[12..]);
            assert_eq!((vnet.gso_type, vnet.gso_size), (Vnet::TCPV4, 1400));
            assert!(vnet.needs_csum);
            let header = PortHeader {
                code: what as u8,
                flags: 0,
                ..header
            };
            frame[..12].copy_from_slice(&header.encode());
            bed.port.send(vnet, &frame);
            let (vnet, frame) = to.receive();
            assert_eq!((vnet.gso_type, vnet.gso_size), (Vnet::TCPV4, 1400));
            assert_eq!(completed(vnet, frame), expected.bytes());
        }
        let slot = bed.datapath.slots.get(9);
        assert_eq!((slot.tx_packets, slot.rx_packets), (15, 15));
        assert_eq!(bed.datapath.handed_over(), 2);
    });
}

#[test]
fn commands_reach_their_device() {
    between_devices(test_name!(), Uplink::L2, |bed| {
        let frame = Frame::rx(Protocol::Udp);
        bed.port
            .send(Vnet::default(), &command(Command::ToGuest, VM, &frame));
        let (_, got) = bed.guest.receive();
        assert_eq!(got[..12], [GUEST_MAC, GATEWAY_MAC].concat());
        assert_eq!(got[12..], frame.bytes()[12..]);
        bed.port
            .send(Vnet::default(), &command(Command::Emit, HOP, &frame));
        let (_, got) = bed.world.receive();
        assert_eq!(got[..12], [ROUTER_MAC, UPLINK_MAC].concat());
        assert_eq!(got[12..], frame.bytes()[12..]);
        // ARP comes back where it was asked.
        bed.guest.send(Vnet::default(), &arp(1, GUEST, GATEWAY));
        let (_, got) = bed.guest.receive();
        assert_eq!(got[..6], GUEST_MAC);
        assert_eq!(got[20..22], [0, 2]);
    });
}

#[test]
fn tagged_frames_do_not_hop() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Udp));
        let tags: [&[u8]; 3] = [
            &[0x81, 0, 0, 5],
            &[0x88, 0xa8, 0, 5],
            &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6],
        ];
        for (packets, tag) in (1..).zip(tags) {
            let mut frame = Frame::tx(Protocol::Udp).bytes();
            frame.splice(12..12, tag.iter().copied());
            bed.guest.send(Vnet::default(), &frame);
            assert_eq!(bed.world.poll(), None);
            assert_eq!(bed.datapath.drops.get(ROW).tagged.packets, packets);
            // From the world they are another network's.
            let mut frame = from_world(Protocol::Udp).bytes();
            frame.splice(12..12, tag.iter().copied());
            bed.world.send(Vnet::default(), &frame);
            assert_eq!(bed.guest.poll(), None);
        }
        assert_eq!(bed.datapath.slots.get(9).rx_packets, 0);
        assert_eq!(bed.datapath.only_reason(ROW), DropReason::Tagged);
    });
}

#[test]
fn frames_cut_short_are_malformed() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Tcp));
        let frame = Frame::tx(Protocol::Tcp).bytes();
        let mut dropped = 0;
        for len in 14..frame.len() {
            if bed.guest.try_send(Vnet::default(), &frame[..len]).is_ok() {
                dropped += 1;
            }
            assert_eq!(bed.world.poll(), None, "{len}");
        }
        assert!(dropped > 40, "{dropped}");
        assert_eq!(bed.datapath.drops.get(ROW).malformed.packets, dropped);
        assert_eq!(bed.datapath.tally(), dropped);
    });
}

#[test]
fn without_a_valid_next_hop_the_kernel_finds_the_neighbour() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Udp));
        let uplink = bed.world.ifindex;
        bed.datapath
            .slots
            .change(9, |slot| slot.uplink_ifindex = uplink);
        bed.datapath.hops.change(HOP, |hop| hop.valid = 0);
        let [a, b, c, d, e, f] = ROUTER_MAC;
        ip("addr add 192.0.2.9/24 dev world0");
        ip(&format!(
            "neigh add 192.0.2.1 lladdr {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x} dev world0"
        ));
        ip("route add default via 192.0.2.1");
        let tx = Frame::tx(Protocol::Udp);
        bed.guest.send(Vnet::default(), &tx.bytes());
        assert_eq!(bed.world.receive().1, sent_on(&tx).bytes());
        // The device's MTU counts.
        let tx = Frame {
            payload: vec![1; 1473],
            ..tx
        };
        bed.guest.send(Vnet::default(), &tx.bytes());
        assert_eq!(bed.world.poll(), None);
        let (_, frame) = bed.port.receive();
        assert_eq!(handed(&frame).0.code, Handover::TooBig as u8);
        // So the engine emits.
        let frame = Frame::tx(Protocol::Udp);
        bed.port
            .send(Vnet::default(), &command(Command::Emit, HOP, &frame));
        let (_, got) = bed.world.receive();
        assert_eq!(got[..12], [ROUTER_MAC, UPLINK_MAC].concat());
    });
}

#[test]
fn an_uplink_without_l2_header() {
    between_devices(test_name!(), Uplink::L3, |mut bed| {
        bed.datapath.admit(Flow {
            slot: 1,
            ..Flow::new(Protocol::Tcp)
        });
        bed.datapath.admit(Flow {
            slot: 2,
            verdict: Verdict::Engine,
            ..Flow::new(Protocol::Udp)
        });
        let tx = Frame::tx(Protocol::Tcp);
        bed.guest.send(Vnet::default(), &tx.bytes());
        assert_eq!(bed.world.receive().1, sent_on(&tx).bytes()[14..]);
        let (vnet, bytes) = partial(&tx);
        bed.guest.send(vnet, &bytes);
        let (vnet, packet) = bed.world.receive();
        assert_eq!((vnet.needs_csum, vnet.csum_start), (true, 20));
        assert_eq!(completed(vnet, packet), sent_on(&tx).bytes()[14..]);

        let rx = Frame::rx(Protocol::Tcp);
        bed.world.send(Vnet::default(), &rx.bytes()[14..]);
        assert_eq!(bed.guest.receive().1, delivered(&rx).bytes());
        let (vnet, bytes) = partial(&rx);
        let vnet = Vnet {
            csum_start: 20,
            ..vnet
        };
        bed.world.send(vnet, &bytes[14..]);
        let (vnet, frame) = bed.guest.receive();
        assert_eq!((vnet.needs_csum, vnet.csum_start), (true, 34));
        assert_eq!(completed(vnet, frame), delivered(&rx).bytes());

        // Handed over, emitted, not ours.
        let rx = Frame::rx(Protocol::Udp);
        bed.world.send(Vnet::default(), &rx.bytes()[14..]);
        let (_, frame) = bed.port.receive();
        let (header, rest) = handed(&frame);
        assert_eq!(header.code, Handover::Verdict as u8);
        assert_eq!(rest, &rx.bytes()[12..]);
        bed.port
            .send(Vnet::default(), &command(Command::Emit, HOP, &tx));
        assert_eq!(bed.world.receive().1, tx.bytes()[14..]);
        let tally = bed.datapath.tally();
        let other = Frame {
            destination_port: 9,
            ..rx
        };
        bed.world.send(Vnet::default(), &other.bytes()[14..]);
        assert_eq!(bed.guest.poll(), None);
        assert_eq!(bed.datapath.tally(), tally);
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}
