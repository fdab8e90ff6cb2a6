//! Frames from the engine, with valid and invalid headers.
use slipgate_abi::{Command, DropReason, PortHeader, Protocol, Verdict};

use crate::{datapath::*, frame::*, loaded};

const PORT: &str = "engine_port";

#[test]
fn to_guest_is_delivered_as_it_is() {
    let datapath = loaded!();
    let frame = Frame::rx(Protocol::Udp);
    let run = datapath.run(PORT, &command(Command::ToGuest, VM, &frame));
    let expected = Frame {
        destination_mac: GUEST_MAC,
        source_mac: GATEWAY_MAC,
        ..frame
    };
    assert_eq!((run.action, run.frame), (REDIRECT, expected.bytes()));
}

#[test]
fn forward_is_translated_whatever_the_verdict_but_drop() {
    for verdict in [Verdict::Fast, Verdict::Engine, Verdict::Closing] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            verdict,
            ..Flow::new(Protocol::Tcp)
        });
        // A SYN on an established flow: the engine has seen it.
        let frame = Frame {
            tcp_flags: 2,
            ..Frame::tx(Protocol::Tcp)
        };
        let run = datapath.run(PORT, &command(Command::Forward, VM, &frame));
        let expected = Frame {
            destination_mac: ROUTER_MAC,
            source_mac: UPLINK_MAC,
            source: NAT,
            source_port: 61_001,
            ttl: 63,
            ..frame
        };
        assert_eq!((run.action, run.frame), (REDIRECT, expected.bytes()));
        assert_eq!(datapath.slots.get(9).tx_packets, 1);
        assert_eq!(datapath.tally(), 1);
    }
}

#[test]
fn deliver_is_translated_whatever_the_verdict_but_drop() {
    for verdict in [Verdict::Fast, Verdict::Engine, Verdict::Closing] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            verdict,
            ..Flow::new(Protocol::Tcp)
        });
        let frame = Frame {
            tcp_flags: 2,
            ..Frame::rx(Protocol::Tcp)
        };
        let run = datapath.run(PORT, &command(Command::Deliver, VM, &frame));
        let expected = Frame {
            destination_mac: GUEST_MAC,
            source_mac: GATEWAY_MAC,
            destination: GUEST,
            destination_port: 40_000,
            ttl: 63,
            ..frame
        };
        assert_eq!((run.action, run.frame), (REDIRECT, expected.bytes()));
        assert_eq!(datapath.slots.get(9).rx_packets, 1);
        assert_eq!(datapath.tally(), 1);
    }
}

#[test]
fn nothing_goes_back_to_the_engine() {
    let tx = Frame::tx(Protocol::Udp);
    let rx = Frame::rx(Protocol::Udp);
    let both = |change: &dyn Fn(Frame) -> Frame| {
        [
            (Command::Forward, change(tx.clone())),
            (Command::Deliver, change(rx.clone())),
        ]
    };
    let cases = [
        (
            DropReason::NoFlow,
            Verdict::Fast,
            both(&|f| Frame { protocol: 6, ..f }),
        ),
        (DropReason::Denied, Verdict::Drop, both(&|f| f)),
        (
            DropReason::TtlExpired,
            Verdict::Fast,
            both(&|f| Frame { ttl: 1, ..f }),
        ),
        (
            DropReason::TooBig,
            Verdict::Fast,
            both(&|f| Frame {
                payload: vec![0; 1473],
                ..f
            }),
        ),
        (
            DropReason::IpProtocol,
            Verdict::Fast,
            both(&|f| Frame { protocol: 47, ..f }),
        ),
        (
            DropReason::Fragment,
            Verdict::Fast,
            both(&|f| Frame { fragment: 1, ..f }),
        ),
        (
            DropReason::NoFlow,
            Verdict::Fast,
            both(&|f| Frame { protocol: 1, ..f }),
        ),
    ];
    for (reason, verdict, frames) in cases {
        for (what, frame) in frames {
            let mut datapath = loaded!();
            datapath.admit(Flow {
                verdict,
                ..Flow::new(Protocol::Udp)
            });
            println!("{what:?} {reason:?}");
            datapath.expect_drop(PORT, &command(what, VM, &frame), ROW, reason);
        }
    }
}

