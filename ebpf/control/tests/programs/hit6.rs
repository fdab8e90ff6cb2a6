//! IPv6 packets of established flows: the rewritten frames, and the counts.
use slipgate_abi::{
    Command, FlowRef, Handover, PortHeader, Protocol, Verdict, cell, portframe::Order,
    slot::OrderState,
};

use crate::{datapath::*, devices::*, flow6::*, frame::*, frame6::*, loaded, test_name};

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6];

#[test]
fn egress_hit_is_the_same_packet_from_the_translated_address() {
    for protocol in PROTOCOLS {
        let mut datapath = loaded!();
        let slot = datapath.admit6(flow6(protocol));
        let sent = Frame6::tx(protocol);
        let run = datapath.run("guest_egress", &sent.bytes());
        assert_eq!(
            run.action,
            REDIRECT,
            "{protocol:?} {:?}",
            datapath.drops_of(ROW)
        );
        assert_eq!(run.frame, sent.sent_on().bytes(), "{protocol:?}");
        assert_eq!(cell::load64(slot.tx_packets()), 1);
        assert_eq!(
            cell::load64(slot.tx_bytes()),
            sent.bytes().len() as u64 - 14
        );
        assert_ne!(cell::load64(slot.tx_last_ns()), 0);
        assert_eq!(cell::load64(slot.rx_packets()), 0);
        assert_eq!(datapath.handed_over(), 0);
    }
}

#[test]
fn ingress_hit_is_the_same_packet_to_the_guest() {
    for (program, l2) in [("uplink_ingress", 14), ("uplink_ingress_l3", 0)] {
        for protocol in PROTOCOLS {
            let mut datapath = loaded!();
            let slot = datapath.admit6(flow6(protocol));
            let sent = Frame6::rx(protocol);
            let run = datapath.run(program, &sent.bytes()[14 - l2..]);
            assert_eq!(run.action, REDIRECT, "{program} {protocol:?}");
            assert_eq!(
                run.frame,
                sent.delivered().bytes(),
                "{program} {protocol:?}"
            );
            assert_eq!(cell::load64(slot.rx_packets()), 1);
            assert_eq!(
                cell::load64(slot.rx_bytes()),
                sent.bytes().len() as u64 - 14
            );
            assert_ne!(cell::load64(slot.rx_last_ns()), 0);
            assert_eq!(cell::load64(slot.tx_packets()), 0);
        }
    }
}

/// A slot of the other family is no flow, in whichever table an entry names it.
#[test]
fn the_family_of_a_slot_is_checked() {
    let mut datapath = loaded!();
    datapath.admit6(flow6(Protocol::Udp));
    datapath.slots.change(9, |slot| slot.flags = 0);
    datapath.expect_handover(
        "guest_egress",
        &Frame6::tx(Protocol::Udp).bytes(),
        Handover::Miss,
        0,
    );
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath
        .slots
        .change(9, |slot| slot.flags = slipgate_abi::slot::SlotFlags::IPV6);
    datapath.expect_handover(
        "guest_egress",
        &Frame::tx(Protocol::Udp).bytes(),
        Handover::Miss,
        0,
    );
}

#[test]
fn commands_of_the_engine_are_carried_out() {
    for protocol in PROTOCOLS {
        let mut datapath = loaded!();
        let slot = datapath.admit6(Flow {
            verdict: Verdict::Engine,
            ..flow6(protocol)
        });
        let header = |command, id| PortHeader {
            code: command as u8,
            flags: 0,
            vm_row: ROW as u16,
            id,
        };
        let (tx, rx) = (Frame6::tx(protocol), Frame6::rx(protocol));
        for (command, id, frame, expected) in [
            (Command::Forward, VM, &tx, tx.sent_on()),
            (Command::Deliver, VM, &rx, rx.delivered()),
            (
                Command::ToGuest,
                VM,
                &rx,
                Frame6 {
                    destination_mac: GUEST_MAC,
                    source_mac: GATEWAY_MAC,
                    ..rx.clone()
                },
            ),
            (
                Command::Emit,
                HOP,
                &tx,
                Frame6 {
                    destination_mac: ROUTER_MAC,
                    source_mac: UPLINK_MAC,
                    ..tx.clone()
                },
            ),
        ] {
            let run = datapath.run(
                "engine_port",
                &with_header(header(command, id), frame.bytes()),
            );
            assert_eq!(
                run.action,
                REDIRECT,
                "{command:?} {:?}",
                datapath.drops_of(ROW)
            );
            assert_eq!(run.frame, expected.bytes(), "{protocol:?} {command:?}");
        }
        assert_eq!(cell::load64(slot.tx_packets()), 1);
        assert_eq!(cell::load64(slot.rx_packets()), 1);
    }
}

