//! Property tests: the counters balance, whatever guests, the world and time do, by both families at
//! once.
use std::{cell::Cell, collections::HashSet, net::IpAddr, sync::atomic::Ordering::Relaxed};

use proptest::prelude::*;
use slipgate_abi::{DropReason, Handover, VmRow, tcp::Flags};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    control::Status,
    fake::Faults,
    packet::Ip,
    port::VirtioNetHdr,
};

#[derive(Clone, Debug)]
enum Step {
    Tcp {
        six: bool,
        row: u16,
        port: u16,
        to: u16,
        flags: u8,
        isn: u32,
    },
    Udp {
        six: bool,
        row: u16,
        port: u16,
        to: u16,
    },
    Echo {
        six: bool,
        row: u16,
        id: u16,
    },
    Reply {
        flags: u8,
        which: prop::sample::Index,
    },
    Raw {
        /// Whether it begins like a packet of IPv6.
        six: bool,
        row: u16,
        why: u8,
        flags: u8,
        bytes: Vec<u8>,
    },
    Time {
        ms: u64,
    },
    Fault {
        exists: u32,
        fails: u32,
        port: u32,
        order: u32,
    },
    Restart,
}

/// Address and port of either family.
type End = (IpAddr, u16);

/// Addresses of the guest, the peer and the host.
fn addresses(six: bool) -> (IpAddr, IpAddr, IpAddr) {
    match six {
        false => (GUEST.into(), PEER.into(), NAT.into()),
        true => (GUEST6.into(), PEER6.into(), NAT6.into()),
    }
}

fn step() -> impl Strategy<Value = Step> {
    let flags = prop::sample::select(vec![
        Flags::SYN,
        Flags::ACK,
        Flags::SYN | Flags::ACK,
        Flags::FIN | Flags::ACK,
        Flags::RST,
        Flags::SYN | Flags::FIN,
        0,
        0xff,
    ]);
    let row = 1u16..=3;
    let port = 1_000u16..1_006;
    let to = prop::sample::select(vec![80u16, 443, 53, 67]);
    prop_oneof![
        8 => (any::<bool>(), row.clone(), port.clone(), to.clone(), flags.clone(), 0u32..3)
            .prop_map(|(six, row, port, to, flags, isn)| Step::Tcp { six, row, port, to, flags, isn }),
        4 => (any::<bool>(), row.clone(), port, to)
            .prop_map(|(six, row, port, to)| Step::Udp { six, row, port, to }),
        2 => (any::<bool>(), row.clone(), 0u16..4)
            .prop_map(|(six, row, id)| Step::Echo { six, row, id }),
        6 => (flags, any::<prop::sample::Index>())
            .prop_map(|(flags, which)| Step::Reply { flags, which }),
        2 => (any::<bool>(), 0u16..5, any::<u8>(), 0u8..4, prop::collection::vec(any::<u8>(), 0..90))
            .prop_map(|(six, row, why, flags, bytes)| Step::Raw { six, row, why, flags, bytes }),
        5 => (0u64..400_000).prop_map(|ms| Step::Time { ms: ms / 7 }),
        1 => (0u32..3, 0u32..3, 0u32..2, 0u32..3).prop_map(|(exists, fails, port, order)| {
            Step::Fault { exists, fails, port, order }
        }),
        1 => Just(Step::Restart),
    ]
}

fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let setup = || Setup {
        nat_ports: 61_000..=61_003,
        max_flows: 12,
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    let mut frames = Status::default();
    let mut nats: Vec<(End, End, u8)> = Vec::new();
    for step in steps {
        match step {
            Step::Tcp {
                six,
                row,
                port,
                to,
                flags,
                isn,
            } => {
                let (guest, peer, _) = addresses(six);
                let packet = tcp((guest, port), (peer, to), flags, isn, 5, &[2, 4, 9, 9], &[]);
                rig.guest(row, &packet);
            }
            Step::Udp { six, row, port, to } => {
                let (guest, peer, _) = addresses(six);
                rig.guest(row, &udp((guest, port), (peer, to), b"data"));
            }
            Step::Echo { six, row, id } => {
                let (guest, peer, _) = addresses(six);
                rig.guest(row, &echo(guest, peer, true, id, b"data"));
            }
            Step::Reply { flags, which } if !nats.is_empty() => {
                let (nat, server, protocol) = nats[which.index(nats.len())];
                let packet = match protocol {
                    6 => tcp(server, nat, flags, 9, 9, &[], b"x"),
                    17 => udp(server, nat, b"reply"),
                    _ => echo(server.0, nat.0, false, nat.1, b"data"),
                };
                rig.world(&packet);
            }
            Step::Reply { .. } => {}
            Step::Raw {
                six,
                row,
                why,
                flags,
                mut bytes,
            } => {
                if six && let Some(first) = bytes.first_mut() {
                    *first = 0x60 | *first & 0xf;
                }
                let why = Handover::from_u8(why % 16).unwrap_or(Handover::Miss);
                rig.kernel
                    .borrow_mut()
                    .hand_over(row, why, flags, VirtioNetHdr::default(), &bytes);
                rig.turn();
            }
            Step::Time { ms } => rig.pass(ms * MILLISECOND_NS),
            Step::Fault {
                exists,
                fails,
                port,
                order,
            } => {
                rig.kernel.borrow_mut().faults = Faults {
                    order_fails: Cell::new(order),
                    insert_exists: exists,
                    insert_fails: fails,
                    port_refuses: port,
                    ..Faults::default()
                };
            }
            Step::Restart => {
                add(&mut frames, rig.engine.status());
                rig = rig.restart(&setup()).0;
            }
        }
        for sent in rig.at_world() {
            let ip = Ip::parse(&sent).unwrap();
            let (_, peer, nat) = addresses(ip.source.is_ipv6());
            let l4 = ip.payload();
            let word = |at: usize| u16::from_be_bytes([l4[at], l4[at + 1]]);
            let (local, to) = match ip.protocol {
                6 | 17 => (word(0), word(2)),
                _ => (word(4), 0),
            };
            nats.push(((nat, local), (peer, to), ip.protocol));
        }
        rig.at_guest();
        rig.assert_paired();
        let kernel = rig.kernel.borrow();
        let flows = &rig.engine.core.nat.flows;
        let worlds: Vec<_> = flows.all().iter().filter_map(|s| flows.entry(*s)).collect();
        let linked = worlds
            .iter()
            .filter(|e| flows.by_world(&e.world()).is_some());
        let distinct: HashSet<_> = linked.clone().map(|e| e.world()).collect();
        prop_assert_eq!(distinct.len() * 2, kernel.flow_entries());
        for row in 1..=3 {
            prop_assert!(flows.count(VmRow::new(row)) <= 12);
        }
    }
    rig.kernel.borrow_mut().faults = Faults::default();
    // Whatever lives is silent for longer than anything may be; then what ends, ends.
    rig.kernel.borrow_mut().now_ns += 3 * 3_600 * SECOND_NS;
    rig.pass(2 * SECOND_NS);
    rig.kernel.borrow_mut().now_ns += 120 * SECOND_NS;
    rig.pass(2 * SECOND_NS);
    rig.assert_empty();
    add(&mut frames, rig.engine.status());
    prop_assert_eq!(rig.engine.core.nat.flows.ports.sizes(), (0, 0));
    each_frame_once(&rig, &frames)?;
    balance(&rig)
}

fn add(sum: &mut Status, of: Status) {
    sum.frames_read += of.frames_read;
    sum.frames_returned += of.frames_returned;
    sum.frames_dropped += of.frames_dropped;
    sum.frames_consumed += of.frames_consumed;
    sum.frames_unsent += of.frames_unsent;
}

/// Each frame that came over the port was given back, dropped for a reason, or taken by a service;
/// and `DROPS` has exactly the dropped ones.
fn each_frame_once(rig: &Rig, frames: &Status) -> Result<(), TestCaseError> {
    let handled = frames.frames_returned + frames.frames_dropped + frames.frames_consumed;
    prop_assert_eq!(handled, frames.frames_read);
    let kernel = rig.kernel.borrow();
    let mut dropped = 0;
    let mut handed_over = 0;
    for row in 0..5 {
        let (_, drops) = kernel.stats(row).snapshot();
        dropped += DropReason::ALL
            .iter()
            .map(|r| drops.get(*r).packets)
            .sum::<u64>();
        for from_world in [false, true] {
            handed_over += kernel.vm(row).under_way(from_world).0.load(Relaxed);
        }
    }
    prop_assert_eq!(handed_over, frames.frames_read);
    prop_assert_eq!(
        dropped,
        kernel.dropped + frames.frames_dropped + frames.frames_unsent
    );
    Ok(())
}

/// Every flow that was admitted has ended and is recorded once; what the kernel counted is in the
/// records and in the VM's counters alike. Connections to port 53 are relayed, and counted apart.
fn balance(rig: &Rig) -> Result<(), TestCaseError> {
    let records = rig.records();
    let ids: HashSet<&str> = records.iter().filter_map(|r| r["id"].as_str()).collect();
    prop_assert_eq!(ids.len(), records.len());
    for row in 1..=3u16 {
        let (counters, drops) = rig.kernel.borrow().stats(row).snapshot();
        let name = format!("vm{row}");
        let mine: Vec<_> = records
            .iter()
            .filter(|r| r["vm"] == name.as_str() && r["path"] != "relay")
            .collect();
        prop_assert_eq!(counters.admitted, mine.len() as u64);
        prop_assert_eq!(counters.ended, mine.len() as u64);
        prop_assert_eq!(counters.lost_after_redirect, 0);
        let sum = |field: &str| mine.iter().filter_map(|r| r[field].as_u64()).sum::<u64>();
        prop_assert_eq!(counters.ended_tx.packets, sum("tx_packets"));
        prop_assert_eq!(counters.ended_rx.bytes, sum("rx_bytes"));
        let kernel = rig.kernel.borrow();
        let vm = kernel.vm(row);
        for from_world in [false, true] {
            let (handed_over, taken_in) = vm.under_way(from_world);
            prop_assert_eq!(handed_over.load(Relaxed), taken_in.load(Relaxed));
            let all = kernel.owner_row(0);
            let (handed_over, taken_in) = all.under_way(from_world);
            prop_assert_eq!(handed_over.load(Relaxed), taken_in.load(Relaxed));
        }
        prop_assert_eq!(drops.get(DropReason::StaleVm).packets, 0);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn the_books_balance(steps in prop::collection::vec(step(), 1..120)) {
        run(steps)?;
    }
}
