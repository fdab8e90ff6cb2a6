use proptest::prelude::*;

use super::*;
use crate::fake::{hellos, initials as made};

/// RFC 9001 appendix A.1 and A.2, RFC 9369 appendix A.
const ID: [u8; 8] = [0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08];

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks(2)
        .map(|two| (two[0] * 16 + two[1]) as u8)
        .collect()
}

/// The client's Initial of RFC 9001 appendix A.2, before protection.
fn appendix_payload() -> Vec<u8> {
    let mut payload = bytes(
        "060040f1010000ed0303ebf8fa56f12939b9584a3896472ec40bb863cfd3e868
         04fe3a47f06a2b69484c00000413011302010000c000000010000e00000b6578
         616d706c652e636f6dff01000100000a00080006001d00170018001000070005
         04616c706e000500050100000000003300260024001d00209370b2c9caa47fba
         baf4559fedba753de171fa71f50f1ce15d43e994ec74d748002b000302030400
         0d0010000e0403050306030203080408050806002d00020101001c0002400100
         3900320408ffffffffffffffff05048000ffff07048000ffff08011001048000
         75300901100f088394c8f03e51570806048000ffff",
    );
    payload.resize(1_162, 0);
    payload
}

#[test]
fn the_examples_of_rfc_9001_and_9369() {
    let sample = bytes("d1b1c98dd7689fb8ec11d242b123dc9b");
    let keys = Keys::of_client(Version::One, &ID);
    let mask = keys.mask(sample.try_into().unwrap());
    assert_eq!(mask.to_vec(), bytes("437b9aec36"));
    let header = bytes("c300000001088394c8f03e5157080000449e00000002");
    let sealed = keys.seal(2, &header, &appendix_payload());
    assert_eq!(sealed[..16], bytes("d1b1c98dd7689fb8ec11d242b123dc9b"));
    assert_eq!(
        sealed[sealed.len() - 16..],
        bytes("e221af44860018ab0856972e194cd934")
    );

    let keys = Keys::of_client(Version::Two, &ID);
    let header = bytes("d36b3343cf088394c8f03e5157080000449e00000002");
    let sealed = keys.seal(2, &header, &appendix_payload());
    assert_eq!(sealed[..16], bytes("ffe67b6abcdb4298b485dd04de806071"));
    let mask = keys.mask(sealed[..16].try_into().unwrap());
    assert_eq!(mask.to_vec(), bytes("94a0c95e80"));
}

#[test]
fn the_example_is_opened_and_its_name_read() {
    let frames = crypto_frames(&appendix_payload()).unwrap().len();
    assert_eq!(frames, 1);
    for version in [Version::One, Version::Two] {
        let datagram = made::initial(version, &ID, &ID, 2, &appendix_payload());
        assert_eq!(
            said(&mut Flow::default(), &datagram),
            (Ok(Passage::Goes), vec!["example.com".into()])
        );
    }
}

#[test]
fn the_server_of_rfc_9001_is_called_as_it_answered() {
    // Appendix A.3.
    let answer = bytes(
        "cf000000010008f067a5502a4262b5004075c0d95a482cd0991cd25b0aac406a
         5816b6394100f37a1c69797554780bb38cc5a99f5ede4cf73c3ec2493a1839b3
         dbcba3f6ea46c5b7684df3548e7ddeb9c3bf9c73cc3f3bded74b562bfb19fb84
         022f8ef4cdd93795d77d06edbb7aaf2f58891850abbdca3d20398c276456cbc4
         2158407dd074ee",
    );
    let first = made::initial(Version::One, &ID, &ID, 2, &appendix_payload());
    let mut flow = Flow::default();
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    let called = bytes("f067a5502a4262b5");
    let more = made::initial(Version::One, &ID, &called, 3, &[2, 0, 0, 0, 0]);
    let mut forged = answer.clone();
    forged[50] ^= 1;
    heard(&mut flow, &forged);
    assert_eq!(passage(&mut flow, &more), Ok(Passage::Dropped));
    heard(&mut flow, &answer);
    assert_eq!(passage(&mut flow, &more), Ok(Passage::Goes));
}

