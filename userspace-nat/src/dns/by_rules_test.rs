//! The proxy under rules by name, from the question to what is open.
use super::{
    Limits, Proxy,
    hickory::*,
    rig::{Rig, Upstream},
};
use crate::{
    clock::SECOND_NS,
    dns::Origin,
    rules::{Action, ByRules, Destination, Judge, Policy, Rule, SharedJudge},
    test_vm,
};

const ADDRESS: [u8; 4] = [203, 0, 113, 10];

fn rig(upstream: &Upstream) -> (Rig, SharedJudge) {
    let rules = vec![Rule::parse(Action::Allow, "*.ok.test:443").unwrap()];
    let judge = Judge::shared(Policy::new(Action::Deny, rules));
    let mut rig = Rig::new(&[]);
    let policy = Box::new(ByRules(judge.clone()));
    rig.proxy = Proxy::new(&[upstream.address], Limits::default(), policy);
    (rig, judge)
}

fn is_open(judge: &SharedJudge, vm: u32, now_ns: u64) -> bool {
    let to = Destination {
        addr: ADDRESS.into(),
        port: 443,
        protocol: slipgate_abi::Protocol::Tcp,
    };
    judge.borrow().decide(vm, to, now_ns).decision.is_allowed()
}

#[test]
fn rfc8914_a_refused_question_says_why_and_goes_nowhere() {
    let upstream = Upstream::new();
    let (mut rig, _) = rig(&upstream);
    let question = ask(9, "Evil.test.", RecordType::A);
    rig.ask(4000, &with_edns(question.clone(), 1232, false))
        .unwrap();
    let bytes = rig.proxy.next_reply().unwrap().message;
    assert_eq!(read(&bytes).metadata.response_code, ResponseCode::Refused);
    let text = b"no rule allows evil.test, and the default is deny";
    let (head, tail) = bytes.split_at(bytes.len() - text.len());
    assert_eq!(tail, text);
    let len = text.len() as u8;
    // OPT's length; option code, its length, and the INFO-CODE "Prohibited".
    assert!(
        head.ends_with(&[0, len + 6, 0, 15, 0, len + 2, 0, 18]),
        "{head:?}"
    );

    rig.ask(4000, &question).unwrap();
    let plain = rig.told();
    assert_eq!(plain.metadata.response_code, ResponseCode::Refused);
    assert!(plain.edns.is_none(), "no OPT for who sent none");
    assert!(upstream.is_idle());
}

#[test]
fn what_an_answer_opens_is_open_when_the_guest_has_it_also_from_the_cache() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    let question = ask(1, "a.ok.test.", RecordType::A);
    rig.ask(4000, &question).unwrap();
    assert!(!is_open(&judge, 1, rig.now_ns));
    upstream.answer(60, ADDRESS);
    rig.settle();
    assert!(is_open(&judge, 1, rig.now_ns));
    assert_eq!(rig.told().answers.len(), 1);
    assert!(!is_open(&judge, 2, rig.now_ns), "another VM's");

    rig.pass(20 * SECOND_NS);
    let other = test_vm::vm(2);
    rig.ask_as(&other, Origin::Tcp { connection: 1 }, &question)
        .unwrap();
    assert!(is_open(&judge, 2, rig.now_ns));
    assert!(upstream.is_idle());
    assert!(is_open(&judge, 2, rig.now_ns + 39 * SECOND_NS));
    assert!(
        !is_open(&judge, 2, rig.now_ns + 41 * SECOND_NS),
        "what is left of the TTL"
    );
}
