//! A guest's packets that have a flow.

use slipgate_abi::{
    DropReason, Handover, Protocol, Verdict,
    tcp::{Flags, TcpBits},
};

use crate::{datapath::*, frame::*, loaded};

const EGRESS: &str = "guest_egress";

#[test]
fn verdicts() {
    for (verdict, why) in [
        (Verdict::Free, Some(Handover::Miss)),
        (Verdict::Engine, Some(Handover::Verdict)),
        (Verdict::Closing, Some(Handover::Verdict)),
        (Verdict::Drop, None),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            verdict,
            ..Flow::new(Protocol::Tcp)
        });
        let frame = Frame::tx(Protocol::Tcp).bytes();
        match why {
            Some(why) => datapath.expect_handover(EGRESS, &frame, why, 0),
            None => datapath.expect_drop(EGRESS, &frame, ROW, DropReason::Denied),
        }
    }
}

#[test]
fn a_syn_is_fast_only_as_its_openers_retransmission() {
    let syn = |sequence| Frame {
        tcp_flags: Flags::SYN,
        sequence,
        ..Frame::tx(Protocol::Tcp)
    };
    let inbound = slipgate_abi::slot::SlotFlags::INBOUND;
    let both = TcpBits::SYN_TX | TcpBits::SYN_RX;
    for (what, tcp, flags, sequence, fast) in [
        ("first", 0, 0, ISN, true),
        ("again", TcpBits::SYN_TX, 0, ISN, true),
        ("another ISN", TcpBits::SYN_TX, 0, ISN + 1, false),
        ("established", both, 0, ISN, false),
        ("after a reset", both | TcpBits::RST, 0, ISN, false),
        ("opened by the world", TcpBits::SYN_RX, inbound, ISN, false),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow {
            tcp,
            flags,
            ..Flow::new(Protocol::Tcp)
        });
        println!("{what}");
        let frame = syn(sequence).bytes();
        if fast {
            assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
            assert_eq!(datapath.slots.get(9).tx_packets, 1);
        } else {
            datapath.expect_handover(EGRESS, &frame, Handover::Syn, 0);
        }
    }
    // The answer to an opener from the world.
    let mut datapath = loaded!();
    datapath.admit(Flow {
        tcp: TcpBits::SYN_RX,
        flags: inbound,
        ..Flow::new(Protocol::Tcp)
    });
    let answer = Frame {
        tcp_flags: Flags::SYN | Flags::ACK,
        ..syn(5)
    };
    assert_eq!(datapath.run(EGRESS, &answer.bytes()).action, REDIRECT);
    assert_eq!(datapath.slots.get(9).tcp, both);
}

#[test]
fn segments_are_noted_and_a_reset_is_taken_back() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Tcp));
    let bits = || TcpBits(slipgate_abi::cell::load32(slot.tcp())).0;
    let both = TcpBits::SYN_TX | TcpBits::SYN_RX;
    for (rx, tcp_flags, expected) in [
        (true, Flags::RST, both | TcpBits::RST),
        (false, Flags::ACK, both),
    ] {
        let frame = Frame {
            tcp_flags,
            ..Frame::of(Protocol::Tcp, rx)
        };
        let program = if rx { "uplink_ingress" } else { EGRESS };
        assert_eq!(datapath.run(program, &frame.bytes()).action, REDIRECT);
        assert_eq!(bits(), expected);
    }
}

#[test]
fn ttl_and_mtu_are_looked_at_before_anything_is_changed() {
    for ttl in [0, 1] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        let frame = Frame {
            ttl,
            ..Frame::tx(Protocol::Udp)
        };
        datapath.expect_handover(EGRESS, &frame.bytes(), Handover::TtlExpired, 0);
    }
    for (l3_len, fits) in [(1400, true), (1401, false)] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        datapath.hops.change(HOP, |hop| hop.mtu = 1400);
        let frame = Frame {
            payload: vec![7; l3_len - 28],
            ..Frame::tx(Protocol::Udp)
        };
        if fits {
            assert_eq!(datapath.run(EGRESS, &frame.bytes()).action, REDIRECT);
        } else {
            datapath.expect_handover(EGRESS, &frame.bytes(), Handover::TooBig, 0);
        }
    }
}

#[test]
fn without_a_valid_next_hop_the_routes_mtu_counts_too() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    let frame = Frame::tx(Protocol::Udp).bytes();
    datapath.hops.change(HOP, |hop| {
        hop.sequence = 2;
        hop.route_mtu = frame.len() as u32 - 14;
    });
    assert_eq!(datapath.run(EGRESS, &frame).action, REDIRECT);
    datapath.hops.change(HOP, |hop| hop.route_mtu -= 1);
    datapath.expect_handover(EGRESS, &frame, Handover::TooBig, 0);
}

#[test]
fn without_a_valid_next_hop_the_devices_mtu_counts() {
    // Loopback's is 65,536, so nothing is too big, and the MACs stay for the kernel to write.
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.hops.change(HOP, |hop| {
        hop.sequence = 2;
        hop.mtu = 40;
    });
    let run = datapath.run(EGRESS, &Frame::tx(Protocol::Udp).bytes());
    assert_eq!(run.action, REDIRECT);
    assert_eq!(run.frame[..6], GATEWAY_MAC);
    assert_eq!(datapath.slots.get(9).tx_packets, 1);
    // A device that is gone.
    datapath
        .slots
        .change(9, |slot| slot.uplink_ifindex = 0x7fff_0000);
    let run = datapath.run(EGRESS, &Frame::tx(Protocol::Udp).bytes());
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.only_drop(ROW), DropReason::KernelRefused);
    assert_eq!(datapath.slots.get(9).tx_packets, 1);
}

#[test]
fn gso_frames_count_as_their_segments() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Tcp));
    let frame = Frame {
        payload: vec![3; 3000],
        ..Frame::tx(Protocol::Tcp)
    };
    // Whole it is larger than the link; its segments are not.
    let run = datapath.run_gso(EGRESS, &frame.bytes(), 1400);
    assert_eq!(run.action, REDIRECT);
    assert_eq!(slipgate_abi::cell::load64(slot.tx_packets()), 3);
    assert_eq!(slipgate_abi::cell::load64(slot.tx_bytes()), 3000 + 3 * 40);
    let run = datapath.run_gso(EGRESS, &frame.bytes(), 1461);
    assert_eq!(handed(&run.frame).0.code, Handover::TooBig as u8);
}