/// Treatment of a datagram if every name but `evil.test` is admitted, and the names it gave.
fn said(flow: &mut Flow, datagram: &[u8]) -> (Result<Passage, Refused>, Vec<String>) {
    let mut names = Vec::new();
    let mut allowance = Allowance::default();
    let effort = &mut Effort::new(&mut allowance, 0);
    let passage = flow.datagram(datagram, effort, &mut |name| {
        names.push(name.name().without_dot());
        names.last().is_some_and(|name| name != "evil.test")
    });
    (passage, names)
}

/// Passes a server's datagram to the session.
pub(super) fn heard(flow: &mut Flow, datagram: &[u8]) {
    let mut allowance = Allowance::default();
    flow.server_datagram(datagram, &mut Effort::new(&mut allowance, 0));
}

pub(super) fn passage(flow: &mut Flow, datagram: &[u8]) -> Result<Passage, Refused> {
    said(flow, datagram).0
}

fn initial(id: &[u8], number: u32, crypto: &[(usize, &[u8])]) -> Vec<u8> {
    let payload: Vec<u8> = crypto
        .iter()
        .flat_map(|(at, bytes)| made::crypto(*at, bytes))
        .collect();
    made::initial(Version::One, id, id, number, &payload)
}

fn hello(name: &str) -> Vec<u8> {
    hellos::client_hello(name)
}

#[test]
fn a_hello_over_several_datagrams_is_held_until_it_is_whole() {
    let hello = hello("a.test");
    let mut flow = Flow::default();
    let second = initial(&ID, 1, &[(40, &hello[40..])]);
    assert_eq!(passage(&mut flow, &second), Ok(Passage::Held));
    let first = initial(&ID, 0, &[(20, &hello[20..40]), (0, &hello[..20])]);
    assert_eq!(
        said(&mut flow, &first),
        (Ok(Passage::Goes), vec!["a.test".into()])
    );
    // Short headers, Handshake and 0-RTT packets go on now.
    assert_eq!(passage(&mut flow, &[0x40, 1, 2]), Ok(Passage::Goes));
    // Later Initials are sent to an id of the server's, and bring no news.
    let ack = made::initial(Version::One, &ID, b"server", 2, &[2, 0, 0, 0, 0]);
    assert_eq!(
        passage(&mut flow, &ack),
        Ok(Passage::Dropped),
        "nobody is called so"
    );
    heard(&mut flow, &made::answer(Version::One, b"other", b"server"));
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Dropped));
    heard(&mut flow, &made::answer(Version::One, &ID, b"server"));
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Goes));
    // It does not change its id.
    heard(&mut flow, &made::answer(Version::One, &ID, b"resver"));
    let ack = made::initial(Version::One, &ID, b"resver", 3, &[2, 0, 0, 0, 0]);
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Dropped));
}

#[test]
fn a_connection_goes_on_in_the_version_that_the_server_chose() {
    // RFC 9368 section 2.1.
    let hello = hello("a.test");
    let mut flow = Flow::default();
    let first = initial(&ID, 0, &[(0, &hello)]);
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    heard(&mut flow, &made::answer(Version::Two, &ID, b"server"));
    let next = made::crypto(hello.len(), &self::hello("evil.test"));
    let next = made::initial(Version::Two, &ID, b"server", 1, &next);
    assert_eq!(passage(&mut flow, &next), Err(Refused::Name));
}

#[test]
fn rfc9000_section_14_1_an_initial_in_a_small_datagram_is_not_read() {
    let hello = made::crypto(0, &hello("evil.test"));
    let mut flow = Flow::default();
    let short = made::short_initial(&ID, &hello);
    assert_eq!(said(&mut flow, &short), (Ok(Passage::Dropped), vec![]));
    let mut padded = short.clone();
    padded.resize(MIN_DATAGRAM - 1, 0x40);
    assert_eq!(said(&mut flow, &padded), (Ok(Passage::Dropped), vec![]));
    assert!(!flow.is_open() && flow.held() == 0);
    padded.push(0x40);
    assert_eq!(passage(&mut flow, &padded), Err(Refused::Name));
}

