use proptest::prelude::*;

use super::*;
use crate::fake::hellos::{self, record, records};

fn name(stream: &[u8]) -> Result<Option<(String, usize)>, Refused> {
    let hello = client_hello(stream)?;
    Ok(hello.map(|hello| (hello.name.name().without_dot(), hello.len)))
}

#[test]
fn records_of_any_size_hold_the_same_hello() {
    let hello = hellos::client_hello("a.example");
    for each in 1..=hello.len() {
        let stream = records(&hello, each);
        let found = Ok(Some(("a.example".into(), stream.len())));
        assert_eq!(name(&stream), found);
        let more = [&stream[..], &record(23, b"early")].concat();
        assert_eq!(name(&more), found);
        for len in 0..stream.len() {
            assert_eq!(name(&stream[..len]), Ok(None), "{each} {len}");
        }
    }
}

#[test]
fn what_is_no_plain_hello_is_refused() {
    let hello = hellos::client_hello("a.example");
    let (begin, end) = hello.split_at(20);
    let behind = [&hello[..], &[1]].concat();
    let mut old = records(&hello, 100);
    old[1] = 2;
    for (what, stream) in [
        (
            "a record between",
            [record(22, begin), record(20, &[1]), record(22, end)].concat(),
        ),
        (
            "an empty record",
            [record(22, begin), record(22, &[]), record(22, end)].concat(),
        ),
        ("bytes behind", record(22, &behind)),
        ("another record first", record(23, &hello)),
        ("another version", old),
        ("a record too long", vec![22, 3, 1, 0x42, 0]),
    ] {
        assert_eq!(name(&stream), Err(Refused::Malformed), "{what}");
    }
}

#[test]
fn a_servers_answer_is_told() {
    let retry = hellos::server_hello(true);
    for len in 0..40 {
        assert_eq!(server_answer(&retry[..len], false), None, "{len}");
    }
    assert_eq!(server_answer(&retry, false), Some(Answer::Retry));
    assert_eq!(
        server_answer(&hellos::server_hello(false), false),
        Some(Answer::Hello)
    );
    let warned = [record(21, &[1, 112]), retry.clone()].concat();
    assert_eq!(server_answer(&warned, false), Some(Answer::Retry));
    assert_eq!(
        server_answer(b"HTTP/1.1 400 Bad", false),
        Some(Answer::Other)
    );
    assert_eq!(
        server_answer(&record(22, &retry[5..20]), false),
        Some(Answer::Retry),
        "cut over records"
    );
    assert_eq!(
        server_answer(&record(21, &[1, 112]).repeat(100), false),
        Some(Answer::Other)
    );
}

#[test]
fn what_comes_before_a_second_hello_is_told() {
    let early = record(23, &[0; 50]);
    assert_eq!(before_second_hello(&early[..4]), Ok(None));
    assert_eq!(before_second_hello(&early[..15]), Ok(Some((15, 40))));
    assert_eq!(
        before_second_hello(&[early, record(20, &[1])].concat()),
        Ok(Some((55, 0)))
    );
    assert_eq!(before_second_hello(&record(22, &[1])), Ok(None));
}

proptest! {
    #[test]
    fn nothing_panics(stream in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = client_hello(&stream);
        let _ = server_answer(&stream, true);
        let _ = before_second_hello(&stream);
    }
}

#[test]
fn one_change_of_ciphers_stands_before_the_second_answer() {
    let (change, hello) = (record(20, &[1]), hellos::server_hello(false));
    let changed = [&change[..], &hello].concat();
    assert_eq!(server_answer(&changed, true), Some(Answer::Hello));
    assert_eq!(server_answer(&changed, false), Some(Answer::Other));
    for len in 0..40 {
        assert_eq!(server_answer(&changed[..len], true), None, "{len}");
    }
    let twice = [&change[..], &changed].concat();
    assert_eq!(server_answer(&twice, true), Some(Answer::Other));
    let long = [&record(20, &[1, 1])[..], &hello].concat();
    assert_eq!(server_answer(&long, true), Some(Answer::Other));
}
