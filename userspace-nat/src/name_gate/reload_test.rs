use slipgate_abi::{Protocol, VmId};

use std::{rc::Rc, time::Duration};

use nix::time::{ClockId, clock_gettime};
use slipgate_policy::PolicySet;

use super::*;
use crate::{
    clock::SECOND_NS,
    dns::{
        NamePolicy as _,
        chain::tests::{Written, a, answer, cname},
    },
    name_gate::{ByRules, Change, Had, MAX_PER_VM},
};
use slipgate_policy::{Action, DnsSettings, Settings, wire};

const VM: VmId = VmId::new(7);
const ADDRESS: [u8; 4] = [203, 0, 113, 10];
const LATER_NS: u64 = 3_600 * SECOND_NS;

fn policy(default: Action, rules: &[&str]) -> Policy {
    let rules = rules.iter().map(|rule| match rule.split_once(' ') {
        Some(("deny", text)) => Rule::parse(Action::Deny, text).unwrap(),
        Some(("allow", text)) => Rule::parse(Action::Allow, text).unwrap(),
        Some(("inspect", text)) => Rule::parse(Action::Inspect, text).unwrap(),
        _ => panic!("{rule}"),
    });
    Policy::new(default, rules.collect::<Vec<_>>())
}

fn judge(default: Action, rules: &[&str]) -> ByRules {
    ByRules(Judge::shared(policy(default, rules)))
}

fn told(by: &mut ByRules, name: &str, records: &[Written]) {
    let verdict = by.answer(VM, Name(&wire(name).unwrap()), &answer(name, records), 0, 0);
    assert_eq!(verdict, Ok(()));
}

fn to(port: u16) -> Destination {
    Destination {
        addr: ADDRESS.into(),
        port,
        protocol: Protocol::Tcp,
    }
}

fn reload(by: &ByRules, default: Action, rules: &[&str]) {
    let set = PolicySet::new(vec![policy(default, rules)]);
    by.0.borrow_mut().set_policies(set, &[(VM, 0)], 1);
}

/// The same with one rule, by which an opening lasts for so long at most.
fn reload_with_ceiling(by: &ByRules, rule: &str, ttl_ceiling_s: u32) {
    let dns = DnsSettings {
        ttl_ceiling_s,
        ..DnsSettings::default()
    };
    assert!(dns.ttl_floor_s <= ttl_ceiling_s, "no document says so");
    let settings = Settings {
        dns,
        ..Settings::default()
    };
    let set = PolicySet::new(vec![policy(Action::Deny, &[rule]).with(settings)]);
    by.0.borrow_mut().set_policies(set, &[(VM, 0)], 1);
}

fn is_open(by: &ByRules, port: u16) -> bool {
    by.0.borrow().decide(VM, to(port), 1).decision.is_allowed()
}

/// The name that opened a flow to this port, now.
fn opener(by: &ByRules, port: u16) -> Option<Rc<LearntName>> {
    by.0.borrow().decide(VM, to(port), 1).name
}

fn keeps(by: &ByRules, port: u16, opener: Option<&LearntName>, rule: Option<Identity>) -> bool {
    let rule = rule.as_ref();
    by.0.borrow()
        .keeps(VM, to(port), opener, rule, false, LATER_NS)
}

/// Identity of a rule in a policy of this name; of the default when the rule is empty.
fn identity(name: Option<&str>, is_learning: bool, rule: &str) -> Identity {
    let rules: Vec<&str> = (!rule.is_empty()).then_some(rule).into_iter().collect();
    let policy = policy(Action::Allow, &rules).with(Settings {
        name: name.map(str::to_owned),
        is_learning,
        ..Settings::default()
    });
    let mut described = policy.described();
    let described = match rule {
        "" => described.next(),
        _ => described.last(),
    };
    described.unwrap().identity
}

#[test]
fn openings_follow_their_names_to_other_rules() {
    let mut by = judge(Action::Deny, &["allow a.test:443", "allow b.test"]);
    told(&mut by, "a.test", &[a("a.test", 60, ADDRESS)]);
    assert!(is_open(&by, 443) && !is_open(&by, 80));
    // The same rule at another place, and with another port.
    reload(
        &by,
        Action::Deny,
        &["deny x.test", "allow b.test", "allow *.test:80"],
    );
    assert!(!is_open(&by, 443) && is_open(&by, 80));
    let rule = by.0.borrow().decide(VM, to(80), 1).decision;
    assert_eq!(by.0.borrow().policies().text(rule), "--allow *.test:80");
    // No rule speaks of it.
    reload(&by, Action::Deny, &["allow b.test"]);
    assert!(!is_open(&by, 443) && !is_open(&by, 80));
    assert_eq!(by.0.borrow().counts(VM).open, 0);
    // What was forgotten must be asked for again.
    reload(&by, Action::Deny, &["allow a.test"]);
    assert!(!is_open(&by, 443));
}

