//! The proxy under rules by name, from the question to what is open.
use super::{
    hickory::*,
    rig::{Rig, Upstream, as_guest, first_address},
};
use crate::{
    clock::SECOND_NS,
    dns::{Limits, Origin, Proxy, Resolvers},
    name_gate::{ByRules, Judge, SharedJudge},
    record::Source,
    test_vm,
};
use slipgate_abi::VmId;
use slipgate_policy::{
    Action, Destination, DnsSettings, Policy, PolicySet, Rule, Settings, strategies::questions_of,
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

fn is_open(judge: &SharedJudge, vm: VmId, now_ns: u64) -> bool {
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
fn aaaa_is_empty_for_an_allowed_name_and_refused_for_another() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    for (name, code) in [
        ("a.ok.test.", ResponseCode::NoError),
        ("evil.test.", ResponseCode::Refused),
    ] {
        rig.ask(4000, &ask(1, name, RecordType::AAAA)).unwrap();
        assert_eq!(rig.told().metadata.response_code, code, "{name}");
    }
    assert!(upstream.is_idle());
    assert!(!is_open(&judge, VmId::new(1), rig.now_ns));
}

#[test]
fn what_an_answer_opens_is_open_when_the_guest_has_it_also_from_the_cache() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    let question = ask(1, "a.ok.test.", RecordType::A);
    rig.ask(4000, &question).unwrap();
    assert!(!is_open(&judge, VmId::new(1), rig.now_ns));
    upstream.answer(60, ADDRESS);
    rig.settle();
    assert!(is_open(&judge, VmId::new(1), rig.now_ns));
    assert_eq!(rig.told().answers.len(), 1);
    assert!(!is_open(&judge, VmId::new(2), rig.now_ns), "another VM's");

    rig.pass(20 * SECOND_NS);
    let other = test_vm::vm(2);
    rig.ask_as(&other, Origin::Tcp { connection: 1 }, &question)
        .unwrap();
    assert!(is_open(&judge, VmId::new(2), rig.now_ns));
    assert!(upstream.is_idle());
    assert!(is_open(&judge, VmId::new(2), rig.now_ns + 39 * SECOND_NS));
    assert!(
        !is_open(&judge, VmId::new(2), rig.now_ns + 41 * SECOND_NS),
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
    assert_eq!(judge.borrow().counts(VmId::new(1)).over_rate, 1);
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
    assert_eq!(judge.borrow().counts(VmId::new(1)).new_names, 1_000 - sent);
}

#[test]
fn questions_asked_before_are_sent_again_as_often_as_their_choice_may_say_something() {
    let upstream = Upstream::new();
    let rules = vec![
        Rule::parse(Action::Allow, "*.ok.test:443").unwrap(),
        Rule::parse(Action::Allow, "fixed.test:443").unwrap(),
    ];
    let settings = questions_of(64, 64);
    let judge = Judge::shared(Policy::new(Action::Deny, rules).with(settings));
    let mut rig = Rig::new(&[]);
    let policy = Box::new(ByRules(judge.clone()));
    rig.proxy = Proxy::new(&[upstream.address], Limits::default(), policy);
    let sends = |rig: &mut Rig, name: &str| {
        rig.ask(4000, &ask(1, name, RecordType::A)).unwrap();
        match rig.reply() {
            Some((_, refused)) => {
                assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
                false
            }
            None => {
                // To be asked again at once.
                upstream.answer(0, ADDRESS);
                rig.settle_fast();
                rig.told();
                true
            }
        }
    };
    let names: Vec<String> = ["a", "b", "c"]
        .map(|name| format!("{name}.ok.test."))
        .into();
    for name in &names {
        assert!(sends(&mut rig, name));
    }
    // One that a rule gives costs its type, and from then on is one of four.
    assert!(sends(&mut rig, "fixed.test."));
    let again = |i: usize| names.get(i % 4).map_or("fixed.test.", String::as_str);
    let times = (0..1_000)
        .take_while(|i| sends(&mut rig, again(*i)))
        .count();
    assert_eq!(times, (64 * 8 - 16) / 2);
    assert!(!sends(&mut rig, "fixed.test."));
    let counted = |judge: &SharedJudge| {
        let counts = judge.borrow().counts(VmId::new(1));
        (counts.new_names, counts.asked_again)
    };
    assert_eq!(counted(&judge), (0, 2));
    // New names have a bucket of their own.
    assert!(sends(&mut rig, "d.ok.test."));
    let long = format!("{}.ok.test.", "x".repeat(63));
    assert!(!sends(&mut rig, &long));
    assert_eq!(counted(&judge), (1, 2));
    rig.pass(60 * SECOND_NS);
    assert!(sends(&mut rig, "a.ok.test."));
}

#[test]
fn what_is_no_query_counts_against_the_rate_and_is_recorded() {
    let upstream = Upstream::new();
    let (mut rig, judge) = rig(&upstream);
    rig.vm.dns_per_second = 3;
    rig.proxy.keep_records(true);
    let transfer = ask(1, "Evil.test.", RecordType::AXFR).to_vec().unwrap();
    let update = [0, 2, 0x28, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 1];
    let empty = [0; 12];
    let messages = [&transfer[..], &update, &empty, &empty, &transfer];
    for message in messages {
        let vm = rig.vm.clone();
        let origin = Origin::Tcp { connection: 1 };
        rig.proxy
            .query(as_guest(&vm), origin, message, &rig.poller, rig.now_ns)
            .unwrap();
    }
    let mut codes = Vec::new();
    while let Some((_, reply)) = rig.reply() {
        codes.push(reply.metadata.response_code);
    }
    use ResponseCode::{FormErr, NotImp, Refused};
    assert_eq!(codes, [NotImp, NotImp, FormErr, Refused, Refused]);
    rig.ask(4000, &ask(1, "a.ok.test.", RecordType::A)).unwrap();
    assert_eq!(rig.told().metadata.response_code, Refused);
    assert!(upstream.is_idle());
    assert_eq!(judge.borrow().counts(VmId::new(1)).over_rate, 3);
    assert_eq!(rig.counted(), (6, 0, 0));
    let records: Vec<_> = std::iter::from_fn(|| rig.proxy.next_record()).collect();
    let over = Some("refused: more than 3 questions a second");
    let expected = [
        ("evil.test", 252, 4, None, Source::Nobody),
        ("", 0, 4, None, Source::Nobody),
        ("", 0, 1, None, Source::Nobody),
        // No tool judges these by their names.
        ("", 0, 5, over, Source::Nobody),
        ("evil.test", 252, 5, over, Source::Nobody),
        ("a.ok.test", 1, 5, over, Source::Policy),
    ];
    let seen = records.iter().map(|r| {
        let refused = r.refused.as_deref();
        (&*r.name, r.qtype, r.rcode, refused, r.source)
    });
    assert_eq!(seen.collect::<Vec<_>>(), expected);
}

#[test]
fn a_record_says_who_has_answered() {
    let upstream = Upstream::new();
    let (mut rig, _) = rig(&upstream);
    rig.proxy.keep_records(true);
    let source = |rig: &mut Rig| {
        let record = rig.proxy.next_record().expect("a record");
        assert_eq!(rig.proxy.next_record(), None, "one record");
        rig.told();
        record.source
    };
    let asked = |rig: &mut Rig, name: &str, of: RecordType| {
        rig.ask(4000, &ask(1, name, of)).unwrap();
        if !upstream.is_idle() {
            upstream.answer(60, ADDRESS);
            rig.settle();
        }
        source(rig)
    };
    let resolver = Source::Upstream(upstream.address);
    assert_eq!(asked(&mut rig, "a.ok.test.", RecordType::A), resolver);
    assert_eq!(asked(&mut rig, "a.ok.test.", RecordType::A), Source::Cache);
    // Without IPv6 there is nothing to ask for.
    let six = RecordType::AAAA;
    assert_eq!(asked(&mut rig, "a.ok.test.", six), Source::Policy);
    assert_eq!(asked(&mut rig, "evil.test.", six), Source::Policy);
    // The answer of a resolver is refused for what it says.
    rig.ask(4000, &ask(1, "b.ok.test.", RecordType::A)).unwrap();
    upstream.answer(60, [127, 0, 0, 1]);
    rig.settle();
    assert_eq!(source(&mut rig), resolver);
    // A resolver that does not answer.
    rig.ask(4000, &ask(1, "c.ok.test.", RecordType::A)).unwrap();
    for _ in 0..30 {
        rig.pass(SECOND_NS);
    }
    assert_eq!(source(&mut rig), Source::Nobody);
}

#[test]
fn policies_share_no_answers_and_each_is_told_its_own_way() {
    let upstream = Upstream::new();
    let rule = |action, text: &str| Rule::parse(action, text).unwrap();
    let dns = DnsSettings {
        ttl_ceiling_s: 50,
        ..Default::default()
    };
    let settings = Settings {
        dns,
        ..Default::default()
    };
    let inspecting = vec![rule(Action::Inspect, "*.ok.test:443")];
    let open = vec![rule(Action::Allow, "*.ok.test:443")];
    let judge = Judge::shared(PolicySet::new(vec![
        Policy::new(Action::Deny, inspecting).with(settings),
        Policy::new(Action::Deny, open),
    ]));
    judge.borrow_mut().assign(VmId::new(1), 0);
    judge.borrow_mut().assign(VmId::new(2), 1);
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
    let told = |rig: &mut Rig, vm: VmId| {
        rig.ask_as(
            &test_vm::vm(vm.get()),
            Origin::Tcp { connection: 1 },
            &question,
        )
        .unwrap();
        if !upstream.is_idle() {
            answer(&upstream);
            rig.settle();
        }
        let bytes = rig.proxy.next_reply().unwrap().message;
        let ttl = read(&bytes).answers[0].ttl;
        (bytes.windows(2).any(|w| w == [0xfe, 0x0d]), ttl)
    };
    assert_eq!(told(&mut rig, VmId::new(1)), (false, 50));
    assert_eq!(rig.proxy.cached(), 1);
    assert_eq!(told(&mut rig, VmId::new(2)), (true, 300), "asked for again");
    assert_eq!(rig.proxy.cached(), 2);
    rig.pass(SECOND_NS);
    assert_eq!(told(&mut rig, VmId::new(1)), (false, 50), "from the cache");
    assert_eq!(told(&mut rig, VmId::new(2)), (true, 299));
    assert_eq!(rig.counted().1, 0);
    // What was kept under other rules is not told.
    judge.borrow_mut().rejudge_all(rig.now_ns);
    assert_eq!(told(&mut rig, VmId::new(2)), (true, 300));
}

/// A policy without rules whose questions go there.
fn asking(resolvers: Resolvers) -> Policy {
    let dns = DnsSettings {
        resolvers,
        ..Default::default()
    };
    let settings = Settings {
        dns,
        ..Default::default()
    };
    Policy::new(Action::Allow, Vec::<Rule>::new()).with(settings)
}

fn these(upstream: &Upstream) -> Policy {
    asking(Resolvers::These(vec![upstream.address]))
}

/// The VM with the policy of its number less one; `host`: the host's resolver.
fn rig_of(policies: Vec<Policy>, host: &Upstream) -> (Rig, SharedJudge) {
    let vms = 1..=policies.len() as u32;
    let judge = Judge::shared(PolicySet::new(policies));
    for vm in vms {
        judge.borrow_mut().assign(VmId::new(vm), vm - 1);
    }
    let mut rig = Rig::new(&[]);
    let policy = Box::new(ByRules(judge.clone()));
    rig.proxy = Proxy::new(&[host.address], Limits::default(), policy);
    (rig, judge)
}

fn asks(rig: &mut Rig, vm: VmId, question: &Message) {
    let origin = Origin::Tcp {
        connection: u64::from(vm.get()),
    };
    rig.ask_as(&test_vm::vm(vm.get()), origin, question)
        .unwrap();
}

/// Address in each VM's reply, by VM; `None` if the reply is a failure.
fn told(rig: &mut Rig) -> Vec<(u32, Option<std::net::IpAddr>)> {
    let mut told: Vec<_> = std::iter::from_fn(|| rig.proxy.next_reply())
        .map(|reply| (reply.vm.get(), first_address(&read(&reply.message))))
        .collect();
    told.sort_unstable();
    told
}

#[test]
fn each_policy_asks_its_own_resolvers_and_is_told_nothing_of_anothers() {
    let (host, one, two) = (Upstream::new(), Upstream::new(), Upstream::new());
    let policies = vec![these(&one), these(&two), asking(Resolvers::Host)];
    let (mut rig, _) = rig_of(policies, &host);
    let question = ask(1, "www.example.com.", RecordType::A);
    for (vm, upstream, address) in [(1, &one, 1), (2, &two, 2), (3, &host, 3)] {
        asks(&mut rig, VmId::new(vm), &question);
        upstream.answer(60, [192, 0, 2, address]);
        rig.settle();
        let address = [192, 0, 2, address].into();
        assert_eq!(told(&mut rig), [(vm, Some(address))]);
        // From the cache.
        asks(&mut rig, VmId::new(vm), &question);
        assert_eq!(told(&mut rig), [(vm, Some(address))]);
    }
    assert!([&host, &one, &two].iter().all(|u| u.is_idle()));
    assert_eq!(rig.proxy.cached(), 3);
    // The host's are others now.
    rig.proxy.set_resolvers(&[two.address]);
    asks(
        &mut rig,
        VmId::new(3),
        &ask(2, "other.example.com.", RecordType::A),
    );
    two.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(told(&mut rig), [(3, Some(ADDRESS.into()))]);
}

#[test]
fn without_dns_every_question_is_refused_and_nobody_is_asked() {
    let host = Upstream::new();
    let policies = vec![asking(Resolvers::Nobody), asking(Resolvers::Host)];
    let (mut rig, judge) = rig_of(policies, &host);
    let question = ask(7, "www.example.com.", RecordType::A);
    rig.ask(4000, &question).unwrap();
    asks(&mut rig, VmId::new(1), &question);
    for _ in 0..2 {
        let (_, told) = rig.reply().expect("a reply at once");
        assert_eq!(told.metadata.id, 7);
        assert_eq!(told.metadata.response_code, ResponseCode::Refused);
    }
    assert_eq!(rig.proxy.in_flight(), 0);
    assert!(host.is_idle());
    let counts = judge.borrow().counts(VmId::new(1));
    assert_eq!((counts.refused_names, counts.refused_by.len()), (2, 1));
    assert_eq!(counts.refused_by[0].rule, "--dns none");
    // The other one's are.
    asks(&mut rig, VmId::new(2), &question);
    host.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(told(&mut rig), [(2, Some(ADDRESS.into()))]);
}

#[test]
fn a_reload_changes_resolvers_also_of_questions_in_flight() {
    let (host, old, new) = (Upstream::new(), Upstream::new(), Upstream::new());
    let (mut rig, judge) = rig_of(vec![these(&old)], &host);
    let question = ask(1, "www.example.com.", RecordType::A);
    asks(&mut rig, VmId::new(1), &question);
    let (query, from) = old.query();
    let policies = PolicySet::new(vec![these(&new)]);
    judge
        .borrow_mut()
        .set_policies(policies, &[(VmId::new(1), 0)], rig.now_ns);
    // What the old one says now is not told.
    old.send(&super::rig::with_address(&query, 60, [192, 0, 2, 1]), from);
    rig.settle();
    assert_eq!(told(&mut rig), []);
    new.answer(60, [192, 0, 2, 2]);
    rig.settle();
    assert_eq!(told(&mut rig), [(1, Some([192, 0, 2, 2].into()))]);
    // One that stays silent is not asked again.
    asks(
        &mut rig,
        VmId::new(1),
        &ask(2, "other.example.com.", RecordType::A),
    );
    new.query();
    let policies = PolicySet::new(vec![asking(Resolvers::Nobody)]);
    judge
        .borrow_mut()
        .set_policies(policies, &[(VmId::new(1), 0)], rig.now_ns);
    rig.pass(SECOND_NS);
    assert_eq!(told(&mut rig), [(1, None)]);
    assert_eq!(rig.proxy.in_flight(), 0);
    assert!([&host, &old, &new].iter().all(|u| u.is_idle()));
}

#[test]
fn who_waited_together_and_has_another_policy_now_is_not_told_its_answer() {
    let (host, one, two) = (Upstream::new(), Upstream::new(), Upstream::new());
    let (mut rig, judge) = rig_of(vec![these(&one)], &host);
    judge.borrow_mut().assign(VmId::new(2), 0);
    let question = ask(1, "www.example.com.", RecordType::A);
    asks(&mut rig, VmId::new(1), &question);
    asks(&mut rig, VmId::new(2), &question);
    assert_eq!(rig.proxy.in_flight(), 1);
    let policies = PolicySet::new(vec![these(&one), these(&two)]);
    judge.borrow_mut().set_policies(
        policies,
        &[(VmId::new(1), 0), (VmId::new(2), 1)],
        rig.now_ns,
    );
    one.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(told(&mut rig), [(1, Some(ADDRESS.into())), (2, None)]);
    asks(&mut rig, VmId::new(2), &question);
    two.answer(60, [192, 0, 2, 2]);
    rig.settle();
    assert_eq!(told(&mut rig), [(2, Some([192, 0, 2, 2].into()))]);
}
