//! Rules by name at admission: what an answer opened, to whom, and what is said of it.
use super::rig::*;
use crate::{
    clock::SECOND_NS,
    datapath::NameMap,
    dns::{
        NamePolicy,
        chain::tests::{a, answer},
    },
    name_gate::{ByRules, MAX_PER_VM},
    state::Core,
};
use slipgate_abi::{Protocol, Refusal, SlotIndex, VmId, VmRow, maps::MAX_NAMES};
use slipgate_model::NameCounts;
use slipgate_policy::{Action, FLOOR_S, Name, Rule, wire};

const NAME: &str = "api.ok.test";

fn setup() -> Setup {
    let rule = |text| Rule::parse(Action::Allow, text).unwrap();
    Setup {
        default: Action::Deny,
        rules: vec![rule("*.ok.test:443/tcp")],
        ..Setup::default()
    }
}

/// The VM in a row is told that the peer is [`NAME`]'s.
fn tell(rig: &Rig, row: u32, ttl: u32) {
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let name = wire(NAME).unwrap();
    let now_ns = rig.kernel.borrow().now_ns;
    let told = answer(NAME, &[a(NAME, ttl, PEER.octets)]);
    assert_eq!(dns.question(VmId::new(100 + row), Name(&name), 1), Ok(()));
    let verdict = dns.answer(VmId::new(100 + row), Name(&name), &told, 0, now_ns);
    assert_eq!(verdict, Ok(()));
}

#[test]
fn an_address_is_open_to_the_vm_that_was_told_for_as_long_as_it_was_told() {
    let mut rig = Rig::with(setup());
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    assert!(rig.at_world().is_empty(), "a pinned address");
    tell(&rig, 1, 0);
    let nat = rig.connect(40_001, 1);
    rig.guest(1, &syn((GUEST, 40_002), (PEER, 80), 7));
    rig.guest(2, &syn((GUEST, 40_003), SERVER, 7));
    assert!(rig.at_world().is_empty(), "another port, another VM");
    assert_eq!(rig.refused(1, Refusal::Default), 2);
    assert_eq!(rig.refused(2, Refusal::Default), 1);

    rig.pass(u64::from(FLOOR_S) * SECOND_NS);
    rig.guest(1, &syn((GUEST, 40_004), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::Default), 3, "the opening is over");
    assert_eq!(
        rig.guest(1, &ack((GUEST, 40_001), SERVER, 0, 2, 9_001)),
        Handling::Fast
    );
    assert_eq!(rig.flows(), 1, "what lives goes on");
    rig.close(40_001, nat, true);
    rig.pass(300 * SECOND_NS);
    let records = rig.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["dns_name"], NAME);
    assert_eq!(records[0]["rule_text"], "--allow *.ok.test:443/tcp");
    assert!(
        rig.engine
            .core
            .rules
            .names_of_flows(SlotIndex::new(0))
            .next()
            .is_none()
    );
}

#[test]
fn flows_by_name_outlive_the_engine() {
    let mut rig = Rig::with(setup());
    tell(&rig, 1, 3_600);
    rig.connect(40_001, 1);
    let (mut rig, adoption) = rig.restart(&setup());
    assert_eq!((adoption.live, adoption.refused), (1, 0));
    assert_eq!(
        rig.guest(1, &ack((GUEST, 40_001), SERVER, 0, 2, 9_001)),
        Handling::Fast
    );
    let closed = Setup {
        rules: Vec::new(),
        ..setup()
    };
    let (_, adoption) = rig.restart(&closed);
    assert_eq!(
        (adoption.live, adoption.refused, adoption.reopened),
        (0, 1, 0),
        "the rule is gone"
    );
}

#[test]
fn what_dns_opened_is_open_again_after_a_restart_for_what_is_left() {
    let mut rig = Rig::with(setup());
    tell(&rig, 1, 100);
    rig.pass(40 * SECOND_NS);
    let names = |rig: &Rig| rig.engine.core.nat.datapath.remembered_names().len();
    assert_eq!(names(&rig), 1);
    let (mut rig, adoption) = rig.restart(&setup());
    assert_eq!(adoption.reopened, 1);
    rig.connect(40_001, 1);
    rig.guest(2, &syn((GUEST, 40_002), SERVER, 7));
    rig.guest(1, &syn((GUEST, 40_003), (PEER, 80), 7));
    assert_eq!(rig.flows(), 1, "to the VM that was told, by the rule");
    // Other rules: what they do not let in is forgotten, for good.
    let other = Setup {
        rules: vec![Rule::parse(Action::Allow, "*.other.test").unwrap()],
        ..setup()
    };
    let (rig, adoption) = rig.restart(&other);
    assert_eq!((adoption.reopened, names(&rig)), (0, 0));
    let (mut rig, adoption) = rig.restart(&setup());
    assert_eq!(adoption.reopened, 0);

    tell(&rig, 1, 100);
    rig.pass(99 * SECOND_NS);
    let (mut rig, adoption) = rig.restart(&setup());
    assert_eq!((adoption.reopened, names(&rig)), (1, 1));
    rig.pass(2 * SECOND_NS);
    let refused = rig.refused(1, Refusal::Default);
    rig.guest(1, &syn((GUEST, 40_004), SERVER, 7));
    let now_refused = rig.refused(1, Refusal::Default);
    assert_eq!(
        now_refused,
        refused + 1,
        "the time left, and no floor again"
    );
    assert_eq!(names(&rig), 0, "forgotten when it ends");
}