#[test]
fn a_name_on_the_way_that_is_denied_now_shuts_the_address() {
    let mut by = judge(Action::Deny, &["allow a.test", "allow cdn.test"]);
    let records = [cname("a.test", 60, "cdn.test"), a("cdn.test", 60, ADDRESS)];
    told(&mut by, "a.test", &records);
    assert!(is_open(&by, 443));
    let flow = opener(&by, 443).unwrap();
    for rules in [&["allow a.test", "deny cdn.test"][..], &["allow a.test"]] {
        reload(&by, Action::Deny, rules);
        assert!(!is_open(&by, 443), "{rules:?}");
        assert!(!keeps(&by, 443, Some(&flow), None), "{rules:?}");
        by = judge(Action::Deny, &["allow a.test", "allow cdn.test"]);
        told(&mut by, "a.test", &records);
    }
}

#[test]
fn a_flow_outlasts_its_opening_but_not_its_rule() {
    let mut by = judge(Action::Deny, &["allow a.test:443"]);
    told(&mut by, "a.test", &[a("a.test", 0, ADDRESS)]);
    let flow = opener(&by, 443).unwrap();
    // An hour later nothing is open any more.
    assert!(keeps(&by, 443, Some(&flow), None));
    reload(&by, Action::Deny, &["deny b.test", "allow *.test"]);
    assert!(
        keeps(&by, 443, Some(&flow), None),
        "another rule lets it in"
    );
    reload(&by, Action::Deny, &["allow a.test:80"]);
    assert!(!keeps(&by, 443, Some(&flow), None), "another port");
    reload(&by, Action::Deny, &["deny a.test", "allow *.test"]);
    assert!(!keeps(&by, 443, Some(&flow), None));
    reload(&by, Action::Deny, &["allow a.test", "deny 203.0.113.0/24"]);
    assert!(!keeps(&by, 443, Some(&flow), None), "addresses beat names");
    reload(&by, Action::Deny, &["allow 203.0.113.10:443"]);
    assert!(keeps(&by, 443, Some(&flow), None), "let in by address");
    reload(&by, Action::Allow, &["deny a.test"]);
    assert!(!keeps(&by, 443, Some(&flow), None), "its name is denied");
    assert!(keeps(&by, 443, None, None), "it never had a name");
}

#[test]
fn a_flow_that_was_never_inspected_does_not_go_on_where_a_rule_inspects() {
    let mut by = judge(Action::Allow, &["allow a.test:443"]);
    told(&mut by, "a.test", &[a("a.test", 0, ADDRESS)]);
    let flow = opener(&by, 443).unwrap();
    let goes_on = |by: &ByRules, opener: Option<&LearntName>, rule, was_inspected| {
        let judge = by.0.borrow();
        judge.keeps(VM, to(443), opener, Some(&rule), was_inspected, LATER_NS)
    };
    for rule in ["inspect a.test:443", "inspect 203.0.113.10:443"] {
        reload(&by, Action::Deny, &[rule]);
        for (is_learning, by_rule) in [
            (true, "allow a.test:443"),
            (true, ""),
            (false, "allow a.test:443"),
            (false, "inspect a.test:443"),
        ] {
            let by_rule = identity(None, is_learning, by_rule);
            assert!(!goes_on(&by, Some(&flow), by_rule, false), "{rule}");
            assert!(goes_on(&by, Some(&flow), by_rule, true), "{rule}");
        }
    }
    // Of a name that nobody knows any more the rule that means the same is asked.
    reload(&by, Action::Deny, &["inspect a.test:443"]);
    let same = identity(None, false, "inspect a.test:443");
    assert!(goes_on(&by, None, same, true) && !goes_on(&by, None, same, false));
    reload(&by, Action::Deny, &["allow a.test:443"]);
    let rule = identity(None, true, "allow a.test:443");
    assert!(goes_on(&by, Some(&flow), rule, false), "its own lets it");
}

