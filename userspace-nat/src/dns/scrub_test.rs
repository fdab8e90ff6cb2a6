use proptest::prelude::*;

use super::*;
use crate::dns::{
    answer::Answer,
    chain::{
        Chain,
        tests::{Written, a, aaaa, cname, https},
    },
    message::Bits,
    name::Name,
    tests::hickory,
};
use slipgate_policy::wire;

const BITS: u16 = Bits::QR | Bits::RD | Bits::RA;

fn key(name: &str, qtype: u16) -> Vec<u8> {
    key_with(name, qtype, false)
}

/// The key of a question, with DO or without EDNS.
fn key_with(name: &str, qtype: u16, dnssec_ok: bool) -> Vec<u8> {
    let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(dnssec_ok)];
    message.extend(wire(name).unwrap());
    message.extend(qtype.to_be_bytes());
    message.extend([0, 1]);
    if dnssec_ok {
        message.extend([0, 0, 41, 4, 0xd0, 0, 0, 0x80, 0, 0, 0]);
    }
    let mut key = Vec::new();
    crate::dns::query::Query::parse(&message)
        .unwrap()
        .write_key(0, &mut key);
    key
}

/// A message with answers, authorities and additional records.
fn message(key: Key<'_>, sections: [&[Written]; 3]) -> Vec<u8> {
    let mut message = vec![0; HEADER_LEN];
    message[2..4].copy_from_slice(&BITS.to_be_bytes());
    message[5] = 1;
    key.write_question(&mut message);
    for (section, records) in sections.into_iter().enumerate() {
        message[7 + 2 * section] = records.len() as u8;
        for (owner, rtype, ttl, data) in records {
            match *owner {
                "." => message.push(0),
                owner => message.extend(wire(owner).unwrap()),
            }
            message.extend(rtype.to_be_bytes());
            message.extend([0, 1]);
            message.extend(ttl.to_be_bytes());
            message.extend((data.len() as u16).to_be_bytes());
            message.extend(data);
        }
    }
    message
}

fn soa(owner: &'static str, minimum: u32) -> Written {
    let mut data = [wire("ns.test").unwrap(), wire("root.ns.test").unwrap()].concat();
    data.extend([0; 16]);
    data.extend(minimum.to_be_bytes());
    (owner, Type::SOA, 900, data)
}

fn scrubbed(name: &str, qtype: u16, sections: [&[Written]; 3]) -> Option<Scrubbed> {
    scrubbed_as(key(name, qtype), sections)
}

fn scrubbed_as(key: Vec<u8>, sections: [&[Written]; 3]) -> Option<Scrubbed> {
    let message = message(Key(&key), sections);
    let scrubbed = scrub(
        &message,
        &Header::read(&message).unwrap(),
        Key(&key),
        Omitted::default(),
    )?;
    hickory::read(&scrubbed.message);
    Some(scrubbed)
}

/// Owner and type of each record left.
fn left(scrubbed: &Scrubbed) -> Vec<String> {
    let message = hickory::read(&scrubbed.message);
    let all = [&message.answers, &message.authorities, &message.additionals];
    all.into_iter()
        .flatten()
        .map(|r| format!("{} {}", r.name, r.record_type()))
        .collect()
}

#[test]
fn rfc5452_what_is_not_about_the_question_is_not_kept() {
    let answers = [
        a("b.test", 300, [192, 0, 2, 2]),
        cname("a.test", 20, "M.test"),
        a("bank.test", 300, [192, 0, 2, 9]),
        cname("m.test", 50, "b.test"),
        cname("m.test", 50, "evil.test"),
        a("evil.test", 300, [192, 0, 2, 8]),
        a("a.test", 300, [192, 0, 2, 8]),
        ("b.test", Type::AAAA, 300, vec![0x20; 16]),
        ("b.test", Type::TXT, 300, vec![1, b'x']),
    ];
    let authorities = [
        ("test", 2, 300, wire("ns.bank.test").unwrap().to_vec()),
        soa("other", 5),
        soa("test", 60),
    ];
    let additional = [a("ns.bank.test", 300, [192, 0, 2, 7])];
    let kept = scrubbed("a.test", Type::A, [&answers, &authorities, &additional]).unwrap();
    assert_eq!(
        left(&kept),
        ["b.test. A", "a.test. CNAME", "m.test. CNAME", "test. SOA"]
    );
    assert!(kept.answered);
    assert_eq!((kept.answer_ttl, kept.negative_ttl), (20, Some(60)));
    assert_eq!(kept.ttls.len(), 4);
    for at in &kept.ttls {
        let ttl = kept.message[usize::from(*at)..].first_chunk::<4>().unwrap();
        assert!([300, 20, 50, 900].contains(&u32::from_be_bytes(*ttl)));
    }
}

