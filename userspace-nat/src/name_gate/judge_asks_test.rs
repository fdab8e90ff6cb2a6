//! Tests of questions beyond the rules about their names, and of openings that outlive the judge.
use slipgate_abi::{Refusal, VmId};

use super::{tests::*, *};
use crate::{
    clock::SECOND_NS,
    dns::{
        ExtendedError, NamePolicy, NameVerdict,
        chain::tests::{a, cname},
        message::Type,
        query::Key,
    },
    name_gate::Change,
};
use slipgate_policy::{Action, CEILING_S, FLOOR_S, Rule, wire};

/// A judge with these rules; `!` makes a rule deny.
fn judged(default: Action, rules: &[&str]) -> ByRules {
    let text = |rule: &&str| match rule.strip_prefix('!') {
        Some(rule) => format!("deny {rule}"),
        None => format!("allow {rule}"),
    };
    let rules: Vec<String> = rules.iter().map(text).collect();
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    judge(default, &rules)
}

/// A cache key: view, flags, type A, class IN, name.
fn key(name: &[u8]) -> Vec<u8> {
    [&[0, 0, 0, 0, 1, 0, 1, 0, 1], name].concat()
}

/// The question as it reaches a resolver or not: judged, then looked up.
fn looked_up(by: &mut ByRules, name: &str, now_ns: u64) -> NameVerdict {
    let wire = wire(name).unwrap();
    match by.question(VM, Name(&wire), Type::A) {
        Ok(()) => by.lookup(VM, Key(&key(&wire)), now_ns),
        refused => refused,
    }
}

#[test]
fn new_names_beneath_a_wildcard_are_bounded_and_what_a_rule_names_is_not() {
    let mut by = judged(Action::Deny, &["*.ok.test", "one.ok.test", "fixed.test"]);
    let secret = "x".repeat(60);
    let mut asked = 0;
    while looked_up(&mut by, &format!("{asked}.{secret}.ok.test"), 0) == Ok(()) {
        asked += 1;
        assert!(asked < 1_000);
    }
    assert!((450..520).contains(&asked), "{asked}");
    let refused = error(looked_up(&mut by, &format!("{asked}.{secret}.ok.test"), 0));
    assert_eq!(refused.code, ExtendedError::PROHIBITED);
    assert!(refused.text.contains("new names"), "{}", refused.text);
    assert_eq!(by.0.borrow().counts(VM).new_names, 2);
    for known in [&format!("3.{secret}.ok.test"), "one.ok.test", "fixed.test"] {
        assert_eq!(looked_up(&mut by, known, 0), Ok(()), "{known}");
    }
    // Another VM has its own.
    let other = wire("new.ok.test").unwrap();
    assert_eq!(by.lookup(VmId::new(2), Key(&key(&other)), 0), Ok(()));
}

#[test]
fn what_the_policy_opens_of_types_and_labels_is_what_may_be_asked_for() {
    let rules = vec![Rule::parse(Action::Allow, "*.ok.test").unwrap()];
    let dns = slipgate_policy::DnsSettings {
        types: vec![Type::TXT],
        max_labels: 4,
        max_label_octets: 6,
        ttl_ceiling_s: 60,
        ttl_floor_s: 5,
        ..Default::default()
    };
    let settings = slipgate_policy::Settings {
        dns,
        ..Default::default()
    };
    let policy = Policy::new(Action::Deny, rules).with(settings);
    let mut by = ByRules(Judge::shared(policy));
    assert_eq!(asks(&mut by, "a.ok.test", Type::TXT), Ok(()));
    let private_use = 65_399;
    for qtype in [Type::NULL, Type::ANY, private_use] {
        assert_ne!(asks(&mut by, "a.ok.test", qtype), Ok(()), "{qtype}");
    }
    assert_eq!(by.0.borrow().counts(VM).refused_types, 3);
    assert_eq!(asks(&mut by, "b.a.ok.test", Type::A), Ok(()));
    assert_eq!(asks(&mut by, "sixsix.ok.test", Type::A), Ok(()));
    let too_long = error(asks(&mut by, "seven77.ok.test", Type::A));
    assert_eq!(too_long.text, "refused: a label of more than 6 octets");
    assert_ne!(asks(&mut by, "c.b.a.ok.test", Type::A), Ok(()));
    assert_eq!(by.answer_policy(VM).ttl_ceiling_s, 60);
    let _ = told(
        &mut by,
        "a.ok.test",
        &[a("a.ok.test", 3_000, [203, 0, 113, 1])],
    );
    let _ = told(&mut by, "a.ok.test", &[a("a.ok.test", 0, [203, 0, 113, 2])]);
    let is_open = |last, at_s: u64| {
        let verdict =
            by.0.borrow()
                .decide(VM, to([203, 0, 113, last], 443), at_s * SECOND_NS);
        verdict.decision.is_allowed()
    };
    assert!(is_open(1, 59) && !is_open(1, 61), "the ceiling");
    assert!(is_open(2, 4) && !is_open(2, 6), "the floor");
}

