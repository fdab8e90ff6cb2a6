use std::collections::BTreeSet;

use super::{
    super::{
        Origin,
        tests::{hickory::*, rig::*},
    },
    *,
};

const ADDRESS: [u8; 4] = [192, 0, 2, 1];

fn www(id: u16) -> Message {
    ask(id, "www.example.com.", RecordType::A)
}

#[test]
fn rfc5452_ids_and_ports_are_random() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let (mut ids, mut ports) = (BTreeSet::new(), BTreeSet::new());
    for i in 0..50 {
        rig.ask(4000, &ask(1, &format!("n{i}.example."), RecordType::A))
            .unwrap();
        let (query, from) = upstream.query();
        ids.insert(query.metadata.id);
        ports.insert(from.port());
    }
    assert!(
        ids.len() > 45 && ports.len() > 45,
        "{} ids, {} ports",
        ids.len(),
        ports.len()
    );
    let rising = ids.iter().zip(ids.iter().skip(1)).all(|(a, b)| b - a == 1);
    assert!(!rising);
}

#[test]
fn rfc5452_forged_answers_are_passed_over() {
    let upstream = Upstream::new();
    let forger = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    let (query, from) = upstream.query();
    let mut wrong_id = with_address(&query, 60, [6, 6, 6, 6]);
    wrong_id.metadata.id ^= 1;
    upstream.send(&wrong_id, from);
    let mut wrong_name = with_address(
        &ask(query.metadata.id, "x.example.", RecordType::A),
        60,
        [6; 4],
    );
    wrong_name.add_answer(a("www.example.com.", 60, [6, 6, 6, 6]));
    upstream.send(&wrong_name, from);
    // All is right but where it comes from: the kernel keeps it away.
    forger.send(&with_address(&query, 60, [6, 6, 6, 6]), from);
    rig.settle();
    assert!(rig.reply().is_none());
    assert_eq!(rig.proxy.mismatched(), 2);
    upstream.send(&with_address(&query, 60, ADDRESS), from);
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));
}

#[test]
fn a_silent_resolver_is_followed_by_the_next_and_then_asked_last() {
    let (silent, next) = (Upstream::new(), Upstream::new());
    let mut rig = Rig::new(&[&silent, &next]);
    rig.ask(4000, &www(1)).unwrap();
    silent.query();
    assert_eq!(rig.proxy.next_deadline_ns(), Some(rig.now_ns + SECOND_NS));
    rig.pass(SECOND_NS);
    next.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));
    rig.ask(4000, &ask(2, "another.example.", RecordType::A))
        .unwrap();
    next.answer(60, ADDRESS);
    assert!(silent.is_idle());
}

#[test]
fn a_late_answer_to_an_earlier_try_counts() {
    let (late, next) = (Upstream::new(), Upstream::new());
    let mut rig = Rig::new(&[&late, &next]);
    rig.ask(4000, &www(1)).unwrap();
    let (query, from) = late.query();
    rig.pass(SECOND_NS);
    next.query();
    late.send(&with_address(&query, 60, ADDRESS), from);
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));
}

#[test]
fn one_resolver_is_asked_again_and_then_the_question_fails() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    let first = upstream.query();
    rig.pass(SECOND_NS);
    assert_eq!(
        upstream.query(),
        first,
        "by the same socket, so that either answer counts"
    );
    rig.pass(2 * SECOND_NS);
    upstream.query();
    rig.pass(2 * SECOND_NS - 1);
    assert!(rig.reply().is_none());
    rig.pass(1);
    assert_eq!(rig.told().metadata.response_code, ResponseCode::ServFail);
    assert_eq!(rig.counted(), (1, 0, 1));
    assert_eq!(rig.proxy.in_flight(), 0);
    // Too late: the socket is gone, and nothing was cached.
    let sent = upstream.query_gone(&first.0, first.1);
    rig.settle();
    assert!(sent && rig.reply().is_none() && rig.proxy.cached() == 0);
}

#[test]
fn servfail_goes_to_the_next_and_is_told_when_all_fail_but_not_cached() {
    let (bad, good) = (Upstream::new(), Upstream::new());
    let mut rig = Rig::new(&[&bad, &good]);
    rig.ask(4000, &www(1)).unwrap();
    bad.refuse(ResponseCode::ServFail);
    rig.settle();
    good.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));

    let other = ask(2, "broken.example.", RecordType::A);
    for _ in 0..2 {
        rig.ask(4000, &other).unwrap();
        bad.refuse(ResponseCode::Refused);
        rig.settle();
        good.refuse(ResponseCode::ServFail);
        rig.settle();
        assert_eq!(
            rig.told().metadata.response_code,
            ResponseCode::Refused,
            "the first's word"
        );
    }
}

