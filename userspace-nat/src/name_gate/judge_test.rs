use std::{fmt::Write as _, time::Duration};

use nix::time::{ClockId, clock_gettime};
use proptest::prelude::*;
use slipgate_abi::{Protocol, Refusal, VmId};

use super::*;
use crate::{
    clock::SECOND_NS,
    dns::{
        ExtendedError, NamePolicy, NameVerdict,
        chain::tests::{Written, a, answer, cname, https},
        message::Type,
    },
    name_gate::MAX_PER_VM,
};
use slipgate_policy::{Action, DenyFile, LocalAddresses, Rule, wire};

pub(super) const VM: VmId = VmId::new(7);
const ADDRESS: [u8; 4] = [203, 0, 113, 10];

pub(super) fn judge(default: Action, rules: &[&str]) -> ByRules {
    let rules = rules.iter().map(|rule| match rule.split_once(' ') {
        Some(("deny", text)) => Rule::parse(Action::Deny, text).unwrap(),
        Some(("allow", text)) => Rule::parse(Action::Allow, text).unwrap(),
        _ => Rule::DenyFile(Box::new(DenyFile::parse("f", rule).unwrap())),
    });
    let mut policy = Policy::new(default, rules.collect());
    policy.set_local(&LocalAddresses {
        host: vec!["198.51.100.1".parse().unwrap()],
        guests: Vec::new(),
    });
    ByRules(Judge::shared(policy))
}

pub(super) fn asks(by: &mut ByRules, name: &str, qtype: u16) -> NameVerdict {
    by.question(VM, Name(&wire(name).unwrap()), qtype)
}

pub(super) fn told(by: &mut ByRules, name: &str, records: &[Written]) -> NameVerdict {
    told_as(by, VM, name, records)
}

pub(super) fn told_as(by: &mut ByRules, vm: VmId, name: &str, records: &[Written]) -> NameVerdict {
    by.answer(vm, Name(&wire(name).unwrap()), &answer(name, records), 0, 0)
}

pub(super) fn to(addr: [u8; 4], port: u16) -> Destination {
    Destination {
        addr: addr.into(),
        port,
        protocol: Protocol::Tcp,
    }
}

pub(super) fn refusal(by: &ByRules, addr: [u8; 4], port: u16) -> Option<Refusal> {
    by.0.borrow().decide(VM, to(addr, port), 1).decision.refusal
}

pub(super) fn error(verdict: NameVerdict) -> ExtendedError {
    match verdict {
        Err(error) => error,
        Ok(()) => panic!("allowed"),
    }
}

#[test]
fn a_name_that_no_rule_allows_is_not_asked_for_and_the_rule_is_named() {
    let mut by = judge(Action::Deny, &["deny bad.ok.test", "allow *.ok.test"]);
    assert_eq!(asks(&mut by, "A.OK.test", Type::A), Ok(()));
    assert_eq!(asks(&mut by, "x.y.ok.test", Type::A), Ok(()));
    for name in ["ok.test", "notok.test", "test", "x.bad.other"] {
        let error = error(asks(&mut by, name, Type::A));
        assert_eq!(error.code, ExtendedError::PROHIBITED, "{name}");
        assert!(error.text.contains("default is deny"), "{}", error.text);
    }
    let error = error(asks(&mut by, "bad.ok.test", Type::A));
    assert_eq!(error.code, ExtendedError::BLOCKED);
    assert!(
        error.text.contains("rule 1, --deny bad.ok.test"),
        "{}",
        error.text
    );
    let counts = by.0.borrow().counts(VM);
    assert_eq!(counts.refused_names, 5);
    assert_eq!(counts.refused_by[1].rule, "--deny bad.ok.test");
    assert_eq!(counts.refused_by[1].last, "bad.ok.test");
}

#[test]
fn types_that_carry_anything_need_a_default_of_allow() {
    let mut strict = judge(Action::Deny, &["allow ok.test"]);
    let mut open = judge(Action::Allow, &["deny bad.test"]);
    for qtype in [Type::TXT, Type::NULL, Type::ANY] {
        error(asks(&mut strict, "ok.test", qtype));
        assert_eq!(asks(&mut open, "ok.test", qtype), Ok(()));
    }
    assert_eq!(asks(&mut strict, "ok.test", Type::HTTPS), Ok(()));
    assert_eq!(strict.0.borrow().counts(VM).refused_types, 3);
}