#[test]
fn names_are_compressed_again_and_say_the_same() {
    let mx = |to: &str| [&[0, 10], &*wire(to).unwrap()].concat();
    let srv = |to: &str| [&[0, 1, 0, 2, 0, 3], &*wire(to).unwrap()].concat();
    let answers: Vec<Written> = (0..6)
        .map(|_| ("mail.A.test", Type::MX, 300, mx("Mx1.a.test")))
        .collect();
    let kept = scrubbed("mail.a.test", Type::MX, [&answers, &[], &[]]).unwrap();
    let long = 12 + 17 + 6 * (13 + 10 + 2 + 12);
    assert!(kept.message.len() < long - 6 * 18, "{}", kept.message.len());
    let read = hickory::read(&kept.message);
    assert!(
        read.answers
            .iter()
            .all(|r| r.data.to_string() == "10 mx1.a.test.")
    );
    // A type newer than RFC 1035: the name is written out.
    let answers = [("a.test", Type::SRV, 300, srv("b.a.test"))];
    let kept = scrubbed("a.test", Type::SRV, [&answers, &[], &[]]).unwrap();
    assert!(kept.message.ends_with(&wire("b.a.test").unwrap()));
    assert_eq!(left(&kept), ["a.test. SRV"]);
}

#[test]
fn a_record_that_cannot_be_read_is_left_out_and_a_circle_is_no_answer() {
    let answers = [
        ("a.test", Type::A, 60, vec![1, 2, 3]),
        a("a.test", 60, [192, 0, 2, 1]),
    ];
    let kept = scrubbed("a.test", Type::A, [&answers, &[], &[]]).unwrap();
    assert_eq!(left(&kept), ["a.test. A"]);
    let cut = ("a.test", Type::HTTPS, 1, vec![0, 1, 0, 0, 4, 0, 9, 1]);
    let kept = scrubbed("a.test", Type::HTTPS, [&[cut], &[], &[]]).unwrap();
    assert_eq!((left(&kept).len(), kept.answered), (0, false));
    let circle = [cname("a.test", 1, "b.test"), cname("b.test", 1, "a.test")];
    assert!(scrubbed("a.test", Type::A, [&circle, &[], &[]]).is_none());
}

/// A signature of records of this type, by this zone.
fn rrsig(owner: &'static str, of: u16, zone: &str) -> Written {
    let mut data = of.to_be_bytes().to_vec();
    data.extend([8, 2, 0, 0, 0, 60]); // algorithm, labels, TTL
    data.extend([0; 10]); // times and key tag
    match zone {
        "." => data.push(0),
        zone => data.extend(wire(zone).unwrap()),
    }
    data.extend([7; 16]);
    (owner, Type::RRSIG, 60, data)
}

fn nsec(owner: &'static str, next: &str) -> Written {
    let data = [&*wire(next).unwrap(), &[0, 1, 0x40]].concat();
    (owner, Type::NSEC, 60, data)
}

fn nsec3(owner: &'static str) -> Written {
    let mut data = vec![1, 0, 0, 0, 0, 20];
    data.extend([9; 20]);
    (owner, Type::NSEC3, 60, data)
}

/// Hashes of names, and what is beneath one.
const HASH: &str = "0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.example.test";
const BENEATH_A_HASH: &str = "x.0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.example.test";