#[test]
fn of_a_flow_whose_name_nobody_knows_the_rule_is_asked() {
    let by = judge(Action::Deny, &["deny b.test", "allow *.test:443"]);
    let names = |rule| keeps(&by, 443, None, Some(identity(None, false, rule)));
    assert!(names("allow *.test:443") && names("allow *.TEST:443-443"));
    assert!(keeps(
        &by,
        443,
        None,
        Some(identity(Some("ci"), false, "allow *.test:443"))
    ));
    assert!(!names("allow *.test"), "it is another rule now");
    assert!(!names("inspect *.test:443") && !names("deny b.test") && !names(""));
    assert!(!keeps(&by, 443, None, None));
    let rule = identity(None, false, "allow *.test:443");
    assert!(!keeps(&by, 80, None, Some(rule)));
    reload(
        &by,
        Action::Deny,
        &["allow *.test:443", "deny 203.0.113.10"],
    );
    assert!(!keeps(&by, 443, None, Some(rule)));
}

#[test]
fn rules_whose_texts_are_equal_as_far_as_they_are_kept_are_told_apart() {
    let label = "a".repeat(60);
    let rule = |last: &str| format!("allow {label}.{label}.{label}.{last}:443");
    let (one, other) = (rule("one.test"), rule("other.test"));
    assert_eq!(one[..128], other[..128]);
    let mut by = judge(Action::Deny, &[&one, "allow x.test"]);
    told(&mut by, "x.test", &[a("x.test", 0, ADDRESS)]);
    let of = |rule: &str| Some(identity(None, false, rule));
    assert!(keeps(&by, 443, None, of(&one)));
    assert!(!keeps(&by, 443, None, of(&other)));
    reload(&by, Action::Deny, &[&other]);
    assert!(!keeps(&by, 443, None, of(&one)), "it is gone");
    assert!(keeps(&by, 443, None, of(&other)));
}

#[test]
fn an_address_is_open_for_the_time_of_the_names_that_are_still_admitted() {
    let names = ["long.test", "short.test"];
    let tells = |by: &mut ByRules| {
        for (name, ttl_s) in names.into_iter().zip([1_000, 60]) {
            told(by, name, &[a(name, ttl_s, ADDRESS)]);
        }
    };
    let open_at = |by: &ByRules, second: u64| {
        let judge = by.0.borrow();
        let verdict = judge.decide(VM, to(443), second * SECOND_NS);
        verdict.decision.is_allowed()
    };
    for (denied, until_s) in [("deny long.test", 60), ("deny short.test", 1_000)] {
        let mut by = judge(Action::Deny, &["allow *.test"]);
        tells(&mut by);
        assert!(open_at(&by, 999));
        reload(&by, Action::Deny, &[denied, "allow *.test"]);
        let lasts = |second| open_at(&by, second);
        assert!(lasts(until_s - 2) && !lasts(until_s), "{denied}");
    }
    // Under rules by which both are let in, nothing is shorter.
    let mut by = judge(Action::Deny, &["allow *.test"]);
    tells(&mut by);
    reload(&by, Action::Deny, &["allow *.test:443"]);
    assert!(open_at(&by, 998));
}

#[test]
fn each_vm_has_what_its_policy_says() {
    let mut by = judge(Action::Deny, &["allow a.test"]);
    told(&mut by, "a.test", &[a("a.test", 60, ADDRESS)]);
    let kept = policy(Action::Deny, &["deny a.test"]).with(Settings {
        name: Some("kept".into()),
        on_reload: OnReload::Keep,
        dns: DnsSettings::default(),
        ..Settings::default()
    });
    let set = PolicySet::new(vec![policy(Action::Allow, &[]), kept]);
    by.0.borrow_mut()
        .set_policies(set, &[(VM, 1), (VmId::new(8), 0)], 1);
    assert!(!is_open(&by, 443));
    let judge = by.0.borrow();
    assert_eq!(judge.on_reload(VM), OnReload::Keep);
    assert_eq!(judge.on_reload(VmId::new(8)), OnReload::Cut);
    assert!(judge.decide(VmId::new(8), to(443), 1).decision.is_allowed());
}

impl Judge {
    /// Judges all VMs' openings again.
    pub(crate) fn rejudge_all(&mut self, now_ns: u64) {
        for (index, _) in self.policies.indexed() {
            *self.generations.entry(index).or_default() += 1;
        }
        let vms = self.learnt.vms().into_iter();
        self.rejudge(vms, now_ns);
    }