#[test]
fn an_answer_opens_the_rules_ports_to_the_vm_that_asked() {
    let mut by = judge(Action::Deny, &["allow *.ok.test:443/tcp"]);
    assert_eq!(refusal(&by, ADDRESS, 443), Some(Refusal::Default), "pinned");
    let _ = told(&mut by, "a.ok.test", &[a("a.ok.test", 0, ADDRESS)]);
    assert_eq!(refusal(&by, ADDRESS, 443), None);
    assert_eq!(refusal(&by, ADDRESS, 80), Some(Refusal::Default));
    let judge = by.0.borrow();
    let verdict = judge.decide(VM, to(ADDRESS, 443), 1);
    assert_eq!(&*verdict.name.unwrap().name, "a.ok.test");
    assert!(
        !judge
            .decide(VmId::new(VM.get() + 1), to(ADDRESS, 443), 1)
            .decision
            .is_allowed()
    );
    let said = judge.explain(VM, to(ADDRESS, 443), 1);
    assert!(said.contains("--allow *.ok.test:443/tcp"), "{said}");
    assert!(said.contains("an address of a.ok.test"), "{said}");
}

#[test]
fn rules_by_address_that_deny_beat_names_wherever_they_stand() {
    let mut by = judge(
        Action::Deny,
        &["allow ok.test", "deny 203.0.113.0/24:25", "203.0.113.11"],
    );
    let records = [
        a("ok.test", 60, ADDRESS),
        a("ok.test", 60, [203, 0, 113, 11]),
    ];
    assert_eq!(told(&mut by, "ok.test", &records), Ok(()));
    assert_eq!(refusal(&by, ADDRESS, 80), None);
    assert_eq!(refusal(&by, ADDRESS, 25), Some(Refusal::Rule));
    assert_eq!(refusal(&by, [203, 0, 113, 11], 80), Some(Refusal::Rule));
}

#[test]
fn of_the_rules_about_a_name_the_first_decides_and_any_name_that_allows_is_enough() {
    let rules = [
        "deny a.test:25",
        "allow a.test",
        "deny *.test",
        "allow 192.0.2.0/24",
    ];
    let mut by = judge(Action::Allow, &rules);
    let _ = told(
        &mut by,
        "a.test",
        &[a("a.test", 60, ADDRESS), a("a.test", 60, [192, 0, 2, 1])],
    );
    assert_eq!(refusal(&by, ADDRESS, 25), Some(Refusal::Rule));
    assert_eq!(refusal(&by, ADDRESS, 80), None);
    assert_eq!(
        refusal(&by, [192, 0, 2, 1], 25),
        Some(Refusal::Rule),
        "an earlier rule"
    );
    error(asks(&mut by, "b.test", Type::A));

    let mut by = judge(Action::Deny, &["deny a.test:25", "allow *.test"]);
    let _ = told(&mut by, "a.test", &[a("a.test", 60, ADDRESS)]);
    assert_eq!(refusal(&by, ADDRESS, 25), Some(Refusal::Rule));
    let _ = told(&mut by, "b.test", &[a("b.test", 60, ADDRESS)]);
    assert_eq!(refusal(&by, ADDRESS, 25), None);
}

#[test]
fn a_name_denied_before_a_rule_by_address_stays_so_when_another_name_is_told() {
    let rules = ["deny a.test:80", "allow 203.0.113.0/24", "deny b.test:80"];
    let mut by = judge(Action::Allow, &rules);
    for name in ["a.test", "b.test"] {
        let _ = told(&mut by, name, &[a(name, 60, ADDRESS)]);
        assert_eq!(refusal(&by, ADDRESS, 80), Some(Refusal::Rule), "{name}");
    }
    // Of two rules that deny with no rule by address between them one is enough.
    assert_eq!(by.0.borrow().counts(VM).open, 2);
    let mut by = judge(Action::Allow, &["deny a.test:80", "deny b.test:80"]);
    for name in ["a.test", "b.test"] {
        let _ = told(&mut by, name, &[a(name, 60, ADDRESS)]);
    }
    assert_eq!(by.0.borrow().counts(VM).open, 1);
}

