//! Other policies while flows live.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Ip4, Protocol, Refusal, RuleIndex, Verdict, VmId, VmRow, timeout::CLOSING_GRACE_NS,
};

use super::rig::*;
use crate::{
    clock::MILLISECOND_NS,
    control::Reload,
    dns::{
        NamePolicy,
        chain::tests::{a, answer},
    },
    event_loop::reload::LOOKS_PER_TURN,
    flow::ENDS_AT_ONCE,
    name_gate::ByRules,
    state::Forward,
};
use slipgate_policy::{
    Action, Described, LocalAddresses, Name, OnReload, Policy, PolicySet, Rule, Settings, wire,
};

const OTHER: At = (
    Ip4 {
        octets: [203, 0, 113, 9],
    },
    443,
);

pub(super) fn policy(default: Action, rules: &[&str]) -> Policy {
    let rules = rules.iter().map(|rule| match rule.split_once(' ') {
        Some(("deny", text)) => Rule::parse(Action::Deny, text).unwrap(),
        Some(("allow", text)) => Rule::parse(Action::Allow, text).unwrap(),
        Some(("inspect", text)) => Rule::parse(Action::Inspect, text).unwrap(),
        _ => panic!("{rule}"),
    });
    Policy::new(default, rules.collect::<Vec<_>>())
}

fn keeping(policy: Policy) -> Policy {
    let on_reload = OnReload::Keep;
    policy.with(Settings {
        on_reload,
        ..Settings::default()
    })
}

/// Policies in the place of all that there are, numbered from this element of `RULES` on.
pub(super) fn instead(policies: Vec<Policy>, rule_base: u32) -> Vec<(u32, Option<Policy>)> {
    const MOST: u32 = 8;
    let set = PolicySet::numbered_from(rule_base, policies);
    let new: Vec<_> = set.iter().cloned().map(Some).collect();
    (0..MOST)
        .zip(new.into_iter().chain(std::iter::repeat(None)))
        .collect()
}

impl Rig {
    pub(super) fn reload(&mut self, policies: Vec<Policy>, rule_base: u32, of_vm: [u32; 3]) {
        self.reload_strictly(policies, rule_base, of_vm, Vec::new());
    }

    pub(super) fn reload_strictly(
        &mut self,
        policies: Vec<Policy>,
        rule_base: u32,
        of_vm: [u32; 3],
        strictly: Vec<u32>,
    ) {
        let vms = (1..=3).map(|row| {
            let mut spec = spec(row, &Setup::default());
            spec.policy = of_vm[usize::from(row) - 1];
            spec
        });
        let reload = Reload {
            id: 1,
            policies: instead(policies, rule_base),
            local: LocalAddresses {
                host: vec![[192, 0, 2, 1].into()],
                guests: Vec::new(),
            },
            vms: vms.collect(),
            strictly: strictly.into_iter().map(VmId::new).collect(),
        };
        self.tell(|engine| engine.reload(reload));
    }

    /// Waits for the answer: how many were cut, kept, left.
    pub(super) fn applied(&mut self) -> (u64, u64, u64) {
        self.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
        let reloaded = self.broker.reloaded.pop().expect("a reload");
        assert_eq!(self.ended(), [reloaded.ends]);
        (reloaded.cut, reloaded.kept, reloaded.left)
    }
}

