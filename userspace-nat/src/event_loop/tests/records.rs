//! Tests of the records of flows and refusals.
use super::rig::*;
use crate::{
    clock::SECOND_NS,
    record::{Event, Events},
};
use slipgate_abi::{VmId, VmRow};
use slipgate_policy::{Action, Rule};

fn setup() -> Setup {
    Setup {
        events: Events::ALL,
        rules: vec![Rule::Match(
            Action::Deny,
            "198.51.100.0/24:81".parse().unwrap(),
        )],
        ..Setup::default()
    }
}

fn of(rig: &Rig, event: Event) -> Vec<serde_json::Value> {
    let mut records = rig.records();
    records.retain(|record| record["event"] == event.name());
    records
}

#[test]
fn a_flow_is_told_when_it_starts_and_when_it_ends_by_the_same_id() {
    let mut rig = Rig::with(setup());
    let nat = rig.connect(40_000, 1);
    let started = of(&rig, Event::FlowStart);
    assert_eq!(started.len(), 1, "a repeated SYN starts nothing");
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 1));
    assert_eq!(of(&rig, Event::FlowStart).len(), 1);
    assert!(of(&rig, Event::FlowEnd).is_empty());
    rig.close(40_000, nat, true);
    rig.pass(300 * SECOND_NS);
    let ended = of(&rig, Event::FlowEnd);
    assert_eq!(ended.len(), 1);
    let same = [
        "id",
        "vm",
        "proto",
        "guest",
        "remote",
        "nat",
        "rule",
        "rule_text",
        "verdict",
        "direction",
        "path",
    ];
    for field in same {
        assert!(!started[0][field].is_null(), "{field} of {}", started[0]);
        assert_eq!(started[0][field], ended[0][field], "{field}");
    }
    assert!(started[0]["tx_packets"].is_null() && started[0]["end"].is_null());
}

#[test]
fn a_flow_that_the_engine_carries_says_so() {
    let mut rig = Rig::with(setup());
    rig.connect(40_000, 1);
    let core = &mut rig.engine.core;
    let slot = core.nat.flows.all()[0];
    assert!(core.nat.flows.hold(&mut core.nat.datapath, slot));
    rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(SECOND_NS);
    let ended = of(&rig, Event::FlowEnd);
    assert_eq!(
        [&ended[0]["path"], &ended[0]["verdict"], &ended[0]["end"]],
        ["engine", "engine", "vm-removed"]
    );
}

#[test]
fn refusals_are_told_every_ten_seconds_and_when_their_vm_goes() {
    let mut rig = Rig::with(setup());
    rig.pass(SECOND_NS);
    for i in 0..100 {
        rig.guest(1, &syn((GUEST, 40_000 + i), (PEER, 81), 7));
    }
    rig.pass(11 * SECOND_NS);
    let told = of(&rig, Event::Refused);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0]["count"], 100);
    assert_eq!(told[0]["reason"], "rule");
    assert!(told[0]["rule_text"].as_str().unwrap().contains(":81"));
    assert_eq!(told[0]["guest"], "10.0.2.15:40099");
    assert_eq!(told[0]["remote"], "198.51.100.7:81");
    rig.pass(30 * SECOND_NS);
    assert_eq!(of(&rig, Event::Refused).len(), 1, "nothing new");

    rig.guest(2, &syn((GUEST, 40_000), (PEER, 81), 7));
    rig.tell(|engine| engine.remove_vm(VmRow::new(2), VmId::new(102)));
    let told = of(&rig, Event::Refused);
    assert_eq!((told.len(), &told[1]["count"]), (2, &1.into()));
    assert_eq!(
        told[1]["vm"],
        told[0]["vm"].as_str().unwrap().replace('1', "2")
    );
}

#[test]
fn a_log_of_ends_makes_no_other_lines() {
    let mut rig = Rig::new();
    rig.connect(40_000, 1);
    rig.guest(1, &syn((GUEST, 40_000), (PEER, 81), 7));
    rig.pass(11 * SECOND_NS);
    assert!(rig.records().is_empty());
    assert!(rig.engine.core.journal.started.is_empty());
}
