//! Between real devices: a guest that sends false offload headers, tags or truncated frames.
use slipgate_abi::{DropReason, Protocol};

use crate::{datapath::*, devices::*, frame::*, test_name};

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
                Protocol::Icmp | Protocol::Icmpv6 => 34 + 2,
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