#[test]
fn rfc4035_proofs_of_zones_around_the_names_are_kept_for_who_validates() {
    let authorities = [
        soa("example.test", 60),
        rrsig("example.test", Type::SOA, "example.test"),
        // Between two names of the zone, and of its wildcard.
        nsec("m.example.test", "o.example.test"),
        rrsig("m.example.test", Type::NSEC, "example.test"),
        nsec("example.test", "a.example.test"),
        rrsig("example.test", Type::NSEC, "Example.TEST"),
        nsec3(HASH),
        rrsig(HASH, Type::NSEC3, "example.test"),
        // Of a zone further up.
        nsec("exam.test", "examples.test"),
        rrsig("exam.test", Type::NSEC, "test"),
        // What follows is not about the name: of another zone, or by its word of this one.
        nsec("www.bank.test", "x.bank.test"),
        rrsig("www.bank.test", Type::NSEC, "bank.test"),
        nsec("mail.bank.test", "x.bank.test"),
        rrsig("mail.bank.test", Type::NSEC, "example.test"),
        soa("bank.test", 60),
        rrsig("bank.test", Type::SOA, "bank.test"),
        nsec3(BENEATH_A_HASH),
        rrsig(BENEATH_A_HASH, Type::NSEC3, "example.test"),
        // Nobody signed it, or another record of that name was signed.
        nsec("p.example.test", "q.example.test"),
        nsec("r.example.test", "s.example.test"),
        rrsig("r.example.test", Type::A, "example.test"),
        rrsig("m.example.test", Type::NSEC, "bank.test"),
    ];
    let name = "no.example.test";
    let kept = scrubbed_as(key_with(name, Type::A, true), [&[], &authorities, &[]]).unwrap();
    let hash = HASH;
    assert_eq!(
        left(&kept),
        [
            "example.test. SOA",
            "example.test. RRSIG",
            "m.example.test. NSEC",
            "m.example.test. RRSIG",
            "example.test. NSEC",
            "example.test. RRSIG",
            &format!("{hash}. NSEC3"),
            &format!("{hash}. RRSIG"),
            "exam.test. NSEC",
            "exam.test. RRSIG",
        ]
    );
    assert_eq!(kept.negative_ttl, Some(60));
    let kept = scrubbed(name, Type::A, [&[], &authorities, &[]]).unwrap();
    assert_eq!(left(&kept), ["example.test. SOA"], "without DO");
}

#[test]
fn rfc4035_proofs_about_a_name_on_the_way_are_kept() {
    // A wildcard gave the alias: the proof that there is no closer name is of its zone.
    let answers = [
        cname("a.wild.test", 60, "b.other.example"),
        rrsig("a.wild.test", Type::CNAME, "wild.test"),
        rrsig("a.wild.test", Type::TXT, "wild.test"),
        rrsig("b.other.example", Type::A, "other.example"),
        a("b.other.example", 60, [192, 0, 2, 1]),
    ];
    let authorities = [
        nsec("wild.test", "z.wild.test"),
        rrsig("wild.test", Type::NSEC, "wild.test"),
        nsec("other.example", "z.other.example"),
        rrsig("other.example", Type::NSEC, "other.example"),
        nsec("third.test", "z.third.test"),
        rrsig("third.test", Type::NSEC, "third.test"),
    ];
    let key = key_with("a.wild.test", Type::A, true);
    let kept = scrubbed_as(key, [&answers, &authorities, &[]]).unwrap();
    assert_eq!(
        left(&kept),
        [
            "a.wild.test. CNAME",
            "a.wild.test. RRSIG",
            "b.other.example. RRSIG",
            "b.other.example. A",
            "wild.test. NSEC",
            "wild.test. RRSIG",
            "other.example. NSEC",
            "other.example. RRSIG",
        ]
    );
}

