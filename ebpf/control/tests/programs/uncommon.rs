//! Packets from the world to a live flow in forms that the programs do not translate: fragments are
//! handed over, packets with options dropped and counted, and the host does not see them.
use slipgate_abi::{DropReason, Handover, Protocol, Verdict, vm::VmFlags};

use crate::{datapath::*, devices::*, frame::*, loaded, pool::Datapath, test_name};

const INGRESS: [(&str, usize); 2] = [("uplink_ingress", 0), ("uplink_ingress_l3", 14)];
const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Icmp];
/// Flag of the header's field: more fragments follow.
const MORE: u16 = 0x2000;
/// Value of the header's field: 24 bytes into the datagram.
const LATER: u16 = 3;

fn fragment(protocol: Protocol, field: u16) -> Frame {
    Frame {
        fragment: field,
        ..Frame::rx(protocol)
    }
}

/// Returns the frame with a router alert option (RFC 2113).
fn with_options(frame: &Frame) -> Vec<u8> {
    let mut bytes = frame.bytes();
    bytes.splice(34..34, [0x94, 4, 0, 0]);
    bytes[14] = 0x46;
    bytes[17] += 4;
    let sum = {
        bytes[24..26].fill(0);
        !sum16(&bytes[14..38])
    };
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    bytes
}

#[test]
fn fragments_of_a_live_flow_are_handed_over_and_its_options_dropped() {
    for (program, from) in INGRESS {
        for protocol in ALL {
            println!("{program} {protocol:?}");
            let mut datapath = loaded!();
            datapath.admit(Flow::new(protocol));
            let first = fragment(protocol, MORE).bytes();
            let later = fragment(protocol, LATER).bytes();
            let dropped = |datapath: &Datapath, frame: &[u8]| {
                let run = datapath.run(program, &frame[from..]);
                assert_eq!(run.action, SHOT, "{:?}", datapath.drops_of(ROW));
            };
            // Before its first fragment nobody can tell whose it is.
            let run = datapath.run(program, &later[from..]);
            assert_eq!(run.action, UNSPEC);
            assert_eq!(datapath.tally(), 0);
            for frame in [&first, &later] {
                let run = datapath.run(program, &frame[from..]);
                assert_eq!(run.action, REDIRECT);
                assert_eq!(handed(&run.frame).0.code, Handover::Fragment as u8);
            }
            assert_eq!(datapath.handed_over(), 2);
            let options = with_options(&Frame::rx(protocol));
            dropped(&datapath, &options);
            let row = datapath.drops.get(ROW);
            assert_eq!(row.ip_options.packets, 1);
            assert_eq!(row.ip_options.bytes as usize, options.len() - 14);
            assert_eq!(row.fragment.packets, 0);
        }
    }
}

#[test]
fn a_strangers_fragments_and_options_are_the_hosts() {
    for (program, from) in INGRESS {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        let unnoticed = |datapath: &Datapath, frame: &[u8]| {
            datapath.expect_unnoticed(program, &frame[from..]);
        };
        let ours = fragment(Protocol::Udp, MORE);
        let later = fragment(Protocol::Udp, LATER);
        let another_port = Frame {
            source_port: 9,
            ..ours.clone()
        };
        for stranger in [
            another_port.bytes(),
            with_options(&Frame {
                source_port: 9,
                ..Frame::rx(Protocol::Udp)
            }),
            fragment(Protocol::Tcp, MORE).bytes(),
            // Not after a first fragment either that was no flow's.
            later.bytes(),
        ] {
            unnoticed(&datapath, &stranger);
        }
        // What was remembered is the datagram, not its sender.
        let run = datapath.run(program, &ours.bytes()[from..]);
        assert_eq!(run.action, REDIRECT);
        let mut another_id = later.bytes();
        another_id[19] ^= 1;
        unnoticed(&datapath, &another_id);
        // Its name is a stranger's by now.
        unnoticed(&datapath, &another_port.bytes()[..]);
        unnoticed(&datapath, &later.bytes());
    }
}

#[test]
fn a_flow_that_is_gone_has_no_fragments() {
    for (program, from) in INGRESS {
        let mut datapath = loaded!();
        let slot = datapath.admit(Flow::new(Protocol::Tcp));
        slot.set_verdict(Verdict::Free);
        for frame in [
            fragment(Protocol::Tcp, MORE).bytes(),
            with_options(&Frame::rx(Protocol::Tcp)),
        ] {
            datapath.expect_unnoticed(program, &frame[from..]);
        }
    }
}

/// The host's stack shows which packets the programs leave to it.
#[test]
fn between_devices_a_flows_fragments_come_to_the_port() {
    between_devices(test_name!(), Uplink::L2, |mut bed| {
        bed.datapath.admit(Flow::new(Protocol::Udp));
        for field in [MORE, LATER] {
            let frame = Frame {
                fragment: field,
                ..from_world(Protocol::Udp)
            };
            bed.world.send(Vnet::default(), &frame.bytes());
            let (_, frame) = bed.port.receive();
            assert_eq!(handed(&frame).0.code, Handover::Fragment as u8);
        }
        assert!(bed.guest.poll().is_none());
    });
}

#[test]
fn a_frozen_vms_fragments_are_dropped() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
    for (program, from) in INGRESS {
        let first = fragment(Protocol::Udp, MORE).bytes();
        assert_eq!(datapath.run(program, &first[from..]).action, SHOT);
        assert_eq!(datapath.only_reason(ROW), DropReason::Frozen);
    }
}

#[test]
fn fragments_by_another_uplink_than_the_flows_are_the_hosts() {
    for (program, from) in INGRESS {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        datapath.slots.change(9, |slot| slot.uplink_ifindex = 77);
        let first = fragment(Protocol::Udp, MORE);
        let forward = (first.destination, first.destination_port, Protocol::Udp);
        for is_forward_too in [false, true] {
            if is_forward_too {
                // As of a flow that it has let in.
                datapath.forward(forward, (VM, 80));
            }
            for field in [MORE, LATER] {
                let frame = fragment(Protocol::Udp, field).bytes();
                datapath.expect_unnoticed(program, &frame[from..]);
            }
        }
    }
}
