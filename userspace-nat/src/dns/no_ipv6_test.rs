use super::super::{
    Origin,
    tests::{
        hickory::*,
        rig::{Rig, Upstream},
    },
};

fn aaaa(id: u16) -> Message {
    ask(id, "wWw.example.com.", RecordType::AAAA)
}

#[test]
fn rfc2308_aaaa_is_no_data_at_once_and_no_resolver_is_asked() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    for query in [aaaa(7), with_edns(aaaa(8), 1232, true)] {
        rig.ask(4000, &query).unwrap();
        let told = rig.told();
        assert_eq!(told.metadata.id, query.metadata.id);
        assert_eq!(told.metadata.response_code, ResponseCode::NoError);
        assert!(told.metadata.recursion_available && !told.metadata.truncation);
        assert_eq!(told.queries, query.queries);
        assert!(told.answers.is_empty());
        assert_eq!(told.edns.is_some(), query.edns.is_some());
        let [soa] = &told.authorities[..] else {
            panic!("one SOA: {told:?}");
        };
        assert_eq!(soa.record_type(), RecordType::SOA);
        assert_eq!(soa.name.to_lowercase().to_string(), "www.example.com.");
        assert_eq!(soa.ttl, 60);
    }
    assert!(upstream.is_idle());
    assert_eq!(rig.counted(), (2, 0, 0));
    assert_eq!((rig.proxy.in_flight(), rig.proxy.cached()), (0, 0));
}

#[test]
fn who_validates_gets_the_resolvers_answer() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    // CD alone disables a check that is not ours; DO alone wants records and checks nothing.
    let mut unchecked = aaaa(1);
    unchecked.metadata.checking_disabled = true;
    rig.ask(4000, &unchecked).unwrap();
    assert!(rig.told().metadata.checking_disabled);
    assert!(upstream.is_idle());
    rig.ask(4000, &with_edns(unchecked, 1232, true)).unwrap();
    assert!(rig.reply().is_none());
    let (query, from) = upstream.query();
    assert_eq!(query.queries[0].query_type(), RecordType::AAAA);
    upstream.send(&response(&query), from);
    rig.settle();
    assert!(rig.told().authorities.is_empty(), "the resolver's own");
}

#[test]
fn a_guest_with_ipv6_gets_the_resolvers_answer_and_its_neighbour_none() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let mut with = rig.vm.clone();
    with.ipv6 = Some(slipgate_model::GuestIpv6 {
        prefix: "fd00::/64".parse().unwrap(),
        is_routed: false,
    });
    let origin = Origin::Tcp { connection: 1 };
    rig.ask_as(&with, origin, &aaaa(1)).unwrap();
    assert!(rig.reply().is_none(), "a resolver is asked");
    let (query, from) = upstream.query();
    assert_eq!(query.queries[0].query_type(), RecordType::AAAA);
    upstream.send(&response(&query), from);
    rig.settle();
    rig.told();
    // In the cache or not: who has no IPv6 gets the empty answer.
    rig.ask(4000, &aaaa(2)).unwrap();
    let [soa] = &rig.told().authorities[..] else {
        panic!("one SOA");
    };
    assert_eq!(soa.ttl, 60);
    assert!(upstream.is_idle());
}