    /// Replaces all policies by these. VMs that `of_vm` does not list keep their index.
    pub(crate) fn set_policies(
        &mut self,
        policies: slipgate_policy::PolicySet,
        of_vm: &[(VmId, u32)],
        now_ns: u64,
    ) {
        let gone: Vec<u32> = self.policies.indexed().map(|(index, _)| index).collect();
        let gone = gone.into_iter().map(|index| (index, None));
        let new = policies
            .indexed()
            .map(|(index, policy)| (index, Some(policy.clone())));
        let changes = gone.chain(new.collect::<Vec<_>>()).collect();
        let mut all: Vec<(VmId, u32)> = self.of_vm.iter().map(|(vm, at)| (*vm, *at)).collect();
        let others = self.learnt.vms().into_iter().map(|vm| (vm, 0));
        all.extend(others.filter(|(vm, _)| !self.of_vm.contains_key(vm)));
        all.extend(of_vm);
        self.change_policies(changes, &all, now_ns);
    }
}

#[test]
fn an_inspected_flow_is_judged_by_its_name_whatever_else_has_its_address() {
    let records = |name| [a(name, 60, ADDRESS)];
    let mut by = judge(Action::Deny, &["inspect a.test:443", "inspect b.test:443"]);
    told(&mut by, "a.test", &records("a.test"));
    let flow = opener(&by, 443).unwrap();
    told(&mut by, "b.test", &records("b.test"));
    let keeps = |by: &ByRules, now_ns| {
        let judge = by.0.borrow();
        judge.keeps(VM, to(443), Some(&flow), None, true, now_ns)
    };
    reload(&by, Action::Deny, &["inspect *.test:443"]);
    assert!(keeps(&by, 1));
    let by_address = "inspect 203.0.113.0/24:443";
    for rules in [
        ["deny a.test", "inspect b.test:443"],
        ["deny a.test", by_address],
        [by_address, "deny a.test"],
    ] {
        reload(&by, Action::Deny, &rules);
        for now_ns in [1, LATER_NS] {
            assert!(!keeps(&by, now_ns), "{rules:?}");
        }
    }
    // What new connections are not inspected for does not end this one.
    reload(
        &by,
        Action::Deny,
        &["allow 203.0.113.0/24:443", "deny a.test"],
    );
    assert!(keeps(&by, 1));
}

/// Restores what names have opened at [`ADDRESS`], each until its time, ns.
fn restored(by: &ByRules, names: &[(String, u64)]) {
    restored_at(by, names, |_| ADDRESS);
}

fn restored_at(by: &ByRules, names: &[(String, u64)], address: fn(usize) -> [u8; 4]) {
    let chains: Vec<_> = names.iter().map(|(name, _)| wire(name).unwrap()).collect();
    let each = chains.iter().zip(names).enumerate();
    let had = each.map(|(n, (chain, (_, until_ns)))| Had {
        addr: address(n).into(),
        chain,
        until_ns: *until_ns,
        noted_ns: 0,
    });
    let had: Vec<_> = had.collect();
    let mut judge = by.0.borrow_mut();
    assert_eq!(judge.reopen(VM, &had, 1), vec![true; had.len()]);
}

#[test]
fn however_often_the_rules_change_a_name_keeps_its_time_and_its_order() {
    let by = judge(Action::Deny, &["allow *.test"]);
    let at = |ms: u64| 60 * SECOND_NS + ms * SECOND_NS / 1_000;
    restored(
        &by,
        &[("longer.test".into(), at(500)), ("a.test".into(), at(400))],
    );
    let open_at = |ns| {
        let judge = by.0.borrow();
        judge.decide(VM, to(443), ns).decision.is_allowed()
    };
    let other = ["allow *.test:443", "deny x.test"];
    for rules in [&other[..], &["allow *.test"], &other] {
        reload(&by, Action::Deny, rules);
        assert!(open_at(at(500) - 1) && !open_at(at(500)), "{rules:?}");
    }
    reload(&by, Action::Deny, &["deny longer.test", "allow *.test"]);
    assert!(open_at(at(400) - 1) && !open_at(at(400)));
    // Nor is it open for longer than the present rules say.
    reload_with_ceiling(&by, "allow *.test", 40);
    let end_ns = 1 + 40 * SECOND_NS;
    assert!(open_at(end_ns - 1) && !open_at(end_ns));
}

