use std::time::Instant;

use proptest::prelude::*;

use super::{
    super::{answer::*, query::*, reply, tests::hickory::*},
    *,
};

fn key_of(query: &Message) -> Vec<u8> {
    let bytes = query.to_vec().unwrap();
    let mut key = Vec::new();
    Query::parse(&bytes).unwrap().write_key(0, &mut key);
    key
}

fn parsed(answer: &Message, query: &Message) -> Answer {
    let key = key_of(query);
    Answer::parse(&answer.to_vec().unwrap(), query.metadata.id, Key(&key)).unwrap()
}

fn www() -> Message {
    ask(7, "www.example.com.", RecordType::A)
}

#[test]
fn rfc1035_a_query_is_read() {
    let bytes = ask(0x1234, "WwW.Example.Com.", RecordType::AAAA)
        .to_vec()
        .unwrap();
    let read = Query::parse(&bytes).unwrap();
    assert_eq!(
        (read.id, read.qtype, read.qclass, read.edns),
        (0x1234, Type::AAAA, 1, None)
    );
    assert_eq!(read.name, b"\x03WwW\x07Example\x03Com\0");
    assert_eq!(read.bits, Bits::RD);
}

#[test]
fn rfc6891_edns_is_read() {
    let bytes = with_edns(www(), 4096, true).to_vec().unwrap();
    let edns = Query::parse(&bytes).unwrap().edns;
    assert_eq!(
        edns,
        Some(Edns {
            udp_len: 4096,
            dnssec_ok: true
        })
    );
    let mut version_1 = bytes.clone();
    let at = version_1.len() - 5;
    version_1[at] = 1;
    assert_eq!(
        Query::parse(&version_1),
        Err(QueryError::Answer(Rcode::BadVers))
    );
    let mut twice = bytes.clone();
    twice.extend_from_within(bytes.len() - 11..);
    twice[11] = 2;
    assert_eq!(
        Query::parse(&twice),
        Err(QueryError::Answer(Rcode::FormErr))
    );
}

#[test]
fn what_is_no_plain_query_is_told_apart() {
    let whole = www().to_vec().unwrap();
    let changed = |at: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        Query::parse(&bytes).map(|_| ())
    };
    let answer = |rcode| Err(QueryError::Answer(rcode));
    assert_eq!(changed(0, 9), Ok(()), "the control");
    assert_eq!(changed(2, 0x80), Err(QueryError::NotAQuery), "a response");
    assert_eq!(changed(2, 5 << 3), answer(Rcode::NotImp), "an update");
    assert_eq!(changed(5, 0), answer(Rcode::FormErr), "no question");
    assert_eq!(
        changed(5, 2),
        answer(Rcode::FormErr),
        "RFC 9619: two questions"
    );
    assert_eq!(changed(7, 1), answer(Rcode::FormErr), "an answer");
    assert_eq!(
        changed(12, 0xc0),
        answer(Rcode::FormErr),
        "a compressed question"
    );
    assert_eq!(changed(12, 64), answer(Rcode::FormErr), "a label of 64");
    let class_at = whole.len() - 1;
    assert_eq!(changed(class_at, 3), answer(Rcode::NotImp), "CHAOS");
    let axfr = ask(1, "example.", RecordType::AXFR).to_vec().unwrap();
    assert_eq!(Query::parse(&axfr), Err(QueryError::Answer(Rcode::NotImp)));
    for len in 0..whole.len() {
        assert!(Query::parse(&whole[..len]).is_err());
    }
}

#[test]
fn a_name_of_255_octets_is_the_longest() {
    let with_last_label = |len: usize| {
        let mut bytes = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for len in [63, 63, 63, len] {
            bytes.push(len as u8);
            bytes.extend(vec![b'a'; len]);
        }
        bytes.extend([0, 0, 1, 0, 1]);
        Query::parse(&bytes).map(|q| q.name.len())
    };
    assert_eq!(with_last_label(61), Ok(255));
    assert!(with_last_label(62).is_err());
}

#[test]
fn the_key_is_what_the_answer_depends_on() {
    let mut other_id = ask(9, "WWW.EXAMPLE.com.", RecordType::A);
    assert_eq!(key_of(&www()), key_of(&other_id), "neither id nor case");
    other_id.metadata.checking_disabled = true;
    let (plain, edns) = (www(), with_edns(www(), 512, false));
    let dnssec = with_edns(www(), 512, true);
    let larger = with_edns(www(), 4096, false);
    assert_eq!(key_of(&edns), key_of(&larger), "nor the EDNS size");
    let mut no_rd = www();
    no_rd.metadata.recursion_desired = false;
    let aaaa = ask(7, "www.example.com.", RecordType::AAAA);
    let keys = [plain, edns, dnssec, other_id, no_rd, aaaa].map(|m| key_of(&m));
    for (i, key) in keys.iter().enumerate() {
        assert!(!keys[..i].contains(key), "key {i} is one of its own");
    }
}

