//! Tests that the gate decides after DNS as a policy says it would.
use proptest::prelude::*;
use slipgate_abi::VmId;
use slipgate_policy::{
    Action, Rule,
    strategies::{NAMES, destination, policy as any_policy},
    wire,
};

use super::*;
use crate::dns::{
    NamePolicy as _,
    chain::tests::{a, aaaa, answer},
};

fn policy(default: Action, rules: &[(Action, &str)]) -> Policy {
    let rules = rules
        .iter()
        .map(|(action, text)| Rule::parse(*action, text).unwrap());
    Policy::new(default, rules.collect())
}

/// Verdict of the gate after the guest has asked for the name and received that address, and
/// whether the question was allowed.
fn judged(policy: &Policy, name: &'static str, to: Destination) -> (Verdict, bool) {
    let judge = Judge::shared(policy.clone());
    let mut dns = ByRules(judge.clone());
    let asked = wire(name).unwrap();
    let passes = dns.question(VmId::new(1), Name(&asked), 1) == Ok(());
    if passes {
        let records = [match to.addr {
            IpAddr::V4(addr) => a(name, 60, addr.octets()),
            IpAddr::V6(addr) => aaaa(name, 60, addr),
        }];
        let _ = dns.answer(VmId::new(1), Name(&asked), &answer(name, &records), 0, 0);
    }
    let verdict = judge.borrow().decide(VmId::new(1), to, 1);
    (verdict, passes)
}

#[test]
fn a_policy_decides_as_told_what_the_gate_does_after_dns() {
    use Action::{Allow, Deny};
    let all = [
        (Deny, "203.0.113.7"),
        (Allow, "*.ok.test:443/tcp"),
        (Deny, "bad.ok.test:443"),
        (Allow, "203.0.113.0/25:22"),
        (Allow, "late.ok.test"),
    ];
    for default in [Allow, Deny] {
        let policy = policy(default, &all);
        for name in ["a.ok.test", "bad.ok.test", "late.ok.test", "other.test"] {
            let asked = wire(name).unwrap();
            for last in [7, 8, 200] {
                for port in [22, 80, 443] {
                    let to = Destination {
                        addr: [203, 0, 113, last].into(),
                        port,
                        protocol: slipgate_abi::Protocol::Tcp,
                    };
                    let (verdict, _) = judged(&policy, name, to);
                    let told = policy.decide_as(to, Name(&asked));
                    assert_eq!(told, verdict.decision, "{name} {to:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_random_policy_decides_as_the_gate_does_after_the_question(
        policy in any_policy(),
        name in prop::sample::select(&NAMES[..]),
        to in destination(),
    ) {
        let asked = wire(name).unwrap();
        let (verdict, passes) = judged(&policy, name, to);
        prop_assert_eq!(policy.question(Name(&asked)).is_allowed(), passes);
        prop_assert_eq!(policy.decide_as(to, Name(&asked)), verdict.decision);
        prop_assert_eq!(policy.inspects(verdict.decision.rule), verdict.inspect);
    }
}
