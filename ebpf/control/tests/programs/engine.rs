//! Frames from the engine, with valid and invalid headers.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Command, DropReason, FlowRef, PortHeader, Protocol, SlotIndex, Verdict, Vm, portframe::Order,
    slot::OrderState, tcp::TcpBits, vm::VmFlags,
};

use crate::{datapath::*, frame::*, loaded, pool::Datapath};

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

/// A slot that the engine has filled, with its order to open the flow in this state.
fn ordered(datapath: &mut Datapath, state: u32) -> Order {
    let slot = datapath.admit(Flow {
        tcp: 0,
        verdict: Verdict::Free,
        ..Flow::new(Protocol::Tcp)
    });
    let mut flows = datapath.flows();
    for tuple in [slot.guest_tuple(), slot.world_tuple()] {
        flows.remove(&tuple).expect("inserted just now");
    }
    slot.order().store(state, Relaxed);
    Order::new(SlotIndex::new(9), slot.generation().load(Relaxed))
}

fn first_packet() -> Frame {
    Frame {
        tcp_flags: 2,
        sequence: ISN,
        ..Frame::tx(Protocol::Tcp)
    }
}

#[test]
fn an_order_opens_the_flow_and_sends_its_first_packet() {
    let mut datapath = loaded!();
    let order = ordered(&mut datapath, OrderState::GIVEN);
    let frame = first_packet();
    let written = command(Command::Open, order.encode(), &frame);
    let run = datapath.run(PORT, &written);
    let expected = Frame {
        destination_mac: ROUTER_MAC,
        source_mac: UPLINK_MAC,
        source: NAT,
        source_port: 61_001,
        ttl: 63,
        ..frame
    };
    assert_eq!((run.action, run.frame), (REDIRECT, expected.bytes()));
    let slot = datapath.slots.get(9);
    assert_eq!(
        (slot.verdict, slot.connect_us),
        (Verdict::Fast, OrderState::NONE)
    );
    assert_eq!((slot.tx_packets, slot.tcp), (1, TcpBits::SYN_TX));
    assert_eq!(datapath.tally(), 1);
    let live = datapath.slot(9);
    let reference = FlowRef::new(SlotIndex::new(9), slot.generation);
    for tuple in [live.guest_tuple(), live.world_tuple()] {
        assert_eq!(
            datapath.flows().get(&tuple, 0).expect("inserted"),
            reference
        );
    }
    // The same frame again is no order any more, whatever the slot is then.
    let again = datapath.run(PORT, &written);
    assert_eq!(again.action, SHOT);
    assert_eq!(datapath.slots.get(9).tx_packets, 1);
}

#[test]
fn an_order_that_can_not_be_carried_out_changes_nothing_but_its_state() {
    let other = FlowRef::new(SlotIndex::new(3), 1);
    let taken = |world: bool| {
        move |datapath: &mut Datapath| {
            let slot = datapath.slot(9);
            let tuple = if world {
                slot.world_tuple()
            } else {
                slot.guest_tuple()
            };
            datapath
                .flows()
                .insert(tuple, other, 1)
                .expect("a free tuple");
        }
    };
    let frozen = |datapath: &mut Datapath| {
        datapath.vms.set(
            ROW,
            Vm {
                flags: VmFlags::FROZEN,
                ..vm()
            },
        );
    };
    let (given, failed) = (OrderState::GIVEN, OrderState::FAILED);
    type Prepare<'p> = &'p dyn Fn(&mut Datapath);
    type Change = fn(Order) -> Order;
    /// Description, state of the order, preparation, change of the order, port, state afterwards.
    type Case<'p> = (&'static str, u32, Prepare<'p>, Change, u16, u32);
    let nothing: Prepare = &|_| {};
    let later = |order: Order| Order::new(SlotIndex::new(order.slot), 7);
    let same = |order: Order| order;
    let cases: [Case<'_>; 8] = [
        (
            "the world's tuple is taken",
            given,
            &taken(true),
            same,
            443,
            failed,
        ),
        (
            "the guest's tuple is taken",
            given,
            &taken(false),
            same,
            443,
            failed,
        ),
        (
            "a packet of another flow",
            given,
            nothing,
            same,
            444,
            failed,
        ),
        (
            "an order of another generation",
            given,
            nothing,
            later,
            443,
            given,
        ),
        ("a frozen VM", given, &frozen, same, 443, given),
        (
            "no order",
            OrderState::NONE,
            nothing,
            same,
            443,
            OrderState::NONE,
        ),
        (
            "a taken order",
            OrderState::TAKEN,
            nothing,
            same,
            443,
            OrderState::TAKEN,
        ),
        ("a withdrawn order", failed, nothing, same, 443, failed),
    ];
    for (what, state, prepare, change, port, left) in cases {
        let mut datapath = loaded!();
        let order = change(ordered(&mut datapath, state));
        prepare(&mut datapath);
        let frame = Frame {
            destination_port: port,
            ..first_packet()
        };
        let run = datapath.run(PORT, &command(Command::Open, order.encode(), &frame));
        assert_eq!(run.action, SHOT, "{what}");
        assert_eq!(datapath.tally(), 0, "{what}: the engine counts the packet");
        let slot = datapath.slots.get(9);
        assert_eq!(
            (slot.verdict, slot.connect_us),
            (Verdict::Free, left),
            "{what}"
        );
        let live = datapath.slot(9);
        for tuple in [live.guest_tuple(), live.world_tuple()] {
            let found = datapath.flows().get(&tuple, 0).ok();
            assert!(
                found.is_none_or(|found| found == other),
                "{what}: {tuple:?}"
            );
        }
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
    for code in [0, 7, 255] {
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
