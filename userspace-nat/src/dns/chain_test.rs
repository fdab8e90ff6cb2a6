use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;
use slipgate_policy::wire;

/// A record to be written: owner, type, TTL, data.
pub(crate) type Written = (&'static str, u16, u32, Vec<u8>);

pub(crate) fn a(owner: &'static str, ttl: u32, address: [u8; 4]) -> Written {
    (owner, Type::A, ttl, address.to_vec())
}

pub(crate) fn aaaa(owner: &'static str, ttl: u32, address: Ipv6Addr) -> Written {
    (owner, Type::AAAA, ttl, address.octets().to_vec())
}

pub(crate) fn cname(owner: &'static str, ttl: u32, to: &str) -> Written {
    (owner, Type::CNAME, ttl, wire(to).unwrap().to_vec())
}

/// An HTTPS record with address hints.
pub(crate) fn https(owner: &'static str, target: &str, v4: [u8; 4], v6: Ipv6Addr) -> Written {
    let mut data = vec![0, 1];
    match target {
        "." => data.push(0),
        target => data.extend(wire(target).unwrap()),
    }
    data.extend([0, 1, 0, 3, 2, b'h', b'2', 0, 4, 0, 4]);
    data.extend(v4);
    data.extend([0, 6, 0, 16]);
    data.extend(v6.octets());
    (owner, Type::HTTPS, 60, data)
}

/// An answer to a question for `asked`, with these records.
pub(crate) fn answer(asked: &str, records: &[Written]) -> Answer {
    let mut message = vec![0, 0, 0x81, 0x80, 0, 1, 0, records.len() as u8, 0, 0, 0, 0];
    message.extend(wire(asked).unwrap());
    message.extend([0, 1, 0, 1]);
    for (owner, rtype, ttl, data) in records {
        message.extend(wire(owner).unwrap());
        message.extend(rtype.to_be_bytes());
        message.extend([0, 1]);
        message.extend(ttl.to_be_bytes());
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
    }
    Answer {
        message: message.into(),
        ttls: Box::default(),
        extended_rcode: 0,
        lifetime_s: None,
    }
}

/// Steps, and addresses with their TTL.
type Way = (Vec<String>, Vec<(IpAddr, u32)>);

fn chain(asked: &str, records: &[Written]) -> Option<Way> {
    let asked_wire = wire(asked).unwrap();
    let chain = Chain::of(&answer(asked, records), Name(&asked_wire))?;
    let steps = chain.steps.iter().map(|step| Name(step).without_dot());
    Some((steps.collect(), chain.addresses))
}

fn v4(address: [u8; 4], ttl: u32) -> (IpAddr, u32) {
    (Ipv4Addr::from(address).into(), ttl)
}

#[test]
fn aliases_are_followed_and_others_records_open_nothing() {
    let records = [
        a("b.test", 300, [192, 0, 2, 2]),
        cname("a.test", 20, "M.test"),
        a("other.test", 300, [192, 0, 2, 9]),
        cname("m.test", 50, "b.test"),
        a("a.test", 300, [192, 0, 2, 8]),
    ];
    let (steps, addresses) = chain("a.test", &records).unwrap();
    assert_eq!(steps, ["m.test", "b.test"]);
    assert_eq!(addresses, [v4([192, 0, 2, 2], 20)]);
}

#[test]
fn hints_of_services_are_addresses_and_targets_are_steps() {
    let six: Ipv6Addr = "2001:db8::1".parse().unwrap();
    let records = [https("a.test", ".", [192, 0, 2, 1], six)];
    let (steps, addresses) = chain("a.test", &records).unwrap();
    assert_eq!(steps, Vec::<String>::new());
    assert_eq!(addresses, [v4([192, 0, 2, 1], 60), (six.into(), 60)]);
    let records = [https("a.test", "cdn.test", [192, 0, 2, 1], six)];
    assert_eq!(chain("a.test", &records).unwrap().0, ["cdn.test"]);
}

#[test]
fn circles_and_nonsense_are_not_understood() {
    let circle = [cname("a.test", 1, "b.test"), cname("b.test", 1, "a.test")];
    assert_eq!(chain("a.test", &circle), None);
    assert_eq!(
        chain("a.test", &[("a.test", Type::A, 1, vec![1, 2, 3])]),
        None
    );
    let cut = ("a.test", Type::HTTPS, 1, vec![0, 1, 0, 0, 4, 0, 9, 1]);
    assert_eq!(chain("a.test", &[cut]), None);
    // A pointer to itself.
    let own = ("a.test", Type::CNAME, 1, vec![0xc0, 42]);
    assert_eq!(chain("a.test", &[own]), None);
}

proptest! {
    #[test]
    fn hostile_answers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), count in 0_u8..9) {
        let mut hostile = answer("a.test", &[]);
        let mut message = hostile.message.to_vec();
        message[7] = count;
        message.extend(bytes);
        hostile.message = message.into();
        let _ = Chain::of(&hostile, Name(&wire("a.test").unwrap()));
    }
}