#[test]
fn an_order_inserts_both_tuples_or_none() {
    for is_taken in [false, true] {
        let mut datapath = loaded!();
        let (slot, addresses) = datapath.fill6(Flow {
            verdict: Verdict::Free,
            ..flow6(Protocol::Udp)
        });
        datapath
            .slots
            .change(9, |slot| slot.connect_us = OrderState::GIVEN);
        let [world, guest] = [addresses.world_tuple(slot), addresses.guest_tuple(slot)];
        let other = FlowRef {
            slot: 8,
            generation: 1,
        };
        if is_taken {
            datapath
                .flows6()
                .insert(guest, other, 1)
                .expect("insert FLOWS6");
        }
        let generation = datapath.slots.get(9).generation;
        let header = PortHeader {
            code: Command::Open as u8,
            flags: 0,
            vm_row: ROW as u16,
            id: Order::new(slipgate_abi::SlotIndex::new(9), generation).encode(),
        };
        let tx = Frame6::tx(Protocol::Udp);
        let run = datapath.run("engine_port", &with_header(header, tx.bytes()));
        let entry = FlowRef {
            slot: 9,
            generation,
        };
        let found = [world, guest].map(|tuple| datapath.flows6().get(&tuple, 0).ok());
        if is_taken {
            assert_eq!(run.action, SHOT);
            assert_eq!(found, [None, Some(other)]);
            assert_eq!(cell::load32(slot.order()), OrderState::FAILED);
            assert_eq!(cell::load32(slot.verdict()), Verdict::Free as u32);
        } else {
            assert_eq!(run.action, REDIRECT);
            assert_eq!(run.frame, tx.sent_on().bytes());
            assert_eq!(found, [Some(entry), Some(entry)]);
            assert_eq!(cell::load32(slot.verdict()), Verdict::Fast as u32);
        }
        assert_eq!(datapath.drops_of(ROW), []);
    }
}

#[test]
fn checksums_stay_right_full_and_partial_both_ways() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        for (slot, protocol) in (1..).zip(PROTOCOLS) {
            bed.datapath.admit6(Flow {
                slot,
                ..flow6(protocol)
            });
        }
        bed.datapath.hops.change(HOP, |hop| hop.mtu = 9_000);
        bed.datapath.vms.change(ROW, |vm| vm.mtu = 9_000);
        for len in [0, 1, 1400, 6001] {
            for protocol in PROTOCOLS {
                let payload = vec![0xa5; len];
                let tx = Frame6::tx_with(protocol, &payload);
                let rx = Frame6 {
                    destination_mac: UPLINK_MAC,
                    ..Frame6::rx_with(protocol, &payload)
                };
                for (sent, from, to, expected) in [
                    (&tx, &bed.guest, &bed.world, tx.sent_on()),
                    (&rx, &bed.world, &bed.guest, rx.delivered()),
                ] {
                    let hint = Vnet {
                        hdr_len: 14,
                        ..Vnet::default()
                    };
                    from.send(hint, &sent.bytes());
                    let (vnet, frame) = to.receive();
                    assert!(!vnet.needs_csum);
                    assert_eq!(frame, expected.bytes(), "{protocol:?} {len}");
                    let field = sent.checksum_offset().expect("a checksum");
                    let partial = Vnet {
                        needs_csum: true,
                        csum_start: 54,
                        csum_offset: field as u16 - 54,
                        ..hint
                    };
                    from.send(partial, &sent.partial());
                    let (vnet, frame) = to.receive();
                    assert!(vnet.needs_csum, "{protocol:?} {len}");
                    assert_eq!(frame, expected.partial(), "{protocol:?} {len}");
                }
            }
        }
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}

#[test]
fn gso_frames_stay_whole_both_ways() {
    const TCPV6: u8 = 4;
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        let flow = bed.datapath.admit6(flow6(Protocol::Tcp));
        let tx = Frame6::tx_with(Protocol::Tcp, &[0x5a; 40_000]);
        let rx = Frame6 {
            destination_mac: UPLINK_MAC,
            ..Frame6::rx_with(Protocol::Tcp, &[0x5a; 40_001])
        };
        let gso = Vnet {
            needs_csum: true,
            gso_type: TCPV6,
            gso_size: 1_400,
            hdr_len: 74,
            csum_start: 54,
            csum_offset: 16,
        };
        bed.guest.send(gso, &tx.partial());
        let (vnet, frame) = bed.world.receive();
        assert_eq!((vnet.gso_type, vnet.gso_size), (TCPV6, 1_400));
        assert_eq!(frame, tx.sent_on().partial());
        bed.world.send(gso, &rx.partial());
        let (vnet, frame) = bed.guest.receive();
        assert_eq!((vnet.gso_type, vnet.gso_size), (TCPV6, 1_400));
        assert_eq!(frame, rx.delivered().partial());
        assert_eq!(cell::load64(flow.tx_packets()), 29);
        assert_eq!(cell::load64(flow.tx_bytes()), 40_000 + 29 * 60);
        assert_eq!(cell::load64(flow.rx_packets()), 29);
        assert_eq!(bed.datapath.drops_of(ROW), []);
    });
}
