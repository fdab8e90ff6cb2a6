//! Connections that were inspected and released: they are restricted to their sequence numbers, on
//! every path of a segment.
use slipgate_abi::{
    Command, DropReason, Protocol, Sequences,
    cell::load32,
    sequence::SendSpace,
    tcp::{Flags, TcpBits},
};

use crate::{datapath::*, frame::*, loaded, pool::Datapath};

const PAYLOAD: u32 = 21;
const ACK: u8 = Flags::ACK;
const RST: u8 = Flags::RST;
const RST_ACK: u8 = Flags::RST | Flags::ACK;
const FIN: u8 = Flags::FIN | Flags::ACK;
/// Sequence number of the guest's next segment, far after the handshake.
const NEXT: u32 = ISN + 600;
const SERVER_FIRST: u32 = 9_000;
const SERVER_NEXT: u32 = 9_400;
const WINDOW: u32 = 70_000;

/// A flow whose connection is held, in slot 9.
fn held(datapath: &mut Datapath) {
    let slot = datapath.admit(Flow::new(Protocol::Tcp));
    let sent = SendSpace {
        acknowledged: NEXT,
        end: NEXT,
        window: WINDOW,
        window_scale: 1,
        ..SendSpace::default()
    };
    let received = SendSpace {
        acknowledged: SERVER_NEXT,
        end: SERVER_NEXT,
        window: WINDOW,
        ..SendSpace::default()
    };
    let sequences = Sequences::released(sent, received, SERVER_FIRST, now_ns());
    datapath.sequences(9).hold(slot, sequences);
}

fn from_guest(flags: u8, sequence: u32, acknowledgement: u32) -> Frame {
    Frame {
        tcp_flags: flags,
        sequence,
        acknowledgement,
        ..Frame::tx(Protocol::Tcp)
    }
}

fn from_server(flags: u8, sequence: u32, acknowledgement: u32) -> Frame {
    Frame {
        tcp_flags: flags,
        sequence,
        acknowledgement,
        ..Frame::rx(Protocol::Tcp)
    }
}

/// Returns the frame on both paths: from the TAP, and by a command of the engine.
fn ways(frame: &Frame) -> [(&'static str, Vec<u8>); 2] {
    [
        ("guest_egress", frame.bytes()),
        ("engine_port", command(Command::Forward, VM, frame)),
    ]
}

#[test]
fn what_is_not_the_connections_is_dropped_and_counted() {
    for (what, frame, passes) in [
        ("what comes next", from_guest(ACK, NEXT, SERVER_NEXT), true),
        ("a keep-alive", from_guest(ACK, NEXT - 1, SERVER_NEXT), true),
        (
            "before the release",
            from_guest(ACK, NEXT - 2, SERVER_NEXT),
            false,
        ),
        (
            "the handshake's ACK",
            from_guest(ACK, ISN + 1, SERVER_FIRST),
            false,
        ),
        (
            "in the window",
            from_guest(ACK, NEXT + WINDOW - PAYLOAD, SERVER_NEXT),
            true,
        ),
        (
            "past the window",
            from_guest(ACK, NEXT + WINDOW - PAYLOAD + 1, SERVER_NEXT),
            false,
        ),
        (
            "acknowledges more",
            from_guest(ACK, NEXT, SERVER_NEXT + 1),
            false,
        ),
        (
            "acknowledges less",
            from_guest(ACK, NEXT, SERVER_FIRST),
            false,
        ),
        (
            "acknowledges nothing",
            from_guest(0, NEXT, SERVER_NEXT),
            false,
        ),
        ("a reset", from_guest(RST, NEXT, 0), true),
        ("a reset elsewhere", from_guest(RST, ISN + 1, 0), false),
    ] {
        for (program, bytes) in ways(&frame) {
            let mut datapath = loaded!();
            held(&mut datapath);
            println!("{what} {program}");
            if passes {
                assert_eq!(datapath.run(program, &bytes).action, REDIRECT);
                assert_eq!(datapath.slots.get(9).tx_packets, 1);
            } else {
                datapath.expect_drop(program, &bytes, ROW, DropReason::OutOfWindow);
                assert_eq!(datapath.slots.get(9).tx_packets, 0);
            }
        }
    }
}

#[test]
fn a_gso_frame_is_held_as_a_whole() {
    let long = |sequence| Frame {
        payload: vec![3; 3_000],
        ..from_guest(ACK, sequence, SERVER_NEXT)
    };
    let mut datapath = loaded!();
    held(&mut datapath);
    let fits = long(NEXT + WINDOW - 3_000).bytes();
    let run = datapath.run_gso("guest_egress", &fits, 1_400);
    assert_eq!(run.action, REDIRECT);
    assert_eq!(datapath.sequences(9).read().tx.end, NEXT + WINDOW);
    let run = datapath.run_gso("guest_egress", &long(NEXT + WINDOW - 2_999).bytes(), 1_400);
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.only_reason(ROW), DropReason::OutOfWindow);
}