#[test]
fn an_opening_lasts_for_its_ttl_within_floor_and_ceiling() {
    let mut by = judged(Action::Deny, &["*.ok.test"]);
    for (ttl_s, lasts_s) in [(0, FLOOR_S), (100, 100), (1_000_000, CEILING_S)] {
        let addr = [203, 0, 113, 1];
        let _ = told(&mut by, "a.ok.test", &[a("a.ok.test", ttl_s, addr)]);
        let is_open = |ns| {
            let judge = by.0.borrow();
            judge.decide(VM, to(addr, 443), ns).decision.is_allowed()
        };
        let end_ns = u64::from(lasts_s) * SECOND_NS;
        assert!(is_open(end_ns - 1) && !is_open(end_ns), "{ttl_s}");
    }
}

#[test]
fn browsers_are_told_not_to_use_resolvers_of_their_own() {
    let mut by = judged(Action::Allow, &["!evil.test"]);
    let canary = "use-application-dns.net";
    let told = error(asks(&mut by, canary, Type::A));
    assert_eq!(told.rcode, crate::dns::message::Rcode::NxDomain);
    assert_eq!(by.0.borrow().counts(VM).elsewhere, 1);
    let mut meant = judged(Action::Allow, &["!evil.test", canary]);
    assert_eq!(asks(&mut meant, canary, Type::A), Ok(()));
    let mut open = judged(Action::Allow, &[]);
    assert_eq!(asks(&mut open, canary, Type::A), Ok(()));
}

#[test]
fn an_address_of_a_resolver_is_opened_by_its_own_name_alone() {
    let google = [8, 8, 8, 8];
    let elsewhere = Some(Refusal::DnsElsewhere);
    let mut by = judged(
        Action::Deny,
        &["*.ok.test:443", "dns.google:443", "dot.test:853"],
    );
    let _ = told(&mut by, "a.ok.test", &[a("a.ok.test", 60, google)]);
    assert_eq!(
        refusal(&by, google, 443),
        elsewhere,
        "by somebody else's name"
    );
    let _ = told(&mut by, "dns.google", &[a("dns.google", 60, google)]);
    assert_eq!(refusal(&by, google, 443), None);
    assert_eq!(refusal(&by, google, 853), elsewhere);
    let _ = told(&mut by, "dot.test", &[a("dot.test", 60, [203, 0, 113, 7])]);
    assert_eq!(refusal(&by, [203, 0, 113, 7], 853), None);
    // On the way to somewhere it is refused too.
    let alias = [cname("b.ok.test", 60, "dns.quad9.net")];
    assert_ne!(told(&mut by, "b.ok.test", &alias), Ok(()));
}

#[test]
fn names_in_a_deny_file_refuse_questions_by_their_line() {
    let file = slipgate_policy::DenyFile::parse("bad.txt", "# list\n*.bad.test\nx.ok.test:25\n");
    let rules = vec![
        Rule::parse(Action::Allow, "good.bad.test").unwrap(),
        Rule::DenyFile(Box::new(file.unwrap())),
        Rule::parse(Action::Allow, "*.test").unwrap(),
    ];
    let mut by = ByRules(Judge::shared(Policy::new(Action::Deny, rules)));
    let refused = error(asks(&mut by, "www.bad.test", Type::A));
    assert!(refused.text.contains("bad.txt, line 2"), "{}", refused.text);
    assert_eq!(asks(&mut by, "good.bad.test", Type::A), Ok(()));
    assert_eq!(asks(&mut by, "x.ok.test", Type::A), Ok(()));
    let _ = told(
        &mut by,
        "x.ok.test",
        &[a("x.ok.test", 60, [203, 0, 113, 1])],
    );
    assert_eq!(refusal(&by, [203, 0, 113, 1], 443), None);
    assert_eq!(refusal(&by, [203, 0, 113, 1], 25), Some(Refusal::Rule));
    let verdict = by.0.borrow().decide(VM, to([203, 0, 113, 1], 25), 1);
    assert_eq!(verdict.decision.line, Some(3));
}

/// VM, address, way and expiry.
type Remembered = (u32, IpAddr, Box<[u8]>, u64);

/// The changes noted for a successor, applied as the map `NAMES` would.
fn remembered(by: &ByRules, now_ns: u64) -> Vec<Remembered> {
    let mut map: Vec<Remembered> = Vec::new();
    by.0.borrow_mut().expire(now_ns);
    for change in by.0.borrow_mut().take_changes() {
        match change {
            Change::Opened(vm, addr, name, expires_ns) => {
                map.retain(|(v, a, w, _)| (*v, *a, &**w) != (vm.get(), addr, name.chain()));
                map.push((vm.get(), addr, name.chain().into(), expires_ns));
            }
            Change::Ended(vm, addr, name) => {
                map.retain(|(v, a, w, _)| (*v, *a, &**w) != (vm.get(), addr, name.chain()));
            }
        }
    }
    map
}

