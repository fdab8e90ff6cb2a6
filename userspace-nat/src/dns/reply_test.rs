use super::{
    super::{query, tests::hickory::*},
    *,
};

fn asked(query: &Message, link_len: usize) -> (Asked, Vec<u8>) {
    let bytes = query.to_vec().unwrap();
    let query = query::Query::parse(&bytes).unwrap();
    let mut key = Vec::new();
    query.write_key(0, &mut key);
    (Asked::by_udp(&query, link_len), key)
}

fn told(query: &Message, answer: &Message, link_len: usize) -> Message {
    let (asked, key) = asked(query, link_len);
    let id = answer.metadata.id;
    let answer = Answer::parse(&answer.to_vec().unwrap(), id, Key(&key)).unwrap();
    let bytes = from_answer(&asked, &answer, 0, 100_000);
    assert!(bytes.len() <= asked.limit);
    read(&bytes)
}

fn large(query: &Message, answers: usize) -> Message {
    let mut message = response(query);
    message.add_answer(txt("big.example.", 60, answers));
    message
}

#[test]
fn rfc1035_without_edns_512_bytes_are_the_limit() {
    let query = ask(3, "big.example.", RecordType::TXT);
    let whole = told(&query, &large(&query, 200), 1472);
    assert!(!whole.metadata.truncation && whole.answers.len() == 1);
    let cut = told(&query, &large(&query, 700), 1472);
    assert!(cut.metadata.truncation);
    assert_eq!((cut.answers.len(), cut.additionals.len()), (0, 0));
    assert_eq!(cut.queries, query.queries);
}

#[test]
fn rfc6891_the_clients_size_is_the_limit_and_the_link_is_another() {
    let query = with_edns(ask(3, "big.example.", RecordType::TXT), 1200, false);
    assert!(!told(&query, &large(&query, 700), 1472).metadata.truncation);
    assert!(told(&query, &large(&query, 1100), 1472).metadata.truncation);
    let query = with_edns(query, 4096, false);
    assert!(!told(&query, &large(&query, 1100), 1472).metadata.truncation);
    assert!(told(&query, &large(&query, 2000), 1472).metadata.truncation);
    assert!(!told(&query, &large(&query, 2000), 8972).metadata.truncation);
}

#[test]
fn id_and_case_are_the_clients() {
    let guest = ask(0xbeef, "bIg.ExAmple.", RecordType::TXT);
    let upstream = ask(0x1111, "big.example.", RecordType::TXT);
    let told = told(&guest, &large(&upstream, 100), 1472);
    assert_eq!(told.metadata.id, 0xbeef);
    assert_eq!(told.queries[0].name().to_string(), "bIg.ExAmple.");
}

#[test]
fn rfc6891_an_opt_answers_an_opt() {
    let plain = ask(3, "big.example.", RecordType::TXT);
    let edns = with_edns(plain.clone(), 1232, true);
    // Upstream, with an OPT or without.
    for upstream in [large(&plain, 10), with_edns(large(&plain, 10), 4096, true)] {
        assert!(told(&plain, &upstream, 1472).edns.is_none());
        let opt = told(&edns, &upstream, 1472).edns.expect("an OPT");
        assert_eq!(opt.max_payload(), EDNS_UDP_LEN);
        assert!(opt.flags().dnssec_ok);
    }
}

#[test]
fn codes_are_told() {
    for rcode in [Rcode::ServFail, Rcode::Refused, Rcode::NxDomain] {
        let query = with_edns(ask(3, "Big.example.", RecordType::A), 1232, false);
        let (asked, key) = asked(&query, 1472);
        let told = read(&from_rcode(&asked, Key(&key), rcode));
        assert_eq!(u16::from(told.metadata.response_code), rcode as u16);
        assert_eq!(told.queries, query.queries);
        assert!(told.edns.is_some() && told.metadata.recursion_desired);
        assert_eq!(told.metadata.message_type, MessageType::Response);
    }
    let unreadable = ask(0x77, "big.example.", RecordType::A).to_vec().unwrap();
    let told = read(&to_unreadable(&unreadable, Rcode::BadVers));
    assert_eq!(told.metadata.id, 0x77);
    assert_eq!(told.edns.map(|e| e.rcode_high()), Some(1));
    let told = read(&to_unreadable(&unreadable, Rcode::FormErr));
    assert_eq!(told.metadata.response_code, ResponseCode::FormErr);
}