#[test]
fn dtls_does_not_go_along() {
    let mut flow = Flow::default();
    let first = initial(&ID, 0, &[(0, &hello("a.test"))]);
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    for version in [[0xfe, 0xff], [0xfe, 0xfd]] {
        let dtls = [&[22], &version[..], &[0; 10]].concat();
        assert_eq!(passage(&mut flow, &dtls), Ok(Passage::Dropped));
    }
    // RFC 9287: a short header may have any bit there.
    assert_eq!(passage(&mut flow, &[22, 1, 2, 3]), Ok(Passage::Goes));
}

#[test]
fn another_connection_in_the_flow_is_judged_too() {
    let mut flow = Flow::default();
    assert_eq!(
        passage(&mut flow, &initial(&ID, 0, &[(0, &hello("a.test"))])),
        Ok(Passage::Goes)
    );
    let other = initial(b"another", 0, &[(0, &hello("evil.test"))]);
    assert_eq!(passage(&mut flow, &other), Err(Refused::Name));

    // Behind another packet in the datagram.
    let mut flow = Flow::default();
    let good = initial(&ID, 0, &[(0, &hello("a.test"))]);
    assert_eq!(
        passage(&mut flow, &[&good[..], &other].concat()),
        Err(Refused::Name)
    );
}

#[test]
fn nothing_is_released_while_a_connection_is_undecided() {
    let mut flow = Flow::default();
    let first = initial(&ID, 0, &[(0, &hello("a.test"))]);
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    let evil = hello("evil.test");
    let half = initial(b"another", 0, &[(0, &evil[..40])]);
    assert_eq!(passage(&mut flow, &half), Ok(Passage::Held));
    flow.hold(VirtioNetHdr::default(), &half).unwrap();
    assert_eq!(passage(&mut flow, &[0x40, 1, 2]), Ok(Passage::Goes));
    assert_eq!(flow.release().len(), 0);
    assert_eq!(flow.waiting().len(), 1);
}

#[test]
fn empty_frames_and_many_packets() {
    let frames = [
        &made::crypto(90, b"")[..],
        &made::crypto(0, &hello("a.test")),
    ]
    .concat();
    let packet = made::initial(Version::One, &ID, &ID, 0, &frames);
    assert_eq!(passage(&mut Flow::default(), &packet), Ok(Passage::Goes));
    let most = packet.repeat(MAX_INITIALS);
    assert_eq!(passage(&mut Flow::default(), &most), Ok(Passage::Goes));
    let more = packet.repeat(MAX_INITIALS + 1);
    assert_eq!(passage(&mut Flow::default(), &more), Err(Refused::TooLong));
}

#[test]
fn a_second_hello_and_a_changed_copy_are_not_let_by() {
    let (good, evil) = (hello("aaaa.test"), hello("evil.test"));
    let begin = |flow: &mut Flow| {
        let first = initial(&ID, 0, &[(0, &good)]);
        assert_eq!(passage(flow, &first), Ok(Passage::Goes));
    };
    let mut flow = Flow::default();
    begin(&mut flow);
    let again = initial(&ID, 1, &[(0, &good[..30])]);
    assert_eq!(
        passage(&mut flow, &again),
        Ok(Passage::Goes),
        "the same once more"
    );
    let changed = initial(&ID, 2, &[(0, &evil)]);
    assert_eq!(passage(&mut flow, &changed), Err(Refused::Malformed));
    let mut flow = Flow::default();
    begin(&mut flow);
    let second = initial(&ID, 1, &[(good.len(), &evil)]);
    assert_eq!(passage(&mut flow, &second), Err(Refused::Name));
    let mut flow = Flow::default();
    begin(&mut flow);
    let half = initial(&ID, 1, &[(good.len() + 1, &evil)]);
    assert_eq!(passage(&mut flow, &half), Ok(Passage::Held));
}