#[test]
fn rfc1034_nothing_is_beside_an_alias_whatever_is_asked_for() {
    let six = "2001:db8::1".parse().unwrap();
    let answers = [
        a("a.test", 60, [192, 0, 2, 1]),
        rrsig("a.test", Type::A, "test"),
        cname("a.test", 60, "b.test"),
        rrsig("a.test", Type::CNAME, "test"),
        https("a.test", ".", [192, 0, 2, 2], six),
        nsec("a.test", "b.test"),
        rrsig("a.test", Type::NSEC, "test"),
        ("a.test", Type::TXT, 60, vec![1, b'x']),
        a("b.test", 60, [192, 0, 2, 3]),
    ];
    let kept = scrubbed("a.test", Type::ANY, [&answers, &[], &[]]).unwrap();
    let all = [
        "a.test. CNAME",
        "a.test. RRSIG",
        "a.test. NSEC",
        "a.test. RRSIG",
    ];
    assert_eq!(left(&kept), all);
    // Without one there is all that the name has.
    let others: Vec<Written> = answers
        .into_iter()
        .filter(|(_, rtype, ..)| *rtype != Type::CNAME)
        .collect();
    let kept = scrubbed("a.test", Type::ANY, [&others, &[], &[]]).unwrap();
    assert_eq!(left(&kept).len(), others.len() - 1, "all but b.test's");
}

/// A record of an answer whose address, if it has one, ends in its number: owner, type, target and
/// whether octets follow that do not belong there.
type Drawn = (&'static str, u16, &'static str, bool);

fn drawn(records: &[Drawn]) -> Vec<Written> {
    let record = |(number, (owner, rtype, target, broken)): (usize, &Drawn)| {
        let address = [192, 0, 2, number as u8];
        let six = [&[0x20; 12][..], &address].concat();
        let six = <[u8; 16]>::try_from(six).unwrap().into();
        let mut record = match *rtype {
            Type::A => a(owner, 60, address),
            Type::AAAA => aaaa(owner, 60, six),
            Type::HTTPS => https(owner, target, address, six),
            Type::RRSIG => rrsig(owner, Type::A, "test"),
            _ => cname(owner, 60, target),
        };
        record.3.extend(broken.then_some(0));
        record
    };
    records.iter().enumerate().map(record).collect()
}

/// An HTTPS record in which `ech` is mandatory, beside `alpn` and hints.
fn https_with_ech(mandatory: &[u8]) -> Written {
    let mut data = vec![0, 1, 0];
    data.extend([0, 0, 0, mandatory.len() as u8]);
    data.extend(mandatory);
    data.extend([0, 1, 0, 3, 2, b'h', b'2', 0, 4, 0, 4, 192, 0, 2, 1]);
    data.extend([0, 5, 0, 6, 0, 4, 0xfe, 0x0d, 0, 0]);
    data.extend([0, 6, 0, 16]);
    data.extend([0x20; 16]);
    ("a.test", Type::HTTPS, 60, data)
}

#[test]
fn rfc9848_ech_is_left_out_where_it_is_off() {
    let key = key("a.test", Type::HTTPS);
    for (mandatory, left) in [(&[0, 1, 0, 5][..], &[0, 1][..]), (&[0, 5], &[])] {
        let other = https_with_ech(mandatory);
        let message = message(Key(&key), [&[other.clone(), other], &[], &[]]);
        let parsed = Answer::parse(&message, 0, Key(&key)).unwrap();
        assert!(parsed.message.windows(2).any(|w| w == [0xfe, 0x0d]));
        let whole = Chain::of(&parsed, Name(&wire("a.test").unwrap())).unwrap();
        let without = parsed.clone().without_ech(Key(&key));
        assert!(!without.message.windows(2).any(|w| w == [0xfe, 0x0d]));
        let shorter = 10 + 4 * usize::from(left.is_empty()) + mandatory.len() - left.len();
        assert_eq!(
            without.message.len(),
            parsed.message.len() - 2 * shorter,
            "the record's length follows"
        );
        assert_eq!(without.lifetime_s, parsed.lifetime_s);
        let chain = Chain::of(&without, Name(&wire("a.test").unwrap())).unwrap();
        assert_eq!(chain, whole, "hints and targets are as they were");
        let read = hickory::read(&without.message);
        assert_eq!(read.answers.len(), 2);
        assert!(!read.answers[0].data.to_string().contains("ech"));
    }
    // What has none stays as it is.
    let plain = message(Key(&key), [&[], &[soa("test", 60)], &[]]);
    let plain = Answer::parse(&plain, 0, Key(&key)).unwrap();
    assert_eq!(plain.clone().without_ech(Key(&key)), plain);
}