#[test]
fn a_reload_notes_for_a_successor_what_it_changes() {
    let names = [("a.test", 60), ("b.test", 50)];
    let names = names.map(|(name, until_s)| (name.to_owned(), until_s * SECOND_NS));
    for inspects in [true, false] {
        let action = if inspects { "inspect" } else { "allow" };
        let by = judge(Action::Deny, &[&format!("{action} *.test:443")]);
        restored(&by, &names);
        assert_eq!(by.0.borrow_mut().take_changes().len(), 2);
        let noted = |rules: &[&str]| {
            reload(&by, Action::Deny, rules);
            let changes = by.0.borrow_mut().take_changes();
            let noted = changes.into_iter().map(|change| match change {
                Change::Opened(_, _, name, until_ns) => (name.name.to_string(), Some(until_ns)),
                Change::Ended(_, _, name) => (name.name.to_string(), None),
            });
            noted.collect::<Vec<_>>()
        };
        let nothing: [(String, Option<u64>); 0] = [];
        assert_eq!(noted(&["deny x.test", "inspect *.test:443"]), nothing);
        assert_eq!(noted(&["allow *.test:80"]), nothing);
        let denied = noted(&["deny a.test", "allow *.test"]);
        assert_eq!(denied, [("a.test".into(), None)]);
        assert_eq!(noted(&["allow a.test"]), [("b.test".into(), None)]);
    }
}

#[test]
fn of_an_opening_that_a_reload_shortens_no_successor_reads_the_longer_time() {
    let by = judge(Action::Deny, &["allow *.test:443"]);
    restored(&by, &[("a.test".to_owned(), 60 * SECOND_NS)]);
    by.0.borrow_mut().take_changes();
    reload_with_ceiling(&by, "allow *.test:443", 40);
    let changes = by.0.borrow_mut().take_changes();
    let noted = changes.into_iter().map(|change| match change {
        Change::Opened(_, _, _, until_ns) => Some(until_ns),
        Change::Ended(..) => None,
    });
    // What stands is deleted first, should there be no room for the next.
    assert_eq!(noted.collect::<Vec<_>>(), [None, Some(40 * SECOND_NS + 1)]);
}

/// However they are ordered by time, and wherever other rules put them.
#[test]
fn a_reload_takes_no_longer_where_all_that_is_open_is_one_address() {
    let [first, second] = ["inspect *.a.test:443", "inspect *.b.test:443"];
    let cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let names = (0..MAX_PER_VM).map(|n| {
        let zone = if n % 2 == 0 { "a" } else { "b" };
        // Each second once, in no order.
        let until_s = 1_000 + n * 4_099 % MAX_PER_VM;
        (format!("n{n:05}.{zone}.test"), until_s as u64 * SECOND_NS)
    });
    let names: Vec<_> = names.collect();
    let reloaded = |address| {
        let by = judge(Action::Deny, &[first, second]);
        restored_at(&by, &names, address);
        let started = cpu_time();
        reload(&by, Action::Deny, &[second, first]);
        let took = cpu_time() - started;
        assert_eq!(by.0.borrow().counts(VM).open, MAX_PER_VM as u64);
        took
    };
    let each = reloaded(|n| [203, 0, (n >> 8) as u8, n as u8]);
    let one = reloaded(|_| ADDRESS);
    eprintln!("{MAX_PER_VM} names: {each:?} at an address each, {one:?} at one");
    assert!(one < 8 * each, "{one:?}, {each:?}");
}

/// A successor reads what was noted last, however often the rules have changed since.
#[test]
fn extensions_before_and_after_a_reload_are_noted_once_they_are_a_second_together() {
    let rules = ["allow a.test:443"];
    let mut by = judge(Action::Deny, &rules);
    let noted_at = |by: &mut ByRules, tenth: u64| {
        let name = wire("a.test").unwrap();
        let records = answer("a.test", &[a("a.test", 60, ADDRESS)]);
        let now_ns = tenth * SECOND_NS / 10;
        assert_eq!(by.answer(VM, Name(&name), &records, 0, now_ns), Ok(()));
        by.0.borrow_mut().take_changes().len()
    };
    assert_eq!(noted_at(&mut by, 0), 1);
    assert_eq!(noted_at(&mut by, 9), 0);
    reload(&by, Action::Deny, &rules);
    assert!(by.0.borrow_mut().take_changes().is_empty());
    assert_eq!(noted_at(&mut by, 18), 1);
}
