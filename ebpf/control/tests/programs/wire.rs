//! Between real devices: checksums and GSO frames, which a test run can't show completely.
use slipgate_abi::{Command, Handover, PortHeader, Protocol, Verdict, cell};

use crate::{datapath::*, devices::*, frame::*, skipped::skipped, test_name};

const BOTH: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

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
                skipped(test_name!(), "UDP GSO: this kernel's TAPs do not take it");
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

/// The port's queue is all VMs': what one frame becomes in it, its VM pays for.
#[test]
fn a_frame_costs_as_many_credits_as_it_comes_out_as() {
    between_devices(test_name!(), Uplink::L2, |bed| {
        bed.datapath.vms.change(ROW, |vm| vm.credits = 512);
        let udp = Frame {
            payload: vec![7; 20_000],
            ..Frame::tx(Protocol::Udp)
        };
        let tcp = |payload_len| Frame {
            payload: vec![7; payload_len],
            ..Frame::tx(Protocol::Tcp)
        };
        let cases = [
            ("UFO", Vnet::UDP, 256, udp.clone(), Some((79, 79))),
            ("USO", Vnet::UDP_L4, 256, udp, Some((79, 1))),
            ("TSO", Vnet::TCPV4, 1448, tcp(60_000), Some((1, 1))),
            // The port would cut it.
            ("all of IPv4's length", Vnet::TCPV4, 1448, tcp(65_495), None),
        ];
        for (what, gso_type, gso_size, frame, expected) in cases {
            if gso_type == Vnet::UDP_L4 && !bed.port.uso {
                continue;
            }
            let before = bed.datapath.handed_over();
            let (vnet, bytes) = partial(&frame);
            let vnet = Vnet {
                gso_type,
                gso_size,
                hdr_len: 54,
                ..vnet
            };
            bed.guest.send(vnet, &bytes);
            let came = std::iter::from_fn(|| bed.port.poll()).count();
            let credits = bed.datapath.handed_over() - before;
            assert_eq!((credits, came), expected.unwrap_or_default(), "{what}");
        }
        assert_eq!(bed.datapath.drops.get(ROW).too_big.packets, 46);
    });
}