#[test]
fn rfc9460_hints_of_ipv6_are_left_out_for_who_has_none() {
    let key = key("a.test", Type::HTTPS);
    let message = message(Key(&key), [&[https_with_ech(&[0, 1, 0, 6])], &[], &[]]);
    let parsed = Answer::parse(&message, 0, Key(&key)).unwrap();
    let name = wire("a.test").unwrap();
    let addresses = |answer: &Answer| Chain::of(answer, Name(&name)).unwrap().addresses;
    assert_eq!(addresses(&parsed).len(), 2);
    let without = parsed.clone().without_ipv6_hints(Key(&key));
    let left = addresses(&without);
    assert!(left.len() == 1 && left[0].0.is_ipv4(), "{left:?}");
    assert_eq!(without.message.len(), parsed.message.len() - 20 - 2);
    assert!(
        without.message.windows(2).any(|w| w == [0xfe, 0x0d]),
        "ech stays"
    );
}

proptest! {
    /// A rewritten message is unchanged by a second rewrite, and never exceeds its length fields.
    #[test]
    fn hostile_messages_never_panic_and_what_is_kept_stays(
        counts in prop::array::uniform3(0_u8..9),
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0_u8..6, Just(0xc0_u8), Just(12)], 0..400),
        qtype in prop::sample::select(vec![1_u16, 5, 6, 15, 33, 35, 46, 64, 65, 255]),
        dnssec_ok in any::<bool>(),
        ech in any::<bool>(),
        ipv6_hints in any::<bool>(),
    ) {
        let omitted = Omitted { ech, ipv6_hints };
        let key = key_with("a.test", qtype, dnssec_ok);
        let mut message = message(Key(&key), [&[], &[], &[]]);
        (message[7], message[9], message[11]) = (counts[0], counts[1], counts[2]);
        message.extend(bytes);
        let header = Header::read(&message).unwrap();
        let Some(once) = scrub(&message, &header, Key(&key), omitted) else { return Ok(()) };
        let header = Header::read(&once.message).unwrap();
        let again = scrub(&once.message, &header, Key(&key), omitted).expect("well-formed");
        prop_assert_eq!(&once.message, &again.message);
        prop_assert_eq!(once.ttls, again.ttls);
        prop_assert_eq!(once.answered, again.answered);
    }

    /// Policies judge an answer by its chain.
    #[test]
    fn no_address_is_told_that_is_none_of_the_chain(
        records in prop::collection::vec((
            prop::sample::select(vec!["a.test", "b.test", "c.test"]),
            prop::sample::select(vec![Type::A, Type::AAAA, Type::CNAME, Type::CNAME, Type::HTTPS, Type::RRSIG]),
            prop::sample::select(vec!["a.test", "b.test", "c.test"]),
            prop::bool::weighted(0.2),
        ), 1..8),
        qtype in prop::sample::select(vec![Type::A, Type::CNAME, Type::AAAA, Type::HTTPS, Type::ANY]),
    ) {
        let key = key("a.test", qtype);
        let answers = drawn(&records);
        let message = message(Key(&key), [&answers, &[], &[]]);
        let Ok(answer) = Answer::parse(&message, 0, Key(&key)) else { return Ok(()) };
        let asked = wire("a.test").unwrap();
        // An answer that has none is refused.
        let Some(chain) = Chain::of(&answer, Name(&asked)) else { return Ok(()) };
        for number in 0..records.len() as u8 {
            let address = [192, 0, 2, number];
            let told = answer.message.windows(4).any(|octets| octets == address);
            let judged = chain.addresses.iter().any(|(addr, _)| match addr {
                std::net::IpAddr::V4(addr) => addr.octets() == address,
                std::net::IpAddr::V6(addr) => addr.octets().ends_with(&address),
            });
            prop_assert!(judged || !told, "{records:?}: {number} in {chain:?}");
        }
    }
}
