//! What a hit costs: `cargo test -p slipgate-control --test programs -- --ignored --nocapture cost`.
//!
//! A test run repeats on the frame as the run before left it. So the flows form a ring: the port
//! that one translates to is the one that the next translates from, addresses stay, and only the
//! TTL ends it. A ring of two stays in the cache; one over all flows in random order does not.
use std::time::Duration;

use slipgate_abi::Protocol;

use crate::{datapath::*, frame::*};

/// A frame starts with TTL 255 and stays on the fast path this many times.
const REPEAT: u32 = 250;
const ROUNDS: u32 = 4_000;

/// Rings of `len` flows each, one per remote port. Their guest address is the translated one.
fn rings(datapath: &mut Datapath, protocol: Protocol, rings: u16, len: u16) -> Vec<(u16, u16)> {
    let mut ports: Vec<u16> = (0..len).map(|port| 1_000 + port).collect();
    let mut random = Random(1);
    for i in (1..ports.len()).rev() {
        ports.swap(i, random.below(i as u32 + 1) as usize);
    }
    let mut starts = Vec::new();
    let mut slots: Vec<u32> = (0..u32::from(rings) * u32::from(len)).collect();
    for i in (1..slots.len()).rev() {
        slots.swap(i, random.below(i as u32 + 1) as usize);
    }
    for ring in 0..rings {
        for (i, &port) in ports.iter().enumerate() {
            let flow = Flow {
                slot: slots.pop().unwrap(),
                guest_port: port,
                nat_port: ports[(i + 1) % ports.len()],
                remote_port: 443 + ring,
                nat: GUEST,
                ..Flow::new(protocol)
            };
            datapath.admit(flow);
            starts.push((port, 443 + ring));
        }
    }
    for i in (1..starts.len()).rev() {
        starts.swap(i, random.below(i as u32 + 1) as usize);
    }
    starts
}

/// A small fast generator: the measurement does not hang on its quality.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % u64::from(limit)) as u32
    }
}

/// Median, ns: other work on the machine does not move it.
fn median(times: impl Iterator<Item = Duration>) -> f64 {
    let mut times: Vec<u128> = times.map(|time| time.as_nanos()).collect();
    times.sort_unstable();
    times[times.len() / 2] as f64
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_hit() {
    for (count, ring, len) in [(2, 1, 2), (100_000, 2, 50_000)] {
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            let test = crate::test_name!();
            let Some(mut datapath) = Datapath::with_slots(test, 131_072) else {
                return;
            };
            let starts = rings(&mut datapath, protocol, ring, len);
            let mut arp = vec![0; 64];
            arp[12..14].copy_from_slice(&[8, 6]);
            let base = median((0..100).map(|_| datapath.time("uplink_ingress", &arp, 10_000)));
            for (program, rx) in [("guest_egress", false), ("uplink_ingress", true)] {
                let time = median((0..ROUNDS).map(|round| {
                    let (port, remote_port) = starts[round as usize % starts.len()];
                    let mut frame = if rx {
                        Frame::rx(protocol)
                    } else {
                        Frame::tx(protocol)
                    };
                    frame.ttl = 255;
                    if rx {
                        frame.destination = GUEST;
                        frame.destination_port = port;
                        frame.source_port = remote_port;
                    } else {
                        frame.source_port = port;
                        frame.destination_port = remote_port;
                    }
                    datapath.time(program, &frame.bytes(), REPEAT)
                }));
                println!(
                    "{program} {} {count} flows: {:.0} ns over a base of {base:.0} ns",
                    protocol.name(),
                    time - base,
                );
                // Otherwise something else was measured.
                let total: u64 = (0..131_072)
                    .map(|i| {
                        let slot = datapath.slots.get(i);
                        if rx { slot.rx_packets } else { slot.tx_packets }
                    })
                    .sum();
                assert_eq!(
                    total,
                    u64::from(REPEAT * ROUNDS),
                    "{:?}",
                    datapath.drops_of(ROW)
                );
            }
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_what_is_not_ours() {
    let Some(datapath) = Datapath::for_test(crate::test_name!()) else {
        return;
    };
    let mut arp = vec![0; 64];
    arp[12..14].copy_from_slice(&[8, 6]);
    let base = median((0..100).map(|_| datapath.time("uplink_ingress", &arp, 10_000)));
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        let frame = Frame::rx(protocol).bytes();
        let time = median((0..100).map(|_| datapath.time("uplink_ingress", &frame, 10_000)));
        println!(
            "uplink_ingress {} miss: {:.0} ns over a base of {base:.0} ns",
            protocol.name(),
            time - base,
        );
    }
    assert_eq!(datapath.tally(), 0);
}