#[test]
fn what_the_new_rules_refuse_is_cut_and_the_rest_goes_on() {
    let mut rig = Rig::new();
    for port in 0..40 {
        rig.connect(40_000 + port, 7);
        rig.guest(1, &udp((GUEST, 5_000 + port), OTHER, b"x"));
    }
    rig.guest(2, &udp((GUEST, 5_000), OTHER, b"x"));
    rig.at_world();
    rig.reload(
        vec![policy(Action::Allow, &["deny 203.0.113.0/24"])],
        30,
        [0; 3],
    );
    // At once, and also what was under way to the engine.
    for port in 0..40 {
        rig.guest(1, &udp((GUEST, 5_000 + port), OTHER, b"x"));
        rig.guest(1, &udp((GUEST, 6_000 + port), OTHER, b"x"));
        let kept = ack((GUEST, 40_000 + port), SERVER, 0, 8, 9_001);
        assert_eq!(rig.guest(1, &kept), Handling::Fast);
    }
    let at_world = rig.at_world();
    assert!(at_world.iter().all(|packet| packet[16..20] == PEER.octets));
    assert_eq!(at_world.len(), 40);
    assert_eq!(rig.broker.ended, [], "before the grace");
    assert_eq!(rig.applied(), (41, 40, 0));
    assert_eq!(rig.refused(1, Refusal::Rule), 40);
    rig.assert_paired();
    let records = rig.records();
    assert_eq!(records.len(), 41);
    assert!(records.iter().all(|record| record["end"] == "policy"));
    // They were let in by the rule of before, and are recorded so.
    assert!(
        records
            .iter()
            .all(|r| r["rule"] == 10 && r["rule_text"] == "--default allow")
    );
    // What comes now has the numbers of the new run.
    rig.connect(50_000, 7);
    let slots = rig.kernel.borrow().slots_in_use();
    let rules: Vec<u32> = slots
        .iter()
        .map(|slot| rig.kernel.borrow().slot(*slot).rule())
        .collect();
    assert_eq!(rules.iter().filter(|rule| **rule == 30).count(), 1);
    assert_eq!(rules.iter().filter(|rule| **rule == 10).count(), 40);
    // And back: nothing is cut, the host is protected as ever.
    rig.reload(vec![policy(Action::Allow, &[])], 10, [0; 3]);
    assert_eq!(rig.applied(), (0, 41, 0));
    rig.guest(1, &syn((GUEST, 50_001), (NAT, 22), 7));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
}

#[test]
fn each_vms_policy_says_whether_its_flows_are_left() {
    let mut rig = Rig::new();
    for vm in 1..=3 {
        rig.connect_from(vm, 40_000, 7);
    }
    let shut = || policy(Action::Deny, &[]);
    let policies = vec![keeping(shut()), shut(), policy(Action::Allow, &[])];
    rig.reload(policies, 10, [0, 1, 2]);
    for (vm, way) in [(1, true), (2, false), (3, true)] {
        let more = ack((GUEST, 40_000), SERVER, 0, 8, 9_001);
        assert_eq!(rig.guest(vm, &more) == Handling::Fast, way, "VM {vm}");
        rig.guest(vm, &syn((GUEST, 40_001), SERVER, 7));
    }
    assert_eq!(rig.applied(), (1, 2, 1));
    assert_eq!(rig.refused(1, Refusal::Default), 1, "new ones are refused");
    assert_eq!(rig.refused(3, Refusal::Default), 0);
    assert_eq!(rig.flows(), 3);
    // Unless it is strict with that VM, which its id tells.
    let policies = || vec![keeping(shut()), keeping(shut()), policy(Action::Allow, &[])];
    rig.reload_strictly(policies(), 10, [0, 1, 2], vec![102]);
    assert_eq!(rig.applied(), (0, 3, 1));
    rig.reload_strictly(policies(), 10, [0, 1, 2], vec![101]);
    assert_eq!(rig.applied(), (1, 2, 0));
    rig.connect_from(3, 40_002, 7);
    // The next one that cuts cuts it too.
    rig.reload(vec![shut()], 10, [0; 3]);
    assert_eq!(rig.applied(), (3, 0, 0));
    rig.assert_empty();
}