#[test]
fn what_is_not_quic_is_refused_and_what_cant_be_opened_dropped() {
    for other in [
        &b""[..],
        b"\x16\xfe\xfd hello",
        b"GET / HTTP/1.1",
        &[0x40; 1_200],
    ] {
        assert_eq!(passage(&mut Flow::default(), other), Err(Refused::Unknown));
    }
    let good = initial(&ID, 0, &[(0, &hello("a.test"))]);
    let mut version = good.clone();
    version[1..5].copy_from_slice(&[0xff, 0, 0, 29]);
    assert_eq!(
        passage(&mut Flow::default(), &version),
        Err(Refused::Unsupported)
    );
    for cut in 1..good.len() {
        assert_eq!(
            passage(&mut Flow::default(), &good[..cut]),
            Err(Refused::Malformed),
            "{cut}"
        );
    }
    let mut changed = good.clone();
    *changed.last_mut().unwrap() ^= 1;
    assert_eq!(
        passage(&mut Flow::default(), &changed),
        Ok(Passage::Dropped)
    );
    assert_eq!(
        passage(&mut Flow::default(), &[&good[..], &changed].concat()),
        Ok(Passage::Dropped)
    );
    for payload in [&[8][..], &[6, 0, 0x7f], &[6, 0, 0xbf]] {
        let odd = made::initial(Version::One, &ID, &ID, 0, payload);
        assert_eq!(passage(&mut Flow::default(), &odd), Err(Refused::Malformed));
    }
    let far = initial(&ID, 0, &[(MAX_CRYPTO, b"x")]);
    assert_eq!(passage(&mut Flow::default(), &far), Err(Refused::TooLong));
}

#[test]
fn connections_and_frames_have_bounds() {
    let mut flow = Flow::default();
    for n in 0..MAX_CONNECTIONS as u8 {
        let half = initial(&[n; 8], 0, &[(1, b"x")]);
        assert_eq!(passage(&mut flow, &half), Ok(Passage::Held));
    }
    let over = initial(b"over", 0, &[(0, &hello("a.test"))]);
    assert_eq!(passage(&mut flow, &over), Err(Refused::Limit));
    let mut flow = Flow::default();
    for _ in 0..MAX_FRAMES {
        flow.hold(VirtioNetHdr::default(), b"x").unwrap();
    }
    assert_eq!(
        flow.hold(VirtioNetHdr::default(), b"x"),
        Err(Refused::TooLong)
    );
    assert_eq!(flow.release().len(), MAX_FRAMES);
}

#[test]
fn the_connection_that_is_silent_longest_makes_room_for_another() {
    let mut flow = Flow::default();
    let hello = hello("a.test");
    let begin = |flow: &mut Flow, n: usize| {
        let id = n.to_be_bytes();
        let passed = passage(flow, &initial(&id, 0, &[(0, &hello)]));
        heard(
            flow,
            &made::answer(Version::One, &id, &[&id[..], b"s"].concat()),
        );
        passed
    };
    let more = |flow: &mut Flow, n: usize, at: usize| {
        let id = n.to_be_bytes();
        let ids = [id.to_vec(), [&id[..], b"s"].concat()];
        let payload = made::crypto(0, &hello[..40]);
        let next = made::initial(Version::One, &id, &ids[at], 1, &payload);
        passage(flow, &next)
    };
    for n in 0..MAX_CONNECTIONS {
        assert_eq!(begin(&mut flow, n), Ok(Passage::Goes));
    }
    // All but one are heard of again.
    for n in (0..MAX_CONNECTIONS).filter(|n| *n != 5) {
        assert_eq!(more(&mut flow, n, n % 2), Ok(Passage::Goes));
    }
    assert_eq!(begin(&mut flow, 100), Ok(Passage::Goes));
    for at in [0, 1] {
        assert_eq!(more(&mut flow, 5, at), Ok(Passage::Dropped));
        assert_eq!(more(&mut flow, 6, at), Ok(Passage::Goes));
    }
    assert_eq!(
        begin(&mut flow, 5),
        Ok(Passage::Dropped),
        "its name is taken"
    );
    // One by one, to an end.
    let refused = (101..).find(|n| begin(&mut flow, *n) != Ok(Passage::Goes));
    assert_eq!(refused, Some(100 + shut::MAX_PAST));
    assert!(flow.held() < 512 << 10);
}

proptest! {
    #[test]
    fn nothing_panics(datagram in prop::collection::vec(any::<u8>(), 0..100), payload in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = passage(&mut Flow::default(), &datagram);
        let _ = crypto_frames(&payload);
        let _ = passage(&mut Flow::default(), &made::initial(Version::Two, &ID, &ID, 0, &payload));
    }
}

