//! Random frames: each is counted once, in a flow, under a drop reason, as handed over or as
//! answered, or not at all if it is the host's.
use proptest::prelude::*;
use slipgate_abi::{Command, PortHeader, Protocol, Verdict, cell, tcp::Flags};

use crate::{datapath::*, frame::*, pool::Datapath};

#[derive(Debug, Clone)]
struct Mangled {
    frame: Vec<u8>,
    gso_size: u32,
}

/// A frame of the flow with some bytes changed, removed or added.
fn mangled() -> impl Strategy<Value = Mangled> {
    let protocols = prop_oneof![
        Just(Protocol::Tcp),
        Just(Protocol::Udp),
        Just(Protocol::Icmp)
    ];
    let flips = prop::collection::vec((0usize..90, any::<u8>()), 0..4);
    let kinds = prop_oneof![
        4 => (protocols, 0u8..3, any::<bool>(), 0usize..200).prop_map(|(protocol, kind, syn, len)| {
            let frame = match kind {
                0 => Frame::tx(protocol),
                1 => Frame::rx(protocol),
                _ => icmp_error(3, &Frame { source: NAT, source_port: 61_001, ..Frame::tx(protocol) }),
            };
            let tcp_flags = if syn { Flags::SYN } else { Flags::ACK };
            let payload = if kind == 2 { frame.payload.clone() } else { vec![1; len] };
            Frame { tcp_flags, payload, ..frame }.bytes()
        }),
        1 => Just(arp(1, GUEST, GATEWAY)),
        1 => prop::collection::vec(any::<u8>(), 14..200),
        2 => (any::<bool>(), 0u8..8, any::<bool>()).prop_map(|(rx, code, syn)| {
            let frame = if rx { Frame::rx(Protocol::Tcp) } else { Frame::tx(Protocol::Tcp) };
            let tcp_flags = if syn { Flags::SYN } else { Flags::ACK };
            let header = PortHeader {
                code,
                flags: 0,
                vm_row: ROW as u16,
                id: if code == 4 { HOP } else { VM },
            };
            with_header(header, Frame { tcp_flags, ..frame }.bytes())
        }),
    ];
    let gso = prop_oneof![3 => Just(0u32), 1 => 1u32..60];
    (kinds, flips, 0usize..300, gso).prop_map(|(mut frame, flips, cut, gso_size)| {
        for (at, with) in flips {
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= with;
            }
        }
        if cut < 100 {
            // A test run takes no less.
            frame.truncate(cut.max(34));
        }
        Mangled { frame, gso_size }
    })
}

fn is_rewrite_of(before: &[u8], after: &[u8]) -> bool {
    after.len() == before.len()
        && after[34 + 20.min(after.len() - 34)..] == before[34 + 20.min(before.len() - 34)..]
}

#[test]
fn each_frame_is_counted_once() {
    let Some(mut datapath) = Datapath::for_test(crate::test_name!()) else {
        return;
    };
    for (slot, protocol) in [(1, Protocol::Tcp), (2, Protocol::Udp), (3, Protocol::Icmp)] {
        datapath.admit(Flow {
            slot,
            ..Flow::new(protocol)
        });
    }
    let programs = ["guest_egress", "uplink_ingress", "engine_port"];
    let runner_config = ProptestConfig {
        cases: 3_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut seen = std::collections::HashMap::<(&str, i32), u64>::new();
    let mut runner = prop::test_runner::TestRunner::new(runner_config);
    let seen_cell = std::cell::RefCell::new(&mut seen);
    let verdicts = prop_oneof![
        5 => Just(Verdict::Fast),
        1 => Just(Verdict::Engine),
        1 => Just(Verdict::Drop),
        1 => Just(Verdict::Free)
    ];
    runner
        .run(&(mangled(), verdicts), |(input, verdict)| {
            prop_assume!(input.frame[12..14] != [0x86, 0xdd] || input.frame.len() >= 54);
            prop_assume!(input.frame[12..14] != [8, 0] || input.frame.len() >= 34);
            for slot in 1..4 {
                datapath.slot(slot).set_verdict(verdict);
            }
            for program in programs {
                let before = tallies(&datapath);
                let run = datapath.run_gso(program, &input.frame, input.gso_size);
                let after = tallies(&datapath);
                let changed = before.iter().zip(&after).filter(|(b, a)| b != a).count();
                // A frame of the engine's that goes out as it is is the engine's to count.
                let as_is = program == "engine_port" && matches!(input.frame[4], 1 | 4 | 5);
                // So is one with an order that can't be carried out.
                let is_order = program == "engine_port" && is_order(&input.frame);
                match run.action {
                    UNSPEC => {
                        prop_assert_eq!(program, "uplink_ingress");
                        prop_assert_eq!(changed, 0);
                        prop_assert_eq!(&run.frame, &input.frame);
                    }
                    SHOT if is_order => prop_assert_eq!(changed, 0),
                    SHOT => prop_assert_eq!(changed, 1, "{:?}", datapath.drops_of(ROW)),
                    REDIRECT if as_is => prop_assert_eq!(changed, 0),
                    REDIRECT => {
                        prop_assert_eq!(changed, 1);
                        prop_assert!(
                            run.frame[14..] == input.frame[14..]
                                || is_rewrite_of(&input.frame, &run.frame)
                                || run.frame[12..14] == [8, 6]
                        );
                    }
                    other => prop_assert!(false, "{} returned {}", program, other),
                }
                *seen_cell
                    .borrow_mut()
                    .entry((program, run.action))
                    .or_default() += 1;
                let vm = datapath.vms.get(ROW);
                datapath.vms.change(ROW, |row| {
                    row.taken_in = vm.handed_over;
                    row.world_taken_in = vm.world_handed_over;
                });
                prop_assert!(cell::load32(datapath.slot(1).generation()) == 1);
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    println!("{seen:?}");
    // The generator reaches every outcome.
    for key in [
        ("guest_egress", SHOT),
        ("guest_egress", REDIRECT),
        ("uplink_ingress", UNSPEC),
        ("uplink_ingress", REDIRECT),
        ("uplink_ingress", SHOT),
        ("engine_port", SHOT),
        ("engine_port", REDIRECT),
    ] {
        assert!(
            seen.get(&key).is_some_and(|&count| count > 5),
            "{key:?} {seen:?}"
        );
    }
}

/// Whether the engine's header asks for a flow to be opened.
fn is_order(frame: &[u8]) -> bool {
    let header = frame.first_chunk().and_then(PortHeader::decode);
    header.is_some_and(|header| header.code == Command::Open as u8)
}

/// Returns one number per place in which a packet may be counted.
fn tallies(datapath: &Datapath) -> Vec<u64> {
    let mut tallies = Vec::new();
    for row in [0, ROW] {
        let drops = datapath.drops.get(row);
        tallies.extend(
            slipgate_abi::DropReason::ALL
                .iter()
                .map(|&reason| drops.get(reason).packets),
        );
    }
    for slot in 1..4 {
        let slot = datapath.slots.get(slot);
        tallies.extend([slot.tx_packets, slot.rx_packets]);
    }
    let vm = datapath.vms.get(ROW);
    tallies.extend([vm.handed_over, vm.world_handed_over, vm.arp_answered]);
    tallies
}