#[test]
fn the_query_upstream_is_the_key_again() {
    for message in [
        www(),
        with_edns(www(), 4096, true),
        with_edns(www(), 512, false),
    ] {
        let key = key_of(&message);
        let sent = read(&reply::query(99, Key(&key), Key(&key).name().0));
        assert_eq!(sent.metadata.id, 99);
        assert_eq!(sent.queries, message.queries);
        assert_eq!(key_of(&sent), key);
        if let Some(edns) = sent.edns {
            assert_eq!(edns.max_payload(), reply::EDNS_UDP_LEN);
        }
    }
}

#[test]
fn the_answers_lifetime_is_its_least_ttl() {
    let mut answer = response(&www());
    answer.add_answer(cname("www.example.com.", 300, "a.example."));
    answer.add_answer(a("a.example.", 60, [1, 2, 3, 4]));
    answer.add_authority(a("ns.example.", 5, [1, 2, 3, 5]));
    let read = parsed(&answer, &www());
    assert_eq!(read.lifetime_s, Some(60));
    assert_eq!(
        read.ttls.len(),
        2,
        "the name server's address is none of the question's"
    );
    assert_eq!(
        read.addresses().collect::<Vec<_>>(),
        [([1, 2, 3, 4].into(), 60)]
    );
}

#[test]
fn rfc2308_negative_answers_live_by_their_soa() {
    let lifetime = |change: &dyn Fn(&mut Message)| {
        let mut answer = response(&www());
        change(&mut answer);
        parsed(&answer, &www()).lifetime_s
    };
    let by_soa = |ttl, minimum| {
        lifetime(&|m| {
            m.add_authority(soa("example.com.", ttl, minimum));
        })
    };
    let nx = |m: &mut Message| m.metadata.response_code = ResponseCode::NXDomain;
    assert_eq!(by_soa(900, 60), Some(60));
    assert_eq!(by_soa(30, 60), Some(30));
    let nxdomain = lifetime(&|m| {
        nx(m);
        m.add_authority(soa("example.com.", 900, 600));
    });
    assert_eq!(nxdomain, Some(600));
    assert_eq!(lifetime(&nx), None, "no SOA, no caching (section 5)");
    assert_eq!(lifetime(&|_| {}), None);
    assert_eq!(by_soa(604_800, 604_800), Some(3 * 3600));
    // A CNAME to a name without such a record.
    let dangling = lifetime(&|m| {
        m.add_answer(cname("www.example.com.", 20, "a.example."));
        m.add_authority(soa("example.", 900, 600));
    });
    assert_eq!(dangling, Some(20));
}

#[test]
fn what_must_not_be_cached_is_not() {
    let lifetime = |change: &dyn Fn(&mut Message)| {
        let mut answer = response(&www());
        answer.add_answer(a("www.example.com.", 60, [1, 2, 3, 4]));
        change(&mut answer);
        parsed(&answer, &www()).lifetime_s
    };
    assert_eq!(lifetime(&|_| {}), Some(60), "the control");
    assert_eq!(lifetime(&|m| m.metadata.truncation = true), None);
    assert_eq!(
        lifetime(&|m| m.metadata.response_code = ResponseCode::ServFail),
        None
    );
    assert_eq!(
        lifetime(&|m| m.metadata.response_code = ResponseCode::Refused),
        None
    );
    assert_eq!(lifetime(&|m| m.answers[0].ttl = 0), None);
    assert_eq!(
        lifetime(&|m| m.answers[0].ttl = u32::MAX),
        None,
        "RFC 2181 section 8"
    );
}

#[test]
fn rfc5452_what_does_not_answer_the_question_is_told_apart() {
    let key = key_of(&www());
    let parse = |m: &Message, id| Answer::parse(&m.to_vec().unwrap(), id, Key(&key)).map(|_| ());
    let mut answer = response(&www());
    answer.add_answer(a("www.example.com.", 60, [1, 2, 3, 4]));
    assert_eq!(parse(&answer, 7), Ok(()));
    assert_eq!(parse(&answer, 8), Err(AnswerError::Mismatch), "id");
    assert_eq!(parse(&www(), 7), Err(AnswerError::Mismatch), "a query");
    let other = response(&ask(7, "www.example.org.", RecordType::A));
    assert_eq!(parse(&other, 7), Err(AnswerError::Mismatch), "name");
    let other = response(&ask(7, "www.example.com.", RecordType::AAAA));
    assert_eq!(parse(&other, 7), Err(AnswerError::Mismatch), "type");
    let mut upper = answer.clone();
    upper.queries = ask(7, "WWW.example.COM.", RecordType::A).queries;
    assert_eq!(parse(&upper, 7), Ok(()), "RFC 4343: case is none of ours");
    let mut bytes = answer.to_vec().unwrap();
    bytes.pop();
    assert_eq!(
        Answer::parse(&bytes, 7, Key(&key)),
        Err(AnswerError::Malformed)
    );
    bytes[2] |= 2;
    assert!(
        Answer::parse(&bytes, 7, Key(&key)).unwrap().is_truncated(),
        "cut in a record"
    );
    let refused = [0, 7, 0x81, 0x85, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        Answer::parse(&refused, 7, Key(&key)).unwrap().rcode(),
        5,
        "without a question"
    );
}

