use slipgate_abi::{Protocol, VmId};

use super::*;
use crate::{
    dns::{
        NamePolicy,
        chain::tests::{a, answer, cname},
    },
    name_gate::{ByRules, MAX_PER_VM},
};
use slipgate_policy::{Action, Policy, Rule, wire};

const VM: VmId = VmId::new(7);
const ADDRESS: [u8; 4] = [203, 0, 113, 10];

fn judge(default: Action, rules: &[(Action, &str)]) -> ByRules {
    let rules = rules
        .iter()
        .map(|(action, text)| Rule::parse(*action, text).unwrap());
    ByRules(Judge::shared(Policy::new(default, rules.collect())))
}

fn tell(by: &mut ByRules, vm: VmId, name: &'static str) {
    let told = answer(name, &[a(name, 60, ADDRESS)]);
    let verdict = by.answer(vm, Name(&wire(name).unwrap()), &told, 0, 0);
    assert_eq!(verdict, Ok(()));
}

fn said(by: &ByRules, name: &str, port: u16) -> Result<String, NameRefusal> {
    let to = Destination {
        addr: ADDRESS.into(),
        port,
        protocol: Protocol::Tcp,
    };
    let judge = by.0.borrow();
    let found = judge.may_name(VM, to, Name(&wire(name).unwrap()), 1);
    found.map(|name| name.name.to_string())
}

#[test]
fn the_very_name_must_have_been_told() {
    let rules = [
        (Action::Inspect, "*.a.test:443"),
        (Action::Allow, "b.test:80"),
    ];
    let mut by = judge(Action::Deny, &rules);
    tell(&mut by, VM, "x.a.test");
    assert_eq!(said(&by, "x.a.test", 443), Ok("x.a.test".into()));
    assert!(matches!(
        said(&by, "y.a.test", 443),
        Err(NameRefusal::NotOpen { .. })
    ));
    assert!(matches!(
        said(&by, "b.test", 443),
        Err(NameRefusal::Refused { .. })
    ));
    let refused = said(&by, "c.test", 443).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "c.test is refused by the default, for no rule allows it"
    );
    // Told of the same address, to another VM, and for another port.
    tell(&mut by, VmId::new(VM.get() + 1), "y.a.test");
    tell(&mut by, VM, "b.test");
    assert!(said(&by, "y.a.test", 443).is_err());
    assert!(matches!(
        said(&by, "b.test", 443),
        Err(NameRefusal::Refused { .. })
    ));
    assert_eq!(
        said(&by, "x.a.test", 443),
        Ok("x.a.test".into()),
        "both are remembered"
    );
}

#[test]
fn names_with_the_same_effect_are_told_apart() {
    let mut by = judge(Action::Deny, &[(Action::Inspect, "*.a.test")]);
    for name in ["x.a.test", "y.a.test", "z.a.test"] {
        tell(&mut by, VM, name);
    }
    for name in ["x.a.test", "y.a.test", "z.a.test"] {
        assert_eq!(said(&by, name, 443), Ok(name.into()));
    }
    assert_eq!(by.0.borrow().counts(VM).open, 3);
}

#[test]
fn under_a_rule_by_address_any_name_that_may_be_asked_for_may_be_said() {
    let rules = [
        (Action::Inspect, "0.0.0.0/0:443/tcp"),
        (Action::Deny, "evil.test"),
        (Action::Deny, "half.test:443"),
    ];
    let mut by = judge(Action::Allow, &rules);
    for name in ["any.test", "half.test"] {
        tell(&mut by, VM, name);
    }
    assert_eq!(said(&by, "any.test", 443), Ok("any.test".into()));
    assert!(matches!(
        said(&by, "other.test", 443),
        Err(NameRefusal::NotOpen { .. })
    ));
    for denied in ["evil.test", "half.test"] {
        assert!(
            matches!(said(&by, denied, 443), Err(NameRefusal::Refused { .. })),
            "{denied}"
        );
    }
}

#[test]
fn what_a_name_leads_through_is_not_said_for_it() {
    let mut by = judge(Action::Allow, &[(Action::Inspect, "0.0.0.0/0")]);
    let told = answer(
        "a.test",
        &[cname("a.test", 60, "b.test"), a("b.test", 60, ADDRESS)],
    );
    let verdict = by.answer(VM, Name(&wire("a.test").unwrap()), &told, 0, 0);
    assert_eq!(verdict, Ok(()));
    assert_eq!(said(&by, "a.test", 443), Ok("a.test".into()));
    assert!(said(&by, "b.test", 443).is_err());
}

/// Prints what the worst that a guest can make of its room costs: each name an opening, all of them
/// at one address.
#[test]
#[ignore = "a measurement"]
fn speed_with_all_names_at_one_address() {
    const ALL: u32 = MAX_PER_VM as u32;
    let each = |what: &str, count: u32, work: &mut dyn FnMut(usize)| {
        let began = std::time::Instant::now();
        (0..count as usize).for_each(&mut *work);
        let ns = began.elapsed().as_nanos() / u128::from(count);
        println!("{what}: {ns} ns");
    };
    let mut by = judge(Action::Deny, &[(Action::Inspect, "*.a.test:443")]);
    let name = |n| wire(&format!("n{n}.a.test")).unwrap();
    let names: Vec<_> = (0..ALL).map(name).collect();
    // Its owner is never freed, as names in tests are not.
    let told = |n| {
        let owner: &'static str = format!("n{n}.a.test").leak();
        answer(owner, &[a(owner, 60, ADDRESS)])
    };
    let answers: Vec<_> = (0..ALL).map(told).collect();
    each("an answer", ALL, &mut |n| {
        let verdict = by.answer(VM, Name(&names[n]), &answers[n], 0, 0);
        assert_eq!(verdict, Ok(()));
    });
    assert_eq!(by.0.borrow().counts(VM).open, u64::from(ALL));
    let to = Destination {
        addr: ADDRESS.into(),
        port: 443,
        protocol: Protocol::Tcp,
    };
    each("a decision", ALL, &mut |_| {
        assert!(by.0.borrow().decide(VM, to, 1).decision.is_allowed());
    });
    each("what a connection says", ALL, &mut |n| {
        assert!(by.0.borrow().may_name(VM, to, Name(&names[n]), 1).is_ok());
    });
    each("a reload", 1, &mut |_| by.0.borrow_mut().rejudge_all(1));
    let end_ns = 61 * crate::clock::SECOND_NS;
    each("the end of all", 1, &mut |_| {
        by.0.borrow_mut().expire(end_ns)
    });
    assert_eq!(by.0.borrow().counts(VM).open, 0);
}