/// Nobody has seen what it said, and it must not go on for ever unseen: neither of a VM that was open
/// to learn, nor of a rule that let it in before.
#[test]
fn what_was_never_inspected_does_not_go_on_past_inspection() {
    let named = |is_learning, default, rules: &[&str]| {
        policy(default, rules).with(Settings {
            name: Some("vm".to_owned()),
            is_learning,
            ..Settings::default()
        })
    };
    let own = || named(false, Action::Deny, &["inspect 198.51.100.7"]);
    for is_learning in [true, false] {
        let mut rig = Rig::new();
        let open = named(is_learning, Action::Allow, &["allow 198.51.100.7"]);
        rig.reload(vec![own(), open], 20, [1, 0, 0]);
        rig.applied();
        rig.connect(40_000, 7);
        rig.reload(vec![own()], 40, [0; 3]);
        assert_eq!(rig.applied(), (1, 0, 0));
    }
    // Also when slipgate dies meanwhile, and a successor takes over.
    let mut rig = Rig::new();
    let open = named(true, Action::Allow, &["allow 198.51.100.7"]);
    let described = PolicySet::new(vec![own(), open.clone()]).described().last();
    rig.reload(vec![own(), open], 20, [1, 0, 0]);
    rig.applied();
    rig.connect(40_000, 7);
    let rule = {
        let kernel = rig.kernel.borrow();
        kernel.slot(kernel.slots_in_use()[0]).rule_index()
    };
    rig.kernel
        .borrow_mut()
        .rules
        .extend(described.map(|d| (rule, d)));
    let (_, adoption) = rig.restart(&Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Inspect, "198.51.100.7").unwrap()],
        rule_base: RuleIndex::new(60),
        ..Setup::default()
    });
    assert_eq!((adoption.live, adoption.refused), (0, 1));
}

#[test]
fn flows_by_name_are_judged_by_their_names() {
    let mut rig = Rig::with(Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Allow, "*.ok.test").unwrap()],
        ..Setup::default()
    });
    let tell = |rig: &Rig, name: &'static str, at: Ip4| {
        let mut dns = ByRules(rig.engine.core.rules.judge.clone());
        let wire = wire(name).unwrap();
        let told = answer(name, &[a(name, 0, at.octets)]);
        let now_ns = rig.kernel.borrow().now_ns;
        let _ = dns.answer(VmId::new(101), Name(&wire), &told, 0, now_ns);
    };
    tell(&rig, "a.ok.test", PEER);
    tell(&rig, "b.ok.test", OTHER.0);
    rig.connect(40_000, 7);
    rig.guest(1, &udp((GUEST, 5_000), OTHER, b"x"));
    // Long after their openings.
    rig.pass(60_000 * MILLISECOND_NS);
    assert_eq!(rig.flows(), 2);
    let rules = ["deny x.test", "deny b.ok.test", "allow *.ok.test"];
    rig.reload(vec![policy(Action::Deny, &rules)], 20, [0; 3]);
    assert_eq!(rig.applied(), (1, 1, 0));
    assert_eq!(rig.records()[0]["dns_name"], "b.ok.test");
    // Once more: by the name, whatever the numbers of the rules.
    rig.reload(vec![policy(Action::Deny, &["allow a.ok.test"])], 40, [0; 3]);
    assert_eq!(rig.applied(), (0, 1, 0));
    // A successor does not know the name; the rule that let it in stands no more.
    {
        let mut kernel = rig.kernel.borrow_mut();
        let before = policy(Action::Deny, &["allow *.ok.test"]);
        kernel
            .rules
            .extend(before.described().last().map(|d| (RuleIndex::new(13), d)));
    }
    let setup = |rule: &str| Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Allow, rule).unwrap()],
        ..Setup::default()
    };
    let (mut rig, adoption) = rig.restart(&Setup {
        rules: vec![
            Rule::parse(Action::Deny, "b.test").unwrap(),
            Rule::parse(Action::Allow, "*.ok.test").unwrap(),
        ],
        rule_base: RuleIndex::new(60),
        ..setup("x.test")
    });
    assert_eq!((adoption.live, adoption.refused), (1, 0));
    rig.reload(vec![policy(Action::Deny, &["allow a.ok.test"])], 50, [0; 3]);
    assert_eq!(rig.applied(), (1, 0, 0));
}