fn any_record() -> impl Strategy<Value = HickoryRecord> {
    let owner = prop::sample::select(vec![
        "www.example.com.",
        "b.example.",
        ".",
        "x.www.example.com.",
    ]);
    (owner, 0u32..100_000, any::<[u8; 4]>(), 0..4).prop_map(|(owner, ttl, octets, kind)| match kind
    {
        0 => a(owner, ttl, octets),
        1 => cname(owner, ttl, "target.example.com."),
        2 => soa(owner, ttl, u32::from(octets[0])),
        _ => txt(owner, ttl, usize::from(octets[0])),
    })
}

fn any_answer() -> impl Strategy<Value = Message> {
    let records = || prop::collection::vec(any_record(), 0..5);
    (records(), records(), records(), any::<bool>()).prop_map(|(an, ns, ar, edns)| {
        let mut message = response(&www());
        message
            .add_answers(an)
            .add_authorities(ns)
            .add_additionals(ar);
        if edns {
            with_edns(message, 4096, false)
        } else {
            message
        }
    })
}

proptest! {
    /// A stored answer has the records that hickory reads in the message and that belong to the
    /// question, without id and OPT; a reply from it has the same, with TTLs reduced by the age.
    #[test]
    fn an_answer_says_the_same_to_hickory(answer in any_answer(), age in 0u32..1000) {
        let key = key_of(&www());
        let bytes = answer.to_vec().unwrap();
        let kept = Answer::parse(&bytes, 7, Key(&key)).unwrap();
        let query_bytes = www().to_vec().unwrap();
        let asked = reply::Asked::by_tcp(&Query::parse(&query_bytes).unwrap());
        let told = read(&reply::from_answer(&asked, &kept, age, 100_000));
        let mut expected = read(&bytes);
        expected.edns = None;
        expected.additionals.clear();
        let is = |r: &HickoryRecord, owner: &str| r.name.to_string() == owner;
        let aliases: Vec<_> = expected
            .answers
            .iter()
            .filter(|r| is(r, "www.example.com.") && r.record_type() == RecordType::CNAME)
            .take(1)
            .cloned()
            .collect();
        if aliases.is_empty() {
            expected.answers.retain(|r| is(r, "www.example.com.") && r.record_type() == RecordType::A);
        } else {
            expected.answers = aliases.clone();
        }
        expected.authorities.retain(|r| {
            r.record_type() == RecordType::SOA
                && (is(r, ".") || is(r, "www.example.com.") && aliases.is_empty())
        });
        for records in [&mut expected.answers, &mut expected.authorities] {
            for record in records {
                record.ttl = record.ttl.saturating_sub(age);
            }
        }
        prop_assert_eq!(told, expected);
    }

    #[test]
    fn hostile_queries_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Query::parse(&bytes);
        let _ = reply::to_unreadable(&bytes, Rcode::FormErr);
    }

    /// Every change of a few bytes is read or refused; what is read can be told, of any size.
    #[test]
    fn hostile_answers_never_panic(
        answer in any_answer(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(), limit in 0usize..2000,
    ) {
        let key = key_of(&www());
        let mut bytes = answer.to_vec().unwrap();
        bytes.truncate(cut.index(bytes.len()).max(bytes.len() / 2));
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok(kept) = Answer::parse(&bytes, 7, Key(&key)) else { return Ok(()) };
        kept.addresses().for_each(drop);
        let query_bytes = with_edns(www(), 4096, false).to_vec().unwrap();
        let asked = reply::Asked::by_udp(&Query::parse(&query_bytes).unwrap(), limit.max(64));
        let told = reply::from_answer(&asked, &kept, 5, 100_000);
        prop_assert!(told.len() <= limit.max(64));
        prop_assert!(Answer::parse(&told, 7, Key(&key)).is_ok(), "it stays well-formed");
    }
}

/// Not a test of right or wrong: `cargo test --release -p userspace-nat measure -- --ignored
/// --nocapture` prints what a message costs with this reader and with hickory.
#[test]
#[ignore = "a measurement"]
fn measure_reading() {
    let mut answer = response(&www());
    for i in 0..4 {
        answer.add_answer(a("www.example.com.", 60, [1, 2, 3, i]));
    }
    let (query, answer) = (www().to_vec().unwrap(), answer.to_vec().unwrap());
    let key = key_of(&www());
    fn time<T>(what: &str, run: impl Fn() -> T) {
        let started = Instant::now();
        (0..200_000).for_each(|_| {
            std::hint::black_box(run());
        });
        println!(
            "{what}: {:.0} ns",
            started.elapsed().as_nanos() as f64 / 200_000.0
        );
    }
    time("query, ours", || Query::parse(&query));
    time("query, hickory", || Message::from_vec(&query));
    time("answer, ours", || Answer::parse(&answer, 7, Key(&key)));
    time("answer, hickory", || Message::from_vec(&answer));
}
