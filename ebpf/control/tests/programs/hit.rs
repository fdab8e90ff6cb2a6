//! Packets of established flows: the rewritten frames, and the counts.
use slipgate_abi::{Protocol, cell};

use crate::{datapath::*, frame::*, loaded};

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Icmp];

#[test]
fn egress_hit_is_the_same_packet_from_the_translated_address() {
    for protocol in PROTOCOLS {
        let mut datapath = loaded!();
        let slot = datapath.admit(Flow::new(protocol));
        let sent = Frame::tx(protocol);
        let run = datapath.run("guest_egress", &sent.bytes());
        let expected = Frame {
            destination_mac: ROUTER_MAC,
            source_mac: UPLINK_MAC,
            source: NAT,
            source_port: Flow::new(protocol).nat_port,
            ttl: 63,
            ..sent.clone()
        };
        assert_eq!(
            run.action,
            REDIRECT,
            "{protocol:?} {:?}",
            datapath.drops_of(ROW)
        );
        assert_eq!(run.frame, expected.bytes(), "{protocol:?}");
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
            let slot = datapath.admit(Flow::new(protocol));
            let sent = Frame::rx(protocol);
            let run = datapath.run(program, &sent.bytes()[14 - l2..]);
            let expected = Frame {
                destination_mac: GUEST_MAC,
                source_mac: GATEWAY_MAC,
                destination: GUEST,
                destination_port: Flow::new(protocol).guest_port,
                ttl: 63,
                ..sent.clone()
            };
            assert_eq!(run.action, REDIRECT, "{program} {protocol:?}");
            assert_eq!(run.frame, expected.bytes(), "{program} {protocol:?}");
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