/// `RULES` keeps 128 bytes of a text.
#[test]
fn a_rule_that_differs_behind_what_is_kept_of_its_text_is_another_one_to_a_successor() {
    let label = "a".repeat(60);
    let name_of = |last: &str| format!("{label}.{label}.{label}.{last}.test");
    let setup = |last: &str| Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Allow, &name_of(last)).unwrap()],
        rule_base: RuleIndex::new(60),
        ..Setup::default()
    };
    for (last, lives) in [("one", 1), ("other", 0)] {
        let mut rig = Rig::with(Setup {
            rule_base: RuleIndex::new(10),
            ..setup("one")
        });
        let name: &'static str = name_of("one").leak();
        let told = answer(name, &[a(name, 0, PEER.octets)]);
        let asked = wire(name).unwrap();
        let now_ns = rig.kernel.borrow().now_ns;
        let mut dns = ByRules(rig.engine.core.rules.judge.clone());
        let _ = dns.answer(VmId::new(101), Name(&asked), &told, 0, now_ns);
        rig.connect(40_000, 7);
        rig.pass(60_000 * MILLISECOND_NS);
        // As the broker writes it.
        let rules = policy(Action::Deny, &[&format!("allow {name}")]);
        let described = rules.described().last().unwrap();
        let text = described.text[..128].to_owned();
        let kept = Described::of_element(&described.element(), text).unwrap();
        rig.kernel
            .borrow_mut()
            .rules
            .insert(RuleIndex::new(13), kept);
        let (_, adoption) = rig.restart(&setup(last));
        assert_eq!(adoption.live, lives, "{last}");
        assert_eq!(adoption.refused, 1 - lives, "{last}");
    }
}

#[test]
fn what_was_ending_when_slipgate_died_and_is_refused_now_is_none_that_lives() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.guest(1, &udp((GUEST, 5_001), SERVER, b"x"));
    let slots = rig.kernel.borrow().slots_in_use();
    let ending = rig.kernel.borrow().slot(slots[0]);
    ending.set_verdict(Verdict::Closing);
    let (_, adoption) = rig.restart(&Setup {
        default: Action::Deny,
        rule_base: RuleIndex::new(60),
        ..Setup::default()
    });
    let ends = (adoption.ending, adoption.refused);
    assert_eq!((adoption.live, ends), (0, (1, 2)));
}

#[test]
fn forwards_keep_their_element_and_its_text() {
    let mut rig = Rig::new();
    let forward = Forward {
        protocol: Protocol::Tcp,
        host: [192, 0, 2, 1].into(),
        host_port: 8_080,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 80,
        rule: RuleIndex::new(13),
        is_own: false,
    };
    rig.tell(move |engine| {
        engine.set_forward_texts(RuleIndex::new(13), vec!["--forward tcp:8080:80".into()]);
        engine.set_forwards(vec![forward]);
    });
    rig.kernel
        .borrow_mut()
        .forwards
        .insert((NAT, 8_080, 6), (1, 101));
    rig.world(&syn(SERVER, (NAT, 8_080), 7));
    rig.reload(
        vec![policy(Action::Deny, &["deny 198.51.100.7"])],
        70,
        [0; 3],
    );
    assert_eq!(rig.applied(), (0, 1, 0), "rules are about what guests open");
    rig.world(&syn((PEER, 444), (NAT, 8_080), 7));
    let kernel = rig.kernel.borrow();
    let slots = kernel.slots_in_use();
    let mut rules: Vec<u32> = slots.iter().map(|slot| kernel.slot(*slot).rule()).collect();
    rules.sort_unstable();
    // Its element is none of a policy's.
    assert_eq!(rules, [13, 13]);
    let texts = &rig.engine.core.rules.texts;
    for rule in rules {
        let text = texts.text(RuleIndex::new(rule), &rig.engine.core.nat.datapath);
        assert_eq!(text.as_deref(), Some("--forward tcp:8080:80"));
    }
}

