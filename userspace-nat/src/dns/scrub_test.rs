use proptest::prelude::*;

use super::*;
use crate::dns::{
    answer::Answer,
    chain::{
        Chain,
        tests::{Written, a, cname},
    },
    message::Bits,
    name::Name,
    tests::hickory,
};
use slipgate_policy::wire;

const BITS: u16 = Bits::QR | Bits::RD | Bits::RA;

fn key(name: &str, qtype: u16) -> Vec<u8> {
    let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend(wire(name).unwrap());
    message.extend(qtype.to_be_bytes());
    message.extend([0, 1]);
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
    let key = key(name, qtype);
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
        qtype in prop::sample::select(vec![1_u16, 5, 6, 15, 33, 35, 64, 65, 255]),
        ech in any::<bool>(),
        ipv6_hints in any::<bool>(),
    ) {
        let omitted = Omitted { ech, ipv6_hints };
        let key = key("a.test", qtype);
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
}