#[test]
fn a_connection_and_its_keys_are_held_memory_and_begin_all_or_none() {
    let short = |id: &[u8], corrupt: u8| {
        let mut packet = made::short_initial(id, &[1; 32]);
        *packet.last_mut().unwrap() ^= corrupt;
        packet
    };
    let datagram = |corrupt| {
        let mut bytes: Vec<u8> = (0..7).flat_map(|n| short(&[n; 8], 0)).collect();
        bytes.extend(short(b"the last", corrupt));
        bytes.resize(bytes.len().max(MIN_DATAGRAM), 0);
        bytes
    };
    let mut flow = Flow::default();
    assert_eq!(passage(&mut flow, &datagram(1)), Ok(Passage::Dropped));
    assert_eq!((flow.connections.len(), flow.held()), (0, 0));
    assert_eq!(passage(&mut flow, &datagram(0)), Ok(Passage::Held));
    assert_eq!(flow.connections.len(), 8);
    for connection in &flow.connections {
        assert_eq!(connection.keys.capacity(), 1);
        assert!(connection.held() > CONNECTION_HELD + size_of::<Keys>());
    }
    assert!(flow.held() >= 8 * CONNECTION_HELD);
}

/// Keys that were made for this.
fn derived<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = keys::DERIVED.get();
    let done = work();
    (keys::DERIVED.get() - before, done)
}

#[test]
fn a_connection_keeps_its_keys() {
    let mut flow = Flow::default();
    let hello = hello("a.test");
    let first = initial(&ID, 0, &[(0, &hello)]);
    let answer = made::answer(Version::One, &ID, b"server");
    let next = made::initial(Version::One, &ID, b"server", 1, &[2, 0, 0, 0, 0]);
    let once = derived(|| passage(&mut flow, &first));
    assert_eq!(once, (1, Ok(Passage::Goes)));
    let forged = made::answer(Version::One, b"another", b"forged");
    assert_eq!(derived(|| heard(&mut flow, &forged)).0, 1);
    assert_eq!(derived(|| heard(&mut flow, &answer)).0, 0);
    let once = derived(|| passage(&mut flow, &next));
    assert_eq!(once, (1, Ok(Passage::Goes)));
    for again in [&first, &next] {
        let again = derived(|| passage(&mut flow, again));
        assert_eq!(again, (0, Ok(Passage::Goes)));
    }
}

#[test]
fn a_flow_whose_initials_do_not_open_is_ended_and_others_are_not() {
    let mut flow = Flow::default();
    let mut bad = initial(&ID, 0, &[(0, &hello("a.test"))]);
    *bad.last_mut().unwrap() ^= 1;
    let most = (effort::MAX_WASTED / (effort::DERIVATION + effort::TRIAL)) as usize;
    for _ in 0..most {
        assert_eq!(passage(&mut flow, &bad), Ok(Passage::Dropped));
    }
    assert_eq!(passage(&mut flow, &bad), Err(Refused::Unopened));
    // What opens costs a flow nothing, however often it is sent.
    let mut flow = Flow::default();
    let good = initial(&ID, 0, &[(0, &hello("a.test"))]);
    for _ in 0..10 * most {
        assert_eq!(passage(&mut flow, &good), Ok(Passage::Goes));
    }
}

#[test]
fn what_is_opened_is_taken_from_the_allowance_and_time_refills_it() {
    let mut allowance = Allowance::default();
    let mut passed = |n: usize, now_ns: u64| {
        let id = n.to_be_bytes();
        let datagram = initial(&id, 0, &[(0, &hello("a.test"))]);
        let effort = &mut Effort::new(&mut allowance, now_ns);
        Flow::default().datagram(&datagram, effort, &mut |_| true)
    };
    let each = effort::DERIVATION + effort::TRIAL;
    let most = (effort::MOST / each) as usize;
    let (made, ()) = derived(|| {
        for n in 0..2 * most {
            let expected = if n < most {
                Passage::Goes
            } else {
                Passage::Unread
            };
            assert_eq!(passed(n, 0), Ok(expected), "{n}");
        }
    });
    // Each was sealed by keys too.
    assert_eq!(made, 2 * most + most);
    assert_eq!(passed(1, crate::clock::SECOND_NS), Ok(Passage::Goes));
}