#[test]
fn a_flow_that_idles_out_is_cut_all_the_same() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), OTHER, b"x"));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    // In its grace already, from which a packet would bring it back.
    let now_ns = rig.kernel.borrow().now_ns;
    let core = &mut rig.engine.core;
    core.nat.flows.begin_end(
        &mut core.nat.datapath,
        slot,
        crate::flow::EndReason::Idle,
        now_ns,
    );
    rig.at_world();
    rig.reload(vec![policy(Action::Deny, &[])], 10, [0; 3]);
    rig.guest(1, &udp((GUEST, 5_000), OTHER, b"x"));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.applied(), (1, 0, 0));
    assert_eq!(rig.records()[0]["end"], "policy");
    let live = rig.kernel.borrow().slot(slot).verdict().load(Relaxed);
    assert_eq!(live, 0);
}

/// VM 1 has flows to two peers, 5,000 to each.
fn crowded() -> Rig {
    Rig::crowded(|number| match number % 2 {
        0 => PEER,
        _ => OTHER.0,
    })
}

#[test]
fn many_flows_are_judged_and_ended_some_in_a_turn() {
    let mut rig = crowded();
    let looks = |rig: &Rig| rig.kernel.borrow().slots_looked_at.get();
    let mut before = looks(&rig);
    rig.reload(
        vec![policy(Action::Allow, &["deny 203.0.113.0/24"])],
        30,
        [0; 3],
    );
    let mut turns = 0;
    while rig.engine.reloading.is_under_way() {
        let looked = looks(&rig) - before;
        // Each is looked at for its rule, its judgement and its cut.
        assert!(looked <= 8 * u64::from(LOOKS_PER_TURN), "{looked}");
        assert_eq!(rig.engine.timeout_ns(), Some(0), "the rest is due");
        before = looks(&rig);
        // Another's first packets are judged by the new rules, and wait for nothing.
        rig.guest(2, &udp((GUEST, 40_000 + turns), OTHER, b"x"));
        rig.guest(2, &udp((GUEST, 40_000 + turns), SERVER, b"x"));
        assert_eq!(rig.at_world().len(), 1, "turn {turns}");
        turns += 1;
    }
    assert!(turns > 10, "{turns}");
    let judged = rig.broker.reloaded[0];
    assert_eq!((judged.cut, judged.left), (5_000, 0));
    // Those that were opened ahead of the walk are judged again.
    assert!((5_000..=5_000 + u64::from(turns)).contains(&judged.kept));

    rig.kernel.borrow_mut().now_ns += CLOSING_GRACE_NS + MILLISECOND_NS;
    let mut ended = 0;
    let mut turns = 0;
    while rig.broker.ended.is_empty() {
        let records = rig.log.0.lock().unwrap().len();
        rig.turn();
        let text = rig.log.0.lock().unwrap()[records..].to_vec();
        let now = String::from_utf8(text).unwrap().lines().count();
        assert!(now <= ENDS_AT_ONCE, "{now} in turn {turns}");
        ended += now;
        turns += 1;
    }
    assert_eq!(rig.ended(), [judged.ends], "not before the last of them");
    assert_eq!(ended, 5_000);
    assert!(turns > 10, "{turns}");
    rig.assert_paired();
}

#[test]
fn policies_that_come_during_a_walk_wait_for_its_end() {
    let mut rig = crowded();
    let shut = || policy(Action::Allow, &["deny 203.0.113.0/24"]);
    rig.reload(vec![shut()], 30, [0; 3]);
    assert!(rig.engine.reloading.is_under_way());
    rig.reload(
        vec![policy(Action::Allow, &["deny 198.51.100.0/24"])],
        50,
        [0; 3],
    );
    assert!(rig.broker.reloaded.is_empty());
    while rig.engine.reloading.is_under_way() {
        rig.turn();
    }
    let first = rig.broker.reloaded[0];
    assert_eq!((first.cut, first.kept), (5_000, 5_000));
    let second = rig.broker.reloaded[1];
    assert_eq!((second.cut, second.kept), (5_000, 0));
    for _ in 0..100 {
        rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    }
    assert_eq!(rig.ended(), [first.ends, second.ends]);
    assert_eq!(rig.flows(), 0);
}

