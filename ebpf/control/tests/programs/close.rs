//! Opening and closing of a TCP connection, as recorded in its slot.
use slipgate_abi::{
    Command, Protocol, Slot, cell,
    slot::SlotFlags,
    tcp::{Flags, Phase, TcpBits},
};

use crate::{datapath::*, frame::*, loaded, pool::Datapath};

const SYN: u8 = Flags::SYN;
const ACK: u8 = Flags::ACK;
const FIN: u8 = Flags::FIN | Flags::ACK;
const PAYLOAD: u32 = 21;

/// Sends a segment with a payload of `PAYLOAD` bytes, on its own path or by the engine.
fn send(datapath: &Datapath, rx: bool, by_engine: bool, flags: u8, sequence: u32, ack: u32) {
    let frame = Frame {
        tcp_flags: flags,
        sequence,
        acknowledgement: ack,
        ..Frame::of(Protocol::Tcp, rx)
    };
    let (program, bytes) = match (by_engine, rx) {
        (false, false) => ("guest_egress", frame.bytes()),
        (false, true) => ("uplink_ingress", frame.bytes()),
        (true, false) => ("engine_port", command(Command::Forward, VM, &frame)),
        (true, true) => ("engine_port", command(Command::Deliver, VM, &frame)),
    };
    let run = datapath.run(program, &bytes);
    assert_eq!(run.action, REDIRECT, "{:?}", datapath.drops_of(ROW));
}

fn phase(datapath: &Datapath) -> Phase {
    TcpBits(datapath.slots.get(9).tcp).phase()
}

#[test]
fn a_connection_is_closed_when_both_fins_are_acknowledged() {
    for by_engine in [false, true] {
        for peer_first in [false, true] {
            let mut datapath = loaded!();
            datapath.admit(Flow::new(Protocol::Tcp));
            let send = |rx, flags, sequence, ack| {
                send(&datapath, rx, by_engine, flags, sequence, ack);
            };
            // Sequence numbers wrap around between the two FINs' starts and ends.
            let (first, second) = (u32::MAX - 5, 1_000u32);
            let first_end = first.wrapping_add(PAYLOAD + 1);
            let second_end = second + PAYLOAD + 1;
            send(peer_first, FIN, first, second);
            send(!peer_first, ACK, second, first_end.wrapping_sub(1));
            send(!peer_first, FIN, second, first_end);
            assert_eq!(phase(&datapath), Phase::Closing);
            // Duplicates that ask for what was lost.
            for ack in [second, second + PAYLOAD, second_end.wrapping_add(1)] {
                send(peer_first, ACK, first_end, ack);
                assert_eq!(phase(&datapath), Phase::Closing);
            }
            send(peer_first, ACK, first_end, second_end);
            assert_eq!(phase(&datapath), Phase::Closed);
            let bits = datapath.slots.get(9).tcp;
            assert_eq!(bits & TcpBits::PEER_TIME_WAIT != 0, peer_first);
            let Slot {
                fin_end_tx,
                fin_end_rx,
                ..
            } = datapath.slots.get(9);
            let ends = if peer_first {
                (second_end, first_end)
            } else {
                (first_end, second_end)
            };
            assert_eq!((fin_end_tx, fin_end_rx), ends);
        }
    }
}

#[test]
fn a_fin_at_the_end_of_a_gso_frame_ends_behind_all_of_it() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Tcp));
    let frame = Frame {
        tcp_flags: FIN,
        sequence: 500,
        payload: vec![1; 3_000],
        ..Frame::tx(Protocol::Tcp)
    };
    let run = datapath.run_gso("guest_egress", &frame.bytes(), 1_400);
    assert_eq!(run.action, REDIRECT);
    assert_eq!(datapath.slots.get(9).fin_end_tx, 3_501);
}

#[test]
fn connecting_is_timed_to_the_answer_of_whom_was_asked() {
    for inbound in [false, true] {
        let mut datapath = loaded!();
        // The clock of the programs.
        let now_ns = || {
            let mut now = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: room for the answer.
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
            now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
        };
        let slot = datapath.admit(Flow {
            tcp: 0,
            flags: if inbound { SlotFlags::INBOUND } else { 0 },
            ..Flow::new(Protocol::Tcp)
        });
        let created_ns = now_ns() - 5_000_000;
        datapath
            .slots
            .change(9, |slot| slot.created_ns = created_ns);
        let connect_us = || cell::load32(slot.connect_us());
        send(&datapath, inbound, false, SYN, ISN, 0);
        // The opener's own, and the rest of the conversation, is no answer.
        send(&datapath, inbound, true, SYN | ACK, 3, 4);
        send(&datapath, !inbound, false, ACK, 3, 4);
        assert_eq!(connect_us(), 0);
        send(&datapath, !inbound, false, SYN | ACK, 3, 4);
        let first = connect_us();
        let most = (now_ns() - created_ns) / 1_000;
        assert!((5_000..=most).contains(&u64::from(first)), "{first} {most}");
        // The answer again.
        datapath
            .slots
            .change(9, |slot| slot.created_ns -= 1_000_000_000);
        send(&datapath, !inbound, false, SYN | ACK, 3, 4);
        assert_eq!(connect_us(), first);
    }
}

#[test]
fn connecting_for_longer_than_the_word_holds_is_not_told() {
    let mut datapath = loaded!();
    datapath.admit(Flow {
        tcp: TcpBits::SYN_TX,
        ..Flow::new(Protocol::Tcp)
    });
    // As if admitted 72 minutes before, which may be before the machine started.
    datapath.slots.change(9, |slot| {
        slot.created_ns = 0u64.wrapping_sub(4_320_000_000_000)
    });
    send(&datapath, true, false, SYN | ACK, 3, 4);
    assert_eq!(datapath.slots.get(9).connect_us, 0);
    assert_eq!(phase(&datapath), Phase::Established);
}

/// The sender of a forged SYN does not receive the guest's answer, and so cannot acknowledge it.
#[test]
fn the_opener_of_a_forwards_connection_is_proven_by_what_it_acknowledges() {
    for by_engine in [false, true] {
        let guests = 0xffff_fff0u32.wrapping_add(PAYLOAD + 1);
        for (flags, ack, proves) in [
            (ACK, guests, true),
            (FIN, guests, true),
            (ACK, guests.wrapping_sub(1), false),
            (ACK, guests.wrapping_add(1 << 16), false),
            (ACK, 0x7777_7777, false),
            (Flags::RST | ACK, guests, false),
        ] {
            let mut datapath = loaded!();
            datapath.admit(Flow {
                tcp: TcpBits::SYN_RX,
                flags: SlotFlags::INBOUND,
                ..Flow::new(Protocol::Tcp)
            });
            send(&datapath, false, by_engine, SYN | ACK, 0xffff_fff0, ISN + 1);
            send(&datapath, true, by_engine, flags, ISN + 1, ack);
            let proven = datapath.slots.get(9).tcp & TcpBits::OPENER_PROVEN != 0;
            assert_eq!(proven, proves, "{flags:x} {ack:x}");
        }
    }
}