#[test]
fn a_gso_frame_is_as_long_as_its_header_says() {
    // Else segmentation would make more packets of it than are counted.
    for (program, what, rx) in [
        (PORT, Command::Forward, false),
        (PORT, Command::Deliver, true),
        ("uplink_ingress", Command::Deliver, true),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Tcp));
        let frame = Frame {
            payload: vec![0; 3000],
            ..if rx {
                Frame::rx(Protocol::Tcp)
            } else {
                Frame::tx(Protocol::Tcp)
            }
        };
        let mut bytes = if program == PORT {
            command(what, VM, &frame)
        } else {
            frame.bytes()
        };
        assert_eq!(datapath.run_gso(program, &bytes, 1400).action, REDIRECT);
        bytes[16..18].copy_from_slice(&1000u16.to_be_bytes());
        let action = datapath.run_gso(program, &bytes, 1400).action;
        assert_eq!(action, if program == PORT { SHOT } else { UNSPEC });
        let slot = datapath.slots.get(9);
        assert_eq!(slot.tx_packets + slot.rx_packets, 3);
    }
}

#[test]
fn emit_goes_by_its_next_hop_as_it_is() {
    let datapath = loaded!();
    let frame = Frame {
        ttl: 1,
        ..Frame::rx(Protocol::Icmp)
    };
    let run = datapath.run(PORT, &command(Command::Emit, HOP, &frame));
    let expected = Frame {
        destination_mac: ROUTER_MAC,
        source_mac: UPLINK_MAC,
        ..frame.clone()
    };
    assert_eq!((run.action, run.frame), (REDIRECT, expected.bytes()));
    // Not valid: the kernel finds the neighbour.
    datapath.hops.change(HOP, |hop| hop.sequence = 2);
    let sent = command(Command::Emit, HOP, &frame);
    let run = datapath.run(PORT, &sent);
    assert_eq!((run.action, run.frame), (REDIRECT, sent));
    // Nor has it a device.
    datapath.hops.change(HOP, |hop| hop.ifindex = 0);
    datapath.expect_drop(
        PORT,
        &command(Command::Emit, HOP, &frame),
        ROW,
        DropReason::BadCommand,
    );
    // To whom no next hop leads: by an uplink.
    let sent = command(Command::EmitBy, TAP, &frame);
    let run = datapath.run(PORT, &sent);
    assert_eq!((run.action, run.frame), (REDIRECT, sent));
    for (what, id) in [
        (Command::Emit, 0),
        (Command::Emit, 1024),
        (Command::Emit, u32::MAX),
        (Command::EmitBy, 0),
    ] {
        let datapath = loaded!();
        let frame = command(what, id, &frame);
        datapath.expect_drop(PORT, &frame, ROW, DropReason::BadCommand);
    }
}

#[test]
fn an_emission_for_a_free_row_is_nobodys() {
    let datapath = loaded!();
    let header = PortHeader {
        code: Command::Emit as u8,
        flags: 0,
        vm_row: 9,
        id: 0,
    };
    let frame = with_header(header, Frame::rx(Protocol::Udp).bytes());
    datapath.expect_drop(PORT, &frame, 0, DropReason::BadCommand);
}

#[test]
fn frames_that_are_not_the_engines_are_dropped() {
    let good = command(Command::ToGuest, VM, &Frame::rx(Protocol::Udp));
    for at in 0..5 {
        let datapath = loaded!();
        let mut frame = good.clone();
        frame[at] ^= 0x40;
        datapath.expect_drop(PORT, &frame, 0, DropReason::BadCommand);
    }
    for code in [0, 6, 255] {
        let datapath = loaded!();
        let header = PortHeader {
            code,
            flags: 0,
            vm_row: ROW as u16,
            id: VM,
        };
        let frame = with_header(header, good.clone());
        datapath.expect_drop(PORT, &frame, 0, DropReason::BadCommand);
    }
}

#[test]
fn another_vm_in_the_row_is_stale() {
    for what in [Command::ToGuest, Command::Forward, Command::Deliver] {
        for (vm_row, id) in [(ROW as u16, VM + 1), (9, VM), (0, 0), (u16::MAX, VM)] {
            let mut datapath = loaded!();
            datapath.admit(Flow::new(Protocol::Udp));
            let header = PortHeader {
                code: what as u8,
                flags: 0,
                vm_row,
                id,
            };
            let frame = with_header(header, Frame::tx(Protocol::Udp).bytes());
            datapath.expect_drop(PORT, &frame, 0, DropReason::StaleVm);
        }
    }
}

#[test]
fn deliver_does_not_reach_another_vms_flow() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    // Row 4 is another VM's, and the frame says so; the flow is not its.
    let mut other = vm();
    other.id = VM + 1;
    datapath.vms.set(4, other);
    let header = PortHeader {
        code: Command::Deliver as u8,
        flags: 0,
        vm_row: 4,
        id: VM + 1,
    };
    let run = datapath.run(PORT, &with_header(header, Frame::rx(Protocol::Udp).bytes()));
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.only_drop(4), DropReason::NoFlow);
    assert_eq!(datapath.slots.get(9).rx_packets, 0);
}