#[test]
fn a_full_map_loses_what_is_remembered_and_nothing_that_is_open() {
    let mut rig = Rig::with(setup());
    rig.kernel.borrow_mut().faults.names_capacity = 3;
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let name = wire(NAME).unwrap();
    let addresses: Vec<_> = (1..=10).map(|i| a(NAME, 600, [203, 0, 112, i])).collect();
    let now_ns = rig.kernel.borrow().now_ns;
    let _ = dns.answer(
        VmId::new(101),
        Name(&name),
        &answer(NAME, &addresses),
        0,
        now_ns,
    );
    rig.turn();
    assert_eq!(
        rig.engine
            .core
            .rules
            .judge
            .borrow()
            .counts(VmId::new(101))
            .open,
        10
    );
    let (rig, adoption) = rig.restart(&setup());
    assert_eq!(adoption.reopened, 3);
    assert_eq!(
        rig.engine
            .core
            .rules
            .judge
            .borrow()
            .counts(VmId::new(101))
            .open,
        3
    );
}

#[test]
fn why_judges_a_name_as_the_guest_would_come_there() {
    let mut rig = Rig::with(setup());
    let why = |rig: &mut Rig, name: Option<&str>, port| {
        let to = slipgate_policy::Destination {
            addr: name.map_or(PEER.into(), |_| [0; 4].into()),
            port,
            protocol: Protocol::Tcp,
        };
        let name = name.map(str::to_owned);
        rig.tell(move |engine| engine.why(VmRow::new(1), to, name.as_deref()))
    };
    let answer = why(&mut rig, Some(NAME), 443);
    assert!(
        answer.admitted && answer.outcome.contains("when the guest asks"),
        "{answer:?}"
    );
    assert!(!why(&mut rig, None, 443).admitted);
    // Port 53 is slipgate's, by whatever name; here it answers what a rule lets be asked.
    for name in [Some(NAME), Some("evil.test"), None] {
        let answer = why(&mut rig, name, 53);
        assert!(
            answer.admitted && answer.outcome.contains("slipgate's resolver"),
            "{answer:?}"
        );
    }
    let mut shut = Rig::with(Setup {
        default: Action::Deny,
        ..Setup::default()
    });
    for name in [Some(NAME), None] {
        let answer = why(&mut shut, name, 53);
        assert!(!answer.admitted, "{answer:?}");
        assert!(answer.outcome.contains("REFUSED, whatever"), "{answer:?}");
        assert_eq!(answer.rule, "--default deny");
    }
    let answer = why(&mut rig, Some("evil.test"), 443);
    assert!(
        !answer.admitted && answer.outcome.contains("not resolved"),
        "{answer:?}"
    );
    tell(&rig, 1, 60);
    for name in [Some("API.ok.test."), None] {
        let answer = why(&mut rig, name, 443);
        assert!(answer.admitted && answer.via.is_some(), "{answer:?}");
        assert_eq!(answer.rule, "--allow *.ok.test:443/tcp");
        assert!(answer.explanation.contains(NAME), "{answer:?}");
    }
    assert!(!why(&mut rig, Some(NAME), 80).admitted);
}