#[test]
fn an_alias_leads_only_to_names_that_may_be_asked_for() {
    let mut by = judge(Action::Deny, &["allow *.ok.test"]);
    let elsewhere = [
        cname("a.ok.test", 60, "evil.test"),
        a("evil.test", 60, ADDRESS),
    ];
    let refused = error(told(&mut by, "a.ok.test", &elsewhere));
    assert!(refused.text.contains("evil.test"), "{}", refused.text);
    let hints = [https(
        "a.ok.test",
        "evil.test",
        ADDRESS,
        "2001:db8::1".parse().unwrap(),
    )];
    error(told(&mut by, "a.ok.test", &hints));
    assert_eq!(refusal(&by, ADDRESS, 443), Some(Refusal::Default));
    assert_eq!(by.0.borrow().counts(VM).refused_chains, 2);
    let within = [
        cname("a.ok.test", 60, "b.ok.test"),
        a("b.ok.test", 60, ADDRESS),
    ];
    assert_eq!(told(&mut by, "a.ok.test", &within), Ok(()));
    assert_eq!(refusal(&by, ADDRESS, 443), None);

    // A denied port is denied by any other name too.
    let mut by = judge(Action::Allow, &["deny b.test:25"]);
    let alias = [cname("a.test", 60, "b.test"), a("b.test", 60, ADDRESS)];
    assert_eq!(told(&mut by, "a.test", &alias), Ok(()));
    assert_eq!(refusal(&by, ADDRESS, 25), Some(Refusal::Rule));
}

#[test]
fn protected_addresses_in_an_answer_are_refused_unless_a_rule_means_them() {
    let mut by = judge(Action::Deny, &["allow ok.test", "allow 10.1.0.0/16"]);
    for bad in [
        [10, 0, 0, 1],
        [169, 254, 169, 254],
        [127, 0, 0, 1],
        [198, 51, 100, 1],
    ] {
        let records = [a("ok.test", 60, ADDRESS), a("ok.test", 60, bad)];
        let error = error(told(&mut by, "ok.test", &records));
        assert!(error.text.contains("safe defaults"), "{}", error.text);
    }
    for bad in [
        "::1",
        "fd00::1",
        "fe80::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
    ] {
        let records = [https("ok.test", ".", ADDRESS, bad.parse().unwrap())];
        error(told(&mut by, "ok.test", &records));
    }
    assert_eq!(by.0.borrow().counts(VM).rebinding, 10);
    assert_eq!(
        refusal(&by, ADDRESS, 80),
        Some(Refusal::Default),
        "nothing was opened"
    );
    assert_eq!(
        told(&mut by, "ok.test", &[a("ok.test", 1, [10, 1, 2, 3])]),
        Ok(())
    );
    let mut split = judge(Action::Allow, &["deny bad.test"]);
    let internal = [a("intra.test", 60, [10, 0, 0, 1])];
    assert_eq!(
        told(&mut split, "intra.test", &internal),
        Ok(()),
        "no rule about it"
    );
    assert_eq!(refusal(&split, [10, 0, 0, 1], 80), Some(Refusal::Protected));
}

#[test]
fn a_vm_that_fills_its_room_is_refused_and_harms_nobody() {
    let mut by = judge(Action::Deny, &["allow *.ok.test"]);
    for n in 0..MAX_PER_VM as u32 / 128 {
        let records: Vec<_> = (0..128)
            .map(|i| a("a.ok.test", 60, (0xcb00_0000 + 128 * n + i).to_be_bytes()))
            .collect();
        assert_eq!(told(&mut by, "a.ok.test", &records), Ok(()));
    }
    let one_more = [a("b.ok.test", 60, [203, 1, 1, 1])];
    error(told(&mut by, "b.ok.test", &one_more));
    assert_eq!(
        told_as(&mut by, VmId::new(VM.get() + 1), "b.ok.test", &one_more),
        Ok(())
    );
    assert_eq!(refusal(&by, [203, 0, 0, 5], 80), None);
    let counts = by.0.borrow().counts(VM);
    assert_eq!((counts.full, counts.open), (1, MAX_PER_VM as u64));
    by.0.borrow_mut().forget(VM);
    assert_eq!(by.0.borrow().counts(VM), NameCounts::default());
}

