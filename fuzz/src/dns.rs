//! DNS: a guest's query, the query that goes upstream, its answer, and the reply.
//!
//! Input: `knobs (1) | id (2) | length (2) | query | answer …`. Knobs: see [`knob`].
use slipgate_abi::VmId;
use slipgate_policy::{MAX_RESOLVERS, Name, parse_resolv_conf};
use userspace_nat::dns::{
    answer::Answer,
    cache::Cache,
    chain::Chain,
    message::{HEADER_LEN, Rcode},
    query::{Key, Query, QueryError},
    reply::{self, Asked},
};

use crate::tape::Tape;

/// Maximum number of bytes by which a rewritten answer may grow: a name may point to fewer places
/// than before, because records were removed.
const MOST_GROWN: usize = 1_024;

/// Options for completing the input, one bit each.
pub(crate) mod knob {
    /// The answer gets the question's id, the QR bit, a question count of one and the question
    /// itself.
    pub(crate) const ANSWERS: u8 = 1;
    /// The query came by TCP.
    pub(crate) const TCP: u8 = 2;
}

/// Passes one question through the proxy's steps.
pub fn dns(input: &[u8]) {
    let mut tape = Tape::new(input);
    let knobs = tape.u8();
    let id = tape.u16();
    let message = tape.bytes();
    let answer = tape.rest();
    resolvers(answer);

    let query = match Query::parse(message) {
        Ok(query) => query,
        Err(QueryError::Answer(rcode)) => {
            let reply = reply::to_unreadable(message, rcode);
            assert!(reply.len() >= HEADER_LEN && reply[2] & 0x80 != 0);
            return;
        }
        Err(QueryError::NotAQuery) => return,
    };
    let name = Name(query.name);
    let octets: usize = name.labels().map(|label| label.len() + 1).sum();
    assert_eq!(octets + 1, query.name.len());
    assert!(name.to_string().is_ascii());

    let mut bytes = Vec::new();
    query.write_key(0, &mut bytes);
    let key = Key(&bytes);
    upstream(id, &query, key);
    let asked = if knobs & knob::TCP != 0 {
        Asked::by_tcp(&query)
    } else {
        Asked::by_udp(&query, 1_472)
    };
    is_reply(&asked, &reply::from_rcode(&asked, key, Rcode::ServFail));

    let answer = if knobs & knob::ANSWERS != 0 {
        completed(answer, id, key)
    } else {
        answer.to_vec()
    };
    if let Ok(answer) = Answer::parse(&answer, id, key) {
        answered(&asked, key, answer);
    }
}

/// Checks that the query for the upstream parses to the same question.
fn upstream(id: u16, query: &Query<'_>, key: Key<'_>) {
    let sent = reply::query(id, key, query.name);
    let read = Query::parse(&sent).expect("what we send upstream is a query");
    assert_eq!((read.id, read.qtype), (id, query.qtype));
    assert!(read.name.eq_ignore_ascii_case(query.name));
    let mut again = Vec::new();
    read.write_key(0, &mut again);
    assert_eq!(again, key.0);
}

/// Checks that the answer's offsets lie within it, and that every reply made of it fits and answers
/// the question.
fn answered(asked: &Asked, key: Key<'_>, answer: Answer) {
    let len = answer.message.len();
    // It is read to its end; without `ech` it says the same of where it leads.
    let chain = Chain::of(&answer, key.name());
    if let Some(chain) = &chain {
        // What a guest is told is what policies judge.
        let judged = |addr| {
            chain
                .addresses
                .iter()
                .any(|(of_chain, _)| *of_chain == addr)
        };
        assert!(answer.addresses().all(|(addr, _)| judged(addr)));
    }
    let without = answer.clone().without_ech(key);
    assert!(without.message.len() <= len + MOST_GROWN);
    if let (Some(chain), Some(other)) = (chain, Chain::of(&without, key.name())) {
        assert_eq!(chain, other);
    }
    assert!(answer.ttls.iter().all(|at| usize::from(*at) + 4 <= len));
    assert!(answer.addresses().count() <= len / 16 + 1);
    for age_s in [0, 1, u32::MAX] {
        is_reply(asked, &reply::from_answer(asked, &answer, age_s, 86_400));
    }
    let mut cache = Cache::new(4, 1 << 16);
    cache.insert(VmId::new(1), key.0, answer, 0);
    assert!(cache.bytes() <= 1 << 16);
    if let Some((kept, age_s)) = cache.get(key.0, 1_000_000_000) {
        is_reply(asked, &reply::from_answer(asked, kept, age_s, 86_400));
    }
}

fn is_reply(asked: &Asked, reply: &[u8]) {
    let question = HEADER_LEN + asked.name.len() + 4;
    assert!(reply.len() <= asked.limit.max(question + 11));
    assert_eq!(reply[..2], asked.id.to_be_bytes());
    assert!(reply[2] & 0x80 != 0, "QR");
    assert_eq!(reply[4..6], [0, 1], "one question");
    assert_eq!(reply[HEADER_LEN..question - 4], *asked.name);
}

fn completed(answer: &[u8], id: u16, key: Key<'_>) -> Vec<u8> {
    let mut header = [0; HEADER_LEN];
    let given = answer.len().min(HEADER_LEN);
    header[..given].copy_from_slice(&answer[..given]);
    header[..2].copy_from_slice(&id.to_be_bytes());
    header[2] = header[2] & 0x07 | 0x80;
    header[4..6].copy_from_slice(&[0, 1]);
    let mut message = header.to_vec();
    key.write_question(&mut message);
    message.extend_from_slice(&answer[given..]);
    message
}

/// Parses the text as `/etc/resolv.conf`.
fn resolvers(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    assert!(parse_resolv_conf(&text).len() <= MAX_RESOLVERS);
}