/// A policy that all VMs share changes while a predecessor's flows are adopted.
#[test]
fn what_a_predecessor_left_is_adopted_some_in_a_turn_before_its_policy_changes() {
    let roomy = || Setup {
        slots: 32_768,
        max_flows: 32_768,
        rate: 32_768,
        ..Setup::default()
    };
    let mut rig = crowded().restart_in_steps(&roomy());
    rig.engine.adopting.slots_per_turn = 64;
    let left = |rig: &Rig| rig.engine.core.nat.flows.left_in_all();
    let before = left(&rig);
    rig.reload(
        vec![policy(Action::Allow, &["deny 203.0.113.0/24"])],
        30,
        [0; 3],
    );
    assert!(before - left(&rig) <= 2 * 64, "not all at once");
    // Until they are adopted what was in force is; and a VM keeps its policy whatever comes of it.
    let mut more = spec(2, &roomy());
    more.policy = 7;
    more.max_flows = 9;
    rig.tell(|engine| engine.set_vm(more));
    rig.guest(2, &udp((GUEST, 40_000), OTHER, b"x"));
    assert_eq!(rig.at_world().len(), 1);
    rig.tell(|engine| engine.remove_vm(VmRow::new(3), VmId::new(103)));
    let mut turns = 0;
    while rig.engine.reloading.is_under_way() {
        let before = left(&rig);
        rig.turn();
        assert!(before - left(&rig) <= 2 * 64);
        turns += 1;
    }
    assert!(turns > 50, "{turns}");
    let judged = rig.broker.reloaded[0];
    assert_eq!((judged.cut, judged.kept, judged.left), (5_001, 5_000, 0));
    let core = &rig.engine.core;
    assert_eq!(core.rules.judge.borrow().policy_of(VmId::new(102)), Some(0));
    assert_eq!(core.vms.get(VmRow::new(2)).unwrap().net.max_flows, 9);
    assert!(core.vms.get(VmRow::new(3)).is_none(), "it is not back");
    rig.guest(2, &udp((GUEST, 40_001), OTHER, b"x"));
    assert_eq!(rig.refused(2, Refusal::Rule), 1);
}

#[test]
fn a_change_of_one_policy_looks_at_its_vms_alone() {
    let mut rig = crowded();
    rig.reload(
        vec![policy(Action::Allow, &[]), policy(Action::Allow, &[])],
        30,
        [0, 1, 1],
    );
    while rig.engine.reloading.is_under_way() {
        rig.turn();
    }
    rig.guest(2, &udp((GUEST, 40_000), OTHER, b"x"));
    let view = |rig: &Rig, vm| {
        ByRules(rig.engine.core.rules.judge.clone())
            .answer_policy(VmId::new(vm))
            .view
    };
    let views = [view(&rig, 101), view(&rig, 102)];
    let shut = policy(Action::Allow, &["deny 203.0.113.0/24"]).numbered(90);
    let mut of_it = spec(2, &Setup::default());
    of_it.policy = 1;
    let looked = rig.kernel.borrow().slots_looked_at.get();
    rig.tell(|engine| {
        engine.reload(Reload {
            id: 2,
            policies: vec![(1, Some(shut))],
            local: LocalAddresses::default(),
            vms: vec![of_it],
            strictly: Vec::new(),
        });
    });
    while rig.engine.reloading.is_under_way() {
        rig.turn();
    }
    let looks = rig.kernel.borrow().slots_looked_at.get() - looked;
    assert!(looks < 2_000, "{looks} slots for one flow");
    let judged = rig.broker.reloaded.last().unwrap();
    assert_eq!((judged.id, judged.cut, judged.kept), (2, 1, 0));
    // Answers of DNS that others were given stay theirs.
    assert_eq!(view(&rig, 101), views[0]);
    assert_ne!(view(&rig, 102), views[1]);
}