fn had(addr: IpAddr, chain: &[u8], expires_ns: u64) -> Had<'_> {
    Had {
        addr,
        chain,
        until_ns: expires_ns,
        noted_ns: expires_ns,
    }
}

#[test]
fn a_successor_opens_again_what_its_own_rules_let_in() {
    let (first, second) = ([203, 0, 113, 1], [203, 0, 113, 2]);
    let mut by = judged(Action::Deny, &["*.ok.test:443", "cdn.test"]);
    let _ = told(&mut by, "a.ok.test", &[a("a.ok.test", 100, first)]);
    let aliased = [
        cname("b.ok.test", 100, "cdn.test"),
        a("cdn.test", 100, second),
    ];
    let _ = told(&mut by, "b.ok.test", &aliased);
    let map = remembered(&by, 1);
    assert_eq!(map.len(), 2, "{map:?}");
    let later = 40 * SECOND_NS;
    let heir = |rules: &[&str]| {
        let by = judged(Action::Deny, rules);
        for (vm, addr, way, expires_ns) in &map {
            let had = had(*addr, way, *expires_ns);
            by.0.borrow_mut().reopen(VmId::new(*vm), &[had], later);
        }
        by
    };
    let admits = |by: &ByRules, addr: [u8; 4], port, at_s: u64| {
        let verdict = by.0.borrow().decide(VM, to(addr, port), at_s * SECOND_NS);
        verdict.decision.is_allowed()
    };
    let same = heir(&["*.ok.test:443", "cdn.test"]);
    assert!(admits(&same, first, 443, 41) && admits(&same, second, 443, 41));
    assert!(!admits(&same, first, 80, 41));
    assert!(
        admits(&same, first, 443, 99) && !admits(&same, first, 443, 101),
        "what was left"
    );
    let ports = heir(&["*.ok.test:80", "cdn.test"]);
    assert!(!admits(&ports, first, 443, 41) && admits(&ports, first, 80, 41));
    let one = heir(&["a.ok.test:443"]);
    assert!(admits(&one, first, 443, 41) && !admits(&one, second, 443, 41));
    // The way counts: what it led through may not be had any more, or not on that port.
    let denied = heir(&["!cdn.test", "*.ok.test:443"]);
    assert!(admits(&denied, first, 443, 41) && !admits(&denied, second, 443, 41));
    let port = heir(&["!cdn.test:443", "*.ok.test", "cdn.test"]);
    assert!(admits(&port, second, 80, 41) && !admits(&port, second, 443, 41));
    let address = heir(&["!203.0.113.1", "*.ok.test", "cdn.test"]);
    assert!(!admits(&address, first, 443, 41));
    // Under other rules in the same process.
    let none = heir(&["*.ok.test:443", "cdn.test"]);
    none.0.borrow_mut().rejudge_all(later);
    assert!(admits(&none, second, 443, 41));
    let nonsense = none
        .0
        .borrow_mut()
        .reopen(VM, &[had(first.into(), &[63, 1], u64::MAX)], later);
    assert_eq!(nonsense, [false]);
}

fn changes(judge: &mut Judge, now_ns: u64) -> Vec<Change> {
    judge.expire(now_ns);
    judge.take_changes()
}

#[test]
fn what_ends_is_noted() {
    let mut by = judged(Action::Deny, &["*.ok.test:443"]);
    let _ = told(
        &mut by,
        "a.ok.test",
        &[a("a.ok.test", 100, [203, 0, 113, 1])],
    );
    let _ = told_as(
        &mut by,
        VmId::new(2),
        "a.ok.test",
        &[a("a.ok.test", 40, [203, 0, 113, 1])],
    );
    let mut judge = by.0.borrow_mut();
    assert_eq!(changes(&mut judge, 1).len(), 2);
    assert_eq!(changes(&mut judge, 39 * SECOND_NS), []);
    let ended = changes(&mut judge, 41 * SECOND_NS);
    assert!(
        matches!(ended[..], [Change::Ended(vm, ..)] if vm.get() == 2),
        "{ended:?}"
    );
    judge.forget(VM);
    let ended = changes(&mut judge, 42 * SECOND_NS);
    assert!(matches!(ended[..], [Change::Ended(VM, ..)]), "{ended:?}");
}

#[test]
fn an_answer_that_a_reload_overtook_is_judged_by_the_new_policy() {
    let mut by = judged(Action::Allow, &["!evil.test"]);
    let wire = wire("evil.test").unwrap();
    let told =
        crate::dns::chain::tests::answer("evil.test", &[a("evil.test", 60, [198, 51, 100, 7])]);
    // The question was asked before the rule was there.
    let refused = error(by.answer(VM, Name(&wire), &told, 0, 0));
    assert!(refused.text.contains("evil.test"), "{}", refused.text);
}