#[test]
fn names_are_read_in_pages_that_fit_a_message() {
    let mut rig = Rig::with(setup());
    let long = format!(
        "{}.ok.test",
        ["a".repeat(60), "b".repeat(60), "c".repeat(60)].join(".")
    );
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let asked: &'static str = long.leak();
    let wired = wire(asked).unwrap();
    let told = answer(asked, &[a(asked, 60, PEER.octets)]);
    let _ = dns.answer(
        VmId::new(101),
        Name(&wired),
        &told,
        0,
        rig.kernel.borrow().now_ns,
    );
    for port in 0..200 {
        rig.guest(1, &syn((GUEST, 40_000 + port), SERVER, 7));
    }
    assert_eq!(rig.flows(), 200);
    let (mut from, mut flows, mut pages) = (0, 0, 0);
    loop {
        let page = rig.engine.inventory(from);
        assert!(serde_json::to_vec(&page).unwrap().len() < 60_000);
        if pages == 0 {
            assert_eq!(page.vms[0].0, "vm1");
            assert_eq!(
                page.vms[0].1,
                NameCounts {
                    open: 1,
                    ..NameCounts::default()
                }
            );
        }
        flows += page.flows.len();
        pages += 1;
        match page.next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert!(pages > 1);
    assert_eq!(flows, 200);
}

#[test]
fn a_name_of_thousands_of_addresses_is_explained_in_a_line() {
    let mut rig = Rig::with(setup());
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let name = wire(NAME).unwrap();
    let now_ns = rig.kernel.borrow().now_ns;
    for third in 0..4u8 {
        let of = |last| a(NAME, 600, [198, 51, third, last]);
        let told = answer(NAME, &(1..=20).map(of).collect::<Vec<_>>());
        let verdict = dns.answer(VmId::new(101), Name(&name), &told, 0, now_ns);
        assert_eq!(verdict, Ok(()));
    }
    let to = slipgate_policy::Destination {
        addr: std::net::Ipv4Addr::UNSPECIFIED.into(),
        port: 443,
        protocol: Protocol::Tcp,
    };
    let answer = rig.tell(move |engine| engine.why(VmRow::new(1), to, Some(NAME)));
    assert!(answer.admitted, "{answer:?}");
    let first = answer.explanation.lines().next().unwrap();
    assert_eq!(first.matches("198.51.").count(), 8, "{first}");
    assert!(first.ends_with(" and 72 more."), "{first}");
}

#[test]
fn a_vm_leaves_the_others_room_among_what_is_remembered() {
    let mut rig = Rig::with(setup());
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let name = wire(NAME).unwrap();
    let now_ns = rig.kernel.borrow().now_ns;
    let mut tell = |rig: &mut Rig, vm: VmId, addresses: usize| {
        for at in (0..addresses as u32).step_by(128) {
            let of = |n: u32| a(NAME, 600, (0xc633_0000 + at + n).to_be_bytes());
            let told = answer(NAME, &(0..128).map(of).collect::<Vec<_>>());
            let verdict = dns.answer(vm, Name(&name), &told, 0, now_ns);
            assert_eq!(verdict, Ok(()));
            let Core {
                nat, rules, vms, ..
            } = &mut rig.engine.core;
            rules.remember_openings(&mut nat.datapath, vms.len());
        }
    };
    let remembered = |rig: &Rig, vm| {
        let kernel = rig.kernel.borrow();
        kernel.names.keys().filter(|key| key.vm == vm).count()
    };
    // All but the reserve goes to whoever comes first.
    for vm in [201, 202, 101] {
        tell(&mut rig, VmId::new(vm), MAX_PER_VM);
    }
    assert_eq!(remembered(&rig, 202), MAX_PER_VM);
    assert!(remembered(&rig, 101) >= MAX_PER_VM - 128);
    // Of the reserve each has its part.
    tell(&mut rig, VmId::new(203), MAX_PER_VM);
    tell(&mut rig, VmId::new(102), 128);
    assert_eq!(remembered(&rig, 102), 128);
    let part = MAX_NAMES as usize / 4 / rig.engine.core.vms.len();
    assert!((part - 128..=part).contains(&remembered(&rig, 203)));
    rig.engine
        .core
        .rules
        .judge
        .borrow_mut()
        .forget(VmId::new(101));
    rig.turn();
    assert_eq!(remembered(&rig, 101), 0);
}

#[test]
fn names_stay_open_when_a_former_generation_ends() {
    let mut rig = Rig::with(setup());
    tell(&rig, 1, 3_600);
    rig.connect(40_001, 1);
    let cut = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
    assert_eq!(cut.flows, 1);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 0);
    rig.at_world();
    // Its guest remembers the address, and does not ask again.
    rig.connect(40_002, 1);
    rig.guest(1, &syn((GUEST, 40_003), (PEER, 80), 7));
    assert_eq!(rig.flows(), 1, "by the name, and its rule");
    assert_eq!(rig.refused(1, Refusal::Default), 1);
    // A successor of this engine knows it too.
    let (mut rig, adoption) = rig.restart(&setup());
    assert_eq!((adoption.live, adoption.reopened), (1, 1));
    rig.connect(40_004, 1);
}