#[test]
fn ten_thousand_names_are_not_tried_one_by_one() {
    // Other load on the machine hardly changes it.
    let cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let timed = |rules: u32| {
        let texts: Vec<String> = (0..rules)
            .map(|n| {
                let mut text = String::from(if n % 2 == 0 { "allow *." } else { "allow " });
                write!(text, "n{n}.ok.test:{}", 1 + n % 3).unwrap();
                text
            })
            .collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut by = judge(Action::Deny, &texts);
        let started = cpu_time();
        for n in 0..20_000_u32 {
            let _ = asks(&mut by, &format!("a.n{}.ok.test", n % 20_011), Type::A);
        }
        cpu_time() - started
    };
    let (few, many) = (timed(10), timed(10_000));
    println!("20,000 questions: {few:?} with 10 names, {many:?} with 10,000");
    assert!(many < few * 20, "{many:?} against {few:?}");
}

/// Names, rules and addresses from small sets, so that they meet.
fn rule() -> impl Strategy<Value = String> {
    let host = prop::sample::select(vec![
        "a.test",
        "b.test",
        "*.test",
        "*.a.test",
        "192.0.2.0/30",
        "192.0.2.1",
    ]);
    let ports = prop::sample::select(vec!["", ":80", ":80-90/tcp", "/udp"]);
    let action = prop::sample::select(vec!["allow", "deny"]);
    (action, host, ports).prop_map(|(action, host, ports)| format!("{action} {host}{ports}"))
}

fn matches(host: &str, name: &str) -> bool {
    match host.strip_prefix("*.") {
        Some(parent) => name.ends_with(&format!(".{parent}")),
        None => host == name,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn decisions_are_those_of_trying_each_rule_by_name(
        rules in prop::collection::vec(rule(), 0..8),
        deny in any::<bool>(),
        heard in prop::collection::vec((0_usize..3, 0_u8..4), 0..6),
        low in 0_u8..4,
        port in prop::sample::select(vec![80_u16, 85, 443]),
    ) {
        let names = ["a.test", "b.test", "x.a.test"];
        let texts: Vec<&str> = rules.iter().map(String::as_str).collect();
        let mut by = judge(if deny { Action::Deny } else { Action::Allow }, &texts);
        let mut told_names = Vec::new();
        for (name, low) in heard {
            let asked = asks(&mut by, names[name], Type::A) == Ok(());
            if asked && told(&mut by, names[name], &[a(names[name], 60, [192, 0, 2, low])]) == Ok(()) {
                told_names.push((names[name], low));
            }
        }
        let destination = to([192, 0, 2, low], port);
        let verdict = by.0.borrow().decide(VM, destination, SECOND_NS).decision;
        let judge = by.0.borrow();
        let by_address = judge.policy(VM).decide(destination);
        if by_address.refusal == Some(Refusal::Rule) {
            prop_assert_eq!(verdict, by_address, "an address that is denied stays so");
        } else {
            // The first rule about each name that opened the address, tried one by one.
            let first = |name: &str| rules.iter().position(|rule| {
                let (_, text) = rule.split_once(' ').unwrap();
                let host = text.split([':', '/']).next().unwrap();
                let parsed = Rule::parse(Action::Allow, text).unwrap();
                matches!(parsed, Rule::Name(_, ref p) if p.covers(port, Protocol::Tcp)) && matches(host, name)
            });
            let firsts: Vec<usize> = told_names.iter()
                .filter(|(_, l)| *l == low)
                .filter_map(|(name, _)| first(name))
                .collect();
            let typed = by_address.rule.0.checked_sub(2);
            let before = |at: &&usize| typed.is_none_or(|typed| (**at as u32) < typed);
            let allows = firsts.iter().any(|at| rules[*at].starts_with("allow"));
            let denied = !allows && firsts.iter().filter(before).count() > 0;
            let expected = allows || (by_address.is_allowed() && !denied);
            prop_assert_eq!(verdict.is_allowed(), expected, "{:?} {:?}", rules, told_names);
        }
    }
}
