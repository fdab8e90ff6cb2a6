//! Messages built and parsed by `hickory-proto`, the oracle for tests of slipgate's parser.
use std::net::Ipv4Addr;

use hickory_proto::{
    op::{Edns, OpCode, Query as Question},
    rr::{
        Name, RData,
        rdata::{A, CNAME, SOA, TXT},
    },
};
pub(in crate::dns) use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::{Record as HickoryRecord, RecordType},
};

fn name(text: &str) -> Name {
    Name::from_ascii(text).expect("a name")
}

pub(in crate::dns) fn ask(id: u16, text: &str, qtype: RecordType) -> Message {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Question::query(name(text), qtype));
    message
}

pub(in crate::dns) fn with_edns(mut message: Message, udp_len: u16, dnssec_ok: bool) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(udp_len).set_dnssec_ok(dnssec_ok);
    message.set_edns(edns);
    message
}

pub(in crate::dns) fn a(text: &str, ttl: u32, address: [u8; 4]) -> HickoryRecord {
    HickoryRecord::from_rdata(name(text), ttl, RData::A(A(Ipv4Addr::from(address))))
}

pub(in crate::dns) fn cname(text: &str, ttl: u32, to: &str) -> HickoryRecord {
    HickoryRecord::from_rdata(name(text), ttl, RData::CNAME(CNAME(name(to))))
}

pub(in crate::dns) fn soa(text: &str, ttl: u32, minimum: u32) -> HickoryRecord {
    let soa = SOA::new(
        name("ns.example."),
        name("root.example."),
        1,
        2,
        3,
        4,
        minimum,
    );
    HickoryRecord::from_rdata(name(text), ttl, RData::SOA(soa))
}

pub(in crate::dns) fn txt(text: &str, ttl: u32, len: usize) -> HickoryRecord {
    let strings = vec!["x".repeat(250); len / 250 + 1];
    HickoryRecord::from_rdata(name(text), ttl, RData::TXT(TXT::new(strings)))
}

/// A response to `query` with RA set and no records.
pub(in crate::dns) fn response(query: &Message) -> Message {
    let mut message = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    message.metadata.recursion_desired = query.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    message.queries = query.queries.clone();
    message
}

pub(in crate::dns) fn read(bytes: &[u8]) -> Message {
    Message::from_vec(bytes).expect("hickory reads it")
}
