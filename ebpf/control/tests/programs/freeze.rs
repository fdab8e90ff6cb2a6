//! A frozen VM: all packets from it and to it are dropped.
use slipgate_abi::{Command, DropReason, Protocol, Verdict, vm::VmFlags};

use crate::{datapath::*, frame::*, pool::Datapath};

/// A datapath with a frozen VM that has flows.
fn frozen(test: &str) -> Option<Datapath> {
    let mut datapath = Datapath::for_test(test)?;
    for (slot, protocol) in (9..).zip([Protocol::Tcp, Protocol::Udp, Protocol::Icmp]) {
        datapath.admit(Flow {
            slot,
            ..Flow::new(protocol)
        });
    }
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
    Some(datapath)
}

macro_rules! frozen {
    () => {
        match frozen(crate::test_name!()) {
            Some(datapath) => datapath,
            None => return,
        }
    };
}

#[test]
fn what_the_guest_sends_is_dropped() {
    let broadcast = Frame {
        source: std::net::Ipv4Addr::UNSPECIFIED,
        destination: std::net::Ipv4Addr::BROADCAST,
        destination_mac: [0xff; 6],
        source_port: 68,
        destination_port: 67,
        ..Frame::tx(Protocol::Udp)
    };
    let to_gateway = Frame {
        destination: GATEWAY,
        ..Frame::tx(Protocol::Icmp)
    };
    let miss = Frame {
        source_port: 1,
        ..Frame::tx(Protocol::Tcp)
    };
    let question = Frame {
        destination_port: 53,
        ..Frame::tx(Protocol::Udp)
    };
    let frames = [
        Frame::tx(Protocol::Tcp),
        Frame::tx(Protocol::Udp),
        Frame::tx(Protocol::Icmp),
        broadcast,
        to_gateway,
        miss,
        question,
    ];
    let arps = [arp(1, GUEST, GATEWAY), arp(2, GUEST, GATEWAY)];
    for frame in frames.iter().map(Frame::bytes).chain(arps) {
        let datapath = frozen!();
        datapath.expect_drop("guest_egress", &frame, ROW, DropReason::Frozen);
        assert_eq!(datapath.handed_over(), 0);
        assert_eq!(datapath.vms.get(ROW).arp_answered, 0);
        // And before an skb is made of it.
        assert!(!datapath.guard(&frame));
        assert_eq!(datapath.drops.get(ROW).frozen.packets, 2);
    }
}

#[test]
fn what_the_world_sends_is_dropped() {
    for (program, l2) in [("uplink_ingress", 14), ("uplink_ingress_l3", 0)] {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
            for verdict in [Verdict::Fast, Verdict::Engine, Verdict::Closing] {
                let datapath = frozen!();
                for slot in 9..12 {
                    datapath.slots.change(slot, |slot| slot.verdict = verdict);
                }
                let run = datapath.run(program, &Frame::rx(protocol).bytes()[14 - l2..]);
                assert_eq!(run.action, SHOT, "{program} {protocol:?} {verdict:?}");
                assert_eq!(datapath.only_drop(ROW), DropReason::Frozen);
            }
        }
        let mut datapath = frozen!();
        datapath.forward((NAT, 2_222, Protocol::Udp), (VM, 22));
        let forward = Frame {
            destination_port: 2_222,
            ..Frame::rx(Protocol::Udp)
        };
        let sent = Frame {
            source: NAT,
            source_port: Flow::new(Protocol::Udp).nat_port,
            ..Frame::tx(Protocol::Udp)
        };
        let error = icmp_error(3, &sent);
        for (packets, frame) in (1..).zip([forward, error]) {
            let run = datapath.run(program, &frame.bytes()[14 - l2..]);
            assert_eq!(run.action, SHOT, "{program} {frame:?}");
            assert_eq!(datapath.only_reason(ROW), DropReason::Frozen);
            assert_eq!(datapath.drops.get(ROW).frozen.packets, packets);
        }
        assert_eq!(datapath.handed_over(), 0);
    }
}

#[test]
fn what_the_engine_sends_is_dropped() {
    for (what, id) in [
        (Command::ToGuest, VM),
        (Command::Forward, VM),
        (Command::Deliver, VM),
        (Command::Emit, HOP),
        (Command::EmitBy, TAP),
    ] {
        let datapath = frozen!();
        let frame = command(what, id, &Frame::tx(Protocol::Udp));
        datapath.expect_drop("engine_port", &frame, ROW, DropReason::Frozen);
    }
}

#[test]
fn gso_frames_are_counted_as_segmented_and_untouched() {
    for rx in [false, true] {
        let datapath = frozen!();
        let frame = Frame {
            payload: vec![3; 3_000],
            ..Frame::of(Protocol::Tcp, rx)
        };
        let program = if rx { "uplink_ingress" } else { "guest_egress" };
        let run = datapath.run_gso(program, &frame.bytes(), 1_400);
        assert_eq!(run.action, SHOT);
        assert_eq!(run.frame, frame.bytes());
        let dropped = datapath.drops.get(ROW).frozen;
        assert_eq!((dropped.packets, dropped.bytes), (3, 3_000 + 3 * 40));
    }
}

#[test]
fn thawed_it_goes_on_where_it_was() {
    for rx in [false, true] {
        let mut datapath = frozen!();
        let slot = datapath.slot(9);
        let frame = Frame::of(Protocol::Tcp, rx).bytes();
        let program = if rx { "uplink_ingress" } else { "guest_egress" };
        assert_eq!(datapath.run(program, &frame).action, SHOT);
        datapath.vms.change(ROW, |vm| vm.flags &= !VmFlags::FROZEN);
        assert_eq!(datapath.run(program, &frame).action, REDIRECT);
        let counted = if rx {
            slot.rx_packets()
        } else {
            slot.tx_packets()
        };
        assert_eq!(slipgate_abi::cell::load64(counted), 1);
        // Whatever else is frozen.
        datapath
            .vms
            .change(ROW + 1, |vm| vm.flags |= VmFlags::FROZEN);
        assert_eq!(datapath.run(program, &frame).action, REDIRECT);
        let _ = &mut datapath;
    }
}
