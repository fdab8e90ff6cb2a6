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

#[test]
fn a_vm_that_asks_too_often_is_told_so() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    rig.vm.dns_per_second = 5;
    let code = |rig: &mut Rig, i: u16| {
        rig.ask(4000 + i, &ask(i, "evil.test.", RecordType::A))
            .unwrap();
        rig.told()
    };
    let question = with_edns(ask(1, "a.ok.test.", RecordType::A), 1232, false);
    for i in 0..5 {
        code(&mut rig, i);
    }
    rig.ask(4000, &question).unwrap();
    let bytes = rig.proxy.next_reply().unwrap().message;
    assert_eq!(read(&bytes).metadata.response_code, ResponseCode::Refused);
    assert!(bytes.ends_with(b"more than 5 questions a second"));
    assert!(upstream.is_idle());
    assert_eq!(judge.borrow().counts(1).over_rate, 1);
    // Another VM is not held up; and a second later it may ask again.
    rig.ask_as(&test_vm::vm(2), Origin::Tcp { connection: 1 }, &question)
        .unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(rig.told().answers.len(), 1);
    rig.pass(SECOND_NS);
    rig.ask(4000, &question).unwrap();
    assert_eq!(rig.told().answers.len(), 1);
}

#[test]
fn new_names_beyond_the_bound_do_not_reach_a_resolver() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    let label = "x".repeat(60);
    let mut sent = 0;
    for i in 0..1_000_u16 {
        let name = format!("{i}.{label}.ok.test.");
        rig.ask(4000, &ask(i, &name, RecordType::A)).unwrap();
        match rig.reply() {
            Some((_, refused)) => {
                assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
            }
            None => {
                upstream.refuse(ResponseCode::NXDomain);
                rig.settle_fast();
                rig.told();
                sent += 1;
            }
        }
    }
    assert!((450..520).contains(&sent), "{sent}");
    assert!(upstream.is_idle());
    assert_eq!(judge.borrow().counts(1).new_names, 1_000 - sent);
}

#[test]
fn policies_share_no_answers_and_each_is_told_its_own_way() {
    let upstream = Upstream::new();
    let rule = |action, text: &str| Rule::parse(action, text).unwrap();
    let dns = crate::rules::DnsSettings {
        ttl_ceiling_s: 50,
        ..Default::default()
    };
    let settings = crate::rules::Settings {
        dns,
        ..Default::default()
    };
    let inspecting = vec![rule(Action::Inspect, "*.ok.test:443")];
    let open = vec![rule(Action::Allow, "*.ok.test:443")];
    let judge = Judge::shared(crate::rules::PolicySet::new(vec![
        Policy::new(Action::Deny, inspecting).with(settings),
        Policy::new(Action::Deny, open),
    ]));
    judge.borrow_mut().assign(1, 0);
    judge.borrow_mut().assign(2, 1);
    let mut rig = Rig::new(&[]);
    let policy = Box::new(ByRules(judge.clone()));
    rig.proxy = Proxy::new(&[upstream.address], Limits::default(), policy);
    let question = ask(1, "a.ok.test.", RecordType::HTTPS);
    let answer = |upstream: &Upstream| {
        let (query, from) = upstream.query();
        let mut bytes = response(&query).to_vec().unwrap();
        bytes[7] = 1;
        // TTL 300, priority 1, the owner as target; alpn h2, ech.
        bytes.extend(b"\xc0\x0c\0\x41\0\x01\0\0\x01\x2c\0\x13\0\x01\0");
        bytes.extend(b"\0\x01\0\x03\x02h2\0\x05\0\x05\xfe\x0d\0\0\x01");
        upstream.send_bytes(&bytes, from);
    };
    let told = |rig: &mut Rig, vm: u32| {
        rig.ask_as(&test_vm::vm(vm), Origin::Tcp { connection: 1 }, &question)
            .unwrap();
        if !upstream.is_idle() {
            answer(&upstream);
            rig.settle();
        }
        let bytes = rig.proxy.next_reply().unwrap().message;
        let ttl = read(&bytes).answers[0].ttl;
        (bytes.windows(2).any(|w| w == [0xfe, 0x0d]), ttl)
    };
    assert_eq!(told(&mut rig, 1), (false, 50));
    assert_eq!(rig.proxy.cached(), 1);
    assert_eq!(told(&mut rig, 2), (true, 300), "asked for again");
    assert_eq!(rig.proxy.cached(), 2);
    rig.pass(SECOND_NS);
    assert_eq!(told(&mut rig, 1), (false, 50), "from the cache");
    assert_eq!(told(&mut rig, 2), (true, 299));
    assert_eq!(rig.counted().1, 0);
    // What was kept under other rules is not told.
    judge.borrow_mut().rejudge(rig.now_ns);
    assert_eq!(told(&mut rig, 2), (true, 300));
}
