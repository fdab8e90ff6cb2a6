//! Between real devices: the destinations of redirects.
use slipgate_abi::{Command, Handover, Protocol, Verdict};

use crate::{datapath::*, devices::*, frame::*, test_name};

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
fn without_a_valid_next_hop_the_kernel_finds_the_neighbour() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Udp));
        let uplink = bed.world.ifindex;
        bed.datapath
            .slots
            .change(9, |slot| slot.uplink_ifindex = uplink);
        bed.datapath.hops.change(HOP, |hop| hop.sequence = 2);
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