#[test]
fn the_window_follows_both_sides() {
    let mut datapath = loaded!();
    held(&mut datapath);
    let run = |program: &str, frame: Frame| datapath.run(program, &frame.bytes()).action;
    assert_eq!(
        run("guest_egress", from_guest(ACK, NEXT, SERVER_NEXT)),
        REDIRECT
    );
    let answer = from_server(ACK, SERVER_NEXT, NEXT + PAYLOAD);
    assert_eq!(run("uplink_ingress", answer), REDIRECT);
    let now = datapath.sequences(9).read();
    assert_eq!(
        (now.tx.acknowledged, now.rx.end),
        (NEXT + PAYLOAD, SERVER_NEXT + PAYLOAD)
    );
    let acknowledges = from_guest(ACK, NEXT + PAYLOAD, SERVER_NEXT + PAYLOAD);
    assert_eq!(run("guest_egress", acknowledges), REDIRECT);
    let now = datapath.sequences(9).read();
    assert_eq!(now.rx.acknowledged, SERVER_NEXT + PAYLOAD);
    // One that can't be the server's reaches the guest, whose stack knows better, and moves nothing.
    for forged in [
        from_server(ACK, SERVER_NEXT + PAYLOAD, NEXT + 5 * PAYLOAD),
        from_server(RST_ACK, SERVER_NEXT + 2 * WINDOW, NEXT + 2 * PAYLOAD),
    ] {
        assert_eq!(run("uplink_ingress", forged), REDIRECT);
        let mut expected = now;
        expected.tx.end = datapath.sequences(9).read().tx.end;
        assert_eq!(datapath.sequences(9).read(), expected);
        assert_eq!(datapath.slots.get(9).tcp & TcpBits::RST, 0);
    }
}

#[test]
fn a_reset_is_for_good() {
    for (program, by_server) in [
        ("guest_egress", false),
        ("engine_port", false),
        ("uplink_ingress", true),
        ("engine_port", true),
    ] {
        let mut datapath = loaded!();
        held(&mut datapath);
        let (reset, order) = match by_server {
            false => (from_guest(RST_ACK, NEXT, SERVER_NEXT), Command::Forward),
            true => (from_server(RST, SERVER_NEXT, 0), Command::Deliver),
        };
        let bytes = match program {
            "engine_port" => command(order, VM, &reset),
            _ => reset.bytes(),
        };
        assert_eq!(datapath.run(program, &bytes).action, REDIRECT);
        let bits = || load32(datapath.slot(9).tcp());
        assert_eq!(bits() & TcpBits::RST, TcpBits::RST);
        let at = match by_server {
            false => NEXT + PAYLOAD,
            true => NEXT,
        };
        let doubts = Frame {
            payload: Vec::new(),
            ..from_guest(ACK, at, SERVER_NEXT)
        };
        assert_eq!(
            datapath.run("guest_egress", &doubts.bytes()).action,
            REDIRECT
        );
        let goes_on = from_guest(ACK, at, SERVER_NEXT).bytes();
        datapath.expect_drop("guest_egress", &goes_on, ROW, DropReason::OutOfWindow);
        let late = from_server(FIN, SERVER_NEXT, NEXT).bytes();
        assert_eq!(datapath.run("uplink_ingress", &late).action, REDIRECT);
        assert_eq!(bits() & TcpBits::RST, TcpBits::RST);
    }
}

#[test]
fn flags_that_contradict_each_other_are_dropped() {
    for flags in [
        Flags::SYN | Flags::FIN,
        Flags::SYN | Flags::RST,
        Flags::SYN | Flags::FIN | Flags::ACK,
        Flags::SYN | Flags::RST | Flags::ACK,
    ] {
        let reason = DropReason::BadTcpFlags;
        let guests = from_guest(flags, NEXT, SERVER_NEXT).bytes();
        let worlds = from_server(flags, SERVER_NEXT, NEXT);
        // On a live flow; to the gateway; where there is none.
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Tcp));
        datapath.expect_drop("guest_egress", &guests, ROW, reason);
        let datapath = loaded!();
        datapath.expect_drop("guest_egress", &guests, ROW, reason);
        let local = Frame {
            destination: GATEWAY,
            ..from_guest(flags, NEXT, SERVER_NEXT)
        };
        let datapath = loaded!();
        datapath.expect_drop("guest_egress", &local.bytes(), ROW, reason);
        // Of the world's only what is for a flow is ours.
        let mut datapath = loaded!();
        assert_eq!(
            datapath.run("uplink_ingress", &worlds.bytes()).action,
            UNSPEC
        );
        datapath.admit(Flow::new(Protocol::Tcp));
        datapath.expect_drop("uplink_ingress", &worlds.bytes(), ROW, reason);
    }
}

/// Returns the time by the clock of the programs, ns.
fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: room for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
