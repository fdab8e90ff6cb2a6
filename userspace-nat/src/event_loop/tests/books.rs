//! Tests of the counters by name, and of counts that must survive a death in the middle of
//! counting.
use std::io;

use slipgate_abi::{Counter, Ip4, Refusal, Verdict, count::COUNTED_RULES};

use super::rig::*;
use crate::clock::SECOND_NS;
use slipgate_policy::{Action, Rule};

fn deny(pattern: &str) -> Rule {
    Rule::Match(Action::Deny, pattern.parse().unwrap())
}

#[test]
fn refusals_are_counted_by_rule() {
    let mut rig = Rig::with(Setup {
        rules: vec![deny("198.51.100.0/24:81"), deny("198.51.100.0/24:82")],
        ..Setup::default()
    });
    for (port, times) in [(82, 3), (81, 2), (80, 4)] {
        for i in 0..times {
            rig.guest(1, &syn((GUEST, 40_000 + i), (PEER, port), 7));
        }
    }
    // The default that protects the host's own network, by its own number.
    let octets = [10, 77, 0, 1];
    let private = (Ip4 { octets }, 80);
    rig.guest(1, &syn((GUEST, 41_000), private, 7));
    let counters = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(counters.refused.rule, 5);
    assert_eq!(counters.refused.protected, 1);
    let texts: Vec<_> = rig
        .engine
        .core
        .rules
        .judge
        .borrow()
        .policies()
        .texts()
        .collect();
    let named: Vec<_> = counters
        .refused_by_rule
        .iter()
        .filter(|by| by.rule != 0)
        // The rig's rules begin at 10.
        .map(|by| (texts[by.rule as usize - 1 - 10].as_str(), by.flows))
        .collect();
    assert_eq!(named.len(), 3, "{named:?}");
    assert!(named[0].0.contains(":82") && named[0].1 == 3, "{named:?}");
    assert!(named[1].0.contains(":81") && named[1].1 == 2, "{named:?}");
    assert_eq!(named[2].1, 1);
    assert_eq!(counters.refused_by_other_rules, 0);
    let other = rig.kernel.borrow().stats(2).snapshot().0;
    assert!(other.refused_by_rule.iter().all(|by| by.rule == 0));
}

#[test]
fn more_rules_than_there_are_places_are_counted_together() {
    let rules = (0..40).map(|i| deny(&format!("198.51.100.0/24:{}", 1_000 + i)));
    let mut rig = Rig::with(Setup {
        rules: rules.collect(),
        ..Setup::default()
    });
    for port in 1_000..1_040 {
        rig.guest(1, &syn((GUEST, 40_000), (PEER, port), 7));
    }
    let counters = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(
        counters.refused_by_rule.map(|by| by.flows),
        [1; COUNTED_RULES]
    );
    assert_eq!(counters.refused_by_other_rules, 40 - COUNTED_RULES as u64);
    assert_eq!(rig.refused(1, Refusal::Rule), 40);
}

/// It dies when so many of the counts have been moved; the slot is not free yet.
#[test]
fn a_death_between_moving_counts_and_freeing_the_slot_counts_nothing_twice() {
    for journalled in [false, true] {
        let mut rig = Rig::new();
        rig.connect(40_000, 7);
        rig.connect(40_001, 7);
        let [slot, other] = rig.kernel.borrow().slots_in_use()[..] else {
            panic!("two slots")
        };
        {
            let mut kernel = rig.kernel.borrow_mut();
            kernel.slot(slot).set_verdict(Verdict::Closing);
            for tuple in [
                kernel.slot(slot).guest_tuple(),
                kernel.slot(slot).world_tuple(),
            ] {
                kernel.flows.remove(&tuple);
            }
            if journalled {
                let tx = Counter {
                    packets: 2,
                    bytes: 88,
                };
                let rx = Counter {
                    packets: 1,
                    bytes: 44,
                };
                kernel.stats(1).ended(slot, 1, tx, rx);
            }
        }
        let (mut rig, _) = rig.restart(&Setup::default());
        let counters = rig.kernel.borrow().stats(1).snapshot().0;
        assert_eq!((counters.ended, counters.ended_tx.packets), (1, 2));
        assert_eq!(counters.ended_rx.packets, 1);
        // What is added later is not taken back: neither this flow's nor another's.
        rig.kernel
            .borrow()
            .slot(other)
            .set_verdict(Verdict::Closing);
        let (mut rig2, _) = {
            rig.pass(SECOND_NS);
            rig.restart(&Setup::default())
        };
        rig2.pass(3 * 3_600 * SECOND_NS);
        let counters = rig2.kernel.borrow().stats(1).snapshot().0;
        assert_eq!((counters.ended, counters.ended_tx.packets), (2, 4));
        rig2.assert_empty();
    }
}

/// A log outlives the maps: what other maps' flows were called says nothing of these.
#[test]
fn a_record_of_other_maps_is_not_taken_for_this_ones() {
    for (instance, records) in [(0, 1), (1, 2)] {
        let mut rig = Rig::new();
        rig.connect(40_000, 7);
        let (slot, ours) = {
            let mut kernel = rig.kernel.borrow_mut();
            let slot = kernel.slots_in_use()[0];
            kernel.slot(slot).set_verdict(Verdict::Closing);
            kernel.flows.clear();
            (slot, kernel.instance)
        };
        let line = format!("{{\"id\":\"{:08x}-{slot}-1\"}}\n", ours ^ instance);
        rig.log.0.lock().unwrap().extend_from_slice(line.as_bytes());
        let (rig, found) = rig.restart(&Setup::default());
        assert_eq!(found.ended, 1);
        assert_eq!(rig.records().len(), records);
        let id = format!("{ours:08x}-{slot}-1");
        assert_eq!(rig.records()[records - 1]["id"], id);
    }
}

struct Full;

impl io::Write for Full {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::StorageFull.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As an empty file.
impl io::Read for Full {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl io::Seek for Full {
    fn seek(&mut self, _: io::SeekFrom) -> io::Result<u64> {
        Ok(0)
    }
}

#[test]
fn records_that_find_no_room_are_counted() {
    let mut rig = Rig::new();
    rig.send(|engine| engine.set_flow_log(Full));
    for port in 0..3 {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
    }
    rig.pass(310 * SECOND_NS);
    assert_eq!(rig.flows(), 0);
    assert_eq!(rig.kernel.borrow().stats(0).snapshot().0.records_lost, 3);
    assert!(rig.records().is_empty());
}
