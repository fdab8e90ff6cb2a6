//! The bit by which the engine learns whether a connection moves anything.
use slipgate_abi::{
    Command, Protocol,
    tcp::{Flags, TcpBits},
};

use crate::{datapath::*, frame::*, loaded};

#[test]
fn the_first_segment_with_content_is_told_of() {
    for by_engine in [false, true] {
        for rx in [false, true] {
            for (flags, sequence, payload, is_content) in [
                (0, 100, &b""[..], false),
                (0, 99, b"", false),
                (0, 101, b"x", true),
                (0, 99, b"xy", true),
                (Flags::FIN, 100, b"", true),
                (Flags::RST, 100, b"", true),
            ] {
                let mut datapath = loaded!();
                datapath.admit(Flow {
                    tcp: TcpBits::SYN_TX | TcpBits::SYN_RX | TcpBits::QUIET,
                    ..Flow::new(Protocol::Tcp)
                });
                let frame = Frame {
                    tcp_flags: Flags::ACK | flags,
                    sequence,
                    payload: payload.to_vec(),
                    ..Frame::of(Protocol::Tcp, rx)
                };
                let (program, bytes) = match (by_engine, rx) {
                    (false, false) => ("guest_egress", frame.bytes()),
                    (false, true) => ("uplink_ingress", frame.bytes()),
                    (true, false) => ("engine_port", command(Command::Forward, VM, &frame)),
                    (true, true) => ("engine_port", command(Command::Deliver, VM, &frame)),
                };
                let is_told = || {
                    assert_eq!(datapath.run(program, &bytes).action, REDIRECT);
                    let slot = datapath.slots.get(9);
                    let last_ns = if rx { slot.rx_last_ns } else { slot.tx_last_ns };
                    assert!(last_ns > 0, "the flow's own timers see every packet");
                    slot.tcp & TcpBits::QUIET == 0
                };
                assert_eq!(is_told(), is_content, "{flags:x} {sequence} {payload:?}");
                if payload.len() == 1 {
                    // The same octet again is a keep-alive.
                    datapath.slots.change(9, |slot| slot.tcp |= TcpBits::QUIET);
                    assert_eq!(datapath.run(program, &bytes).action, REDIRECT);
                    assert_ne!(datapath.slots.get(9).tcp & TcpBits::QUIET, 0);
                }
            }
        }
    }
}