#[test]
fn nobody_there_fails_at_once() {
    let gone = Upstream::new().address;
    let mut rig = Rig::new(&[]);
    rig.ask(4000, &www(1)).unwrap();
    assert_eq!(
        rig.told().metadata.response_code,
        ResponseCode::ServFail,
        "no resolver"
    );
    rig.proxy.set_resolvers(&[gone]);
    rig.ask(4000, &www(1)).unwrap();
    rig.settle();
    assert_eq!(
        rig.told().metadata.response_code,
        ResponseCode::ServFail,
        "port unreachable"
    );
    assert_eq!(rig.counted(), (2, 0, 2));
}

#[test]
fn rfc7766_a_truncated_answer_is_fetched_by_tcp() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let big = ask(1, "big.example.", RecordType::TXT);
    rig.ask(4000, &big).unwrap();
    upstream.truncate();
    rig.settle();
    let (mut stream, query) = upstream.accept();
    rig.settle();
    let mut message = response(&query);
    message.add_answer(txt("big.example.", 60, 3000));
    send_framed(&mut stream, &message);
    rig.settle();
    // By UDP it does not fit; by TCP, now from the cache, it is whole.
    let told = rig.told();
    assert!(told.metadata.truncation && told.answers.is_empty());
    let vm = rig.vm.clone();
    rig.ask_as(&vm, Origin::Tcp { connection: 1 }, &big)
        .unwrap();
    let told = rig.told();
    assert!(!told.metadata.truncation);
    assert_eq!(told.answers, message.answers);
    assert_eq!(rig.counted(), (2, 1, 0));
}

#[test]
fn without_tcp_a_truncated_answer_is_told_as_such() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    let vm = rig.vm.clone();
    rig.ask_as(&vm, Origin::Tcp { connection: 1 }, &www(2))
        .unwrap();
    upstream.truncate();
    rig.settle();
    drop(upstream.accept());
    rig.settle();
    for _ in 0..2 {
        match rig.reply().unwrap() {
            (Origin::Udp { .. }, told) => assert!(told.metadata.truncation),
            (Origin::Tcp { .. }, told) => {
                assert_eq!(told.metadata.response_code, ResponseCode::ServFail);
            }
        }
    }
    assert_eq!(rig.proxy.cached(), 0);
}

#[test]
fn a_tcp_resolver_that_stalls_is_given_up() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    upstream.truncate();
    rig.settle();
    let (mut stream, _query) = upstream.accept();
    std::io::Write::write_all(&mut stream, &[0x40, 0, 1, 2, 3]).unwrap();
    rig.settle();
    rig.pass(2 * SECOND_NS);
    assert!(rig.told().metadata.truncation);
    assert_eq!(
        (rig.proxy.in_flight(), rig.proxy.next_deadline_ns()),
        (0, None)
    );
}

#[test]
fn dns_0x20_the_name_goes_out_in_random_case_and_the_guests_case_does_not() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let mut seen = BTreeSet::new();
    for i in 0..20 {
        let name = format!("ALL.UPPER.CASE.n{i}.example.");
        rig.ask(4000, &ask(1, &name, RecordType::A)).unwrap();
        let (query, from) = upstream.query();
        let sent = query.queries[0].name().to_string();
        assert!(sent.eq_ignore_ascii_case(&name));
        seen.insert(sent[..14].to_owned());
        upstream.send(&with_address(&query, 60, ADDRESS), from);
        rig.settle();
        assert_eq!(rig.told().queries[0].name().to_string(), name);
    }
    assert!(seen.len() > 15, "{seen:?}");
}

#[test]
fn dns_0x20_an_answer_in_another_case_is_asked_for_again_by_tcp() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    let (query, from) = upstream.query();
    let sent = query.queries[0].name().to_string();
    let recased = ask(query.metadata.id, &swapped(&sent), RecordType::A);
    for _ in 0..3 {
        upstream.send(&with_address(&recased, 60, [6, 6, 6, 6]), from);
    }
    rig.settle();
    assert!(rig.reply().is_none(), "it may be forged");
    let (mut stream, query) = upstream.accept();
    send_framed(&mut stream, &with_address(&query, 60, ADDRESS));
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));

    // A resolver that folds the case and has no TCP is believed, but not for long.
    rig.ask(4000, &ask(2, "b.example.com.", RecordType::A))
        .unwrap();
    let (query, from) = upstream.query();
    let folded = ask(
        query.metadata.id,
        &swapped(&query.queries[0].name().to_string()),
        RecordType::A,
    );
    upstream.send(&with_address(&folded, 60, ADDRESS), from);
    rig.settle();
    drop(upstream.accept());
    rig.settle();
    assert_eq!(first_address(&rig.told()), Some(ADDRESS.into()));
    assert_eq!(rig.proxy.cached(), 1, "the first one only");
}

fn swapped(name: &str) -> String {
    let swap = |c: char| match c.is_ascii_lowercase() {
        true => c.to_ascii_uppercase(),
        false => c.to_ascii_lowercase(),
    };
    name.chars().map(swap).collect()
}
