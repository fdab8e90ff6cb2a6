use super::*;
use crate::fake::hellos::{self, record, records};

/// Goes on as far as it can; what was named, and how many bytes went on.
fn follow(
    spoken: &mut ProtocolSniffer,
    stream: &[u8],
) -> Result<(Vec<String>, usize, Step), Refused> {
    let (mut names, mut at) = (Vec::new(), 0);
    loop {
        match spoken.next(&stream[at..])? {
            Step::Named(name, len) => {
                names.push(name.name().without_dot());
                at += len;
            }
            Step::Pass(len) => at += len,
            last => return Ok((names, at, last)),
        }
    }
}

#[test]
fn nothing_follows_a_hello_before_the_server_answers() {
    let hello = records(&hellos::client_hello("a.example"), 50);
    let early = record(23, b"early");
    let mut spoken = ProtocolSniffer::new(Http::Each);
    let stream = [&hello[..], &early].concat();
    let found = follow(&mut spoken, &stream).unwrap();
    assert_eq!(found, (vec!["a.example".into()], hello.len(), Step::Held));
    assert_eq!(spoken.server_answered(&[]), Ok(false));
    let mut other = spoken.clone();
    assert_eq!(
        other.server_answered(&hellos::server_hello(false)),
        Ok(true)
    );
    assert_eq!(other.next(&early), Ok(Step::Rest));
    for no_tls in [
        &b"HTTP/1.1 400 Bad Request\r\n"[..],
        b"220 mail.example ESMTP \r\n",
    ] {
        let said = spoken.clone().server_answered(no_tls);
        assert_eq!(said, Err(Refused::Unanswered));
    }

    assert_eq!(
        spoken.server_answered(&hellos::server_hello(true)),
        Ok(true)
    );
    let second = records(&hellos::client_hello("b.example"), 500);
    let stream = [&early[..], &record(20, &[1]), &second, b"x"].concat();
    for cut in 0..stream.len() {
        let mut spoken = spoken.clone();
        let (names, at, _) = follow(&mut spoken, &stream[..cut]).unwrap();
        let (more, at_last, step) = follow(&mut spoken, &stream[at..]).unwrap();
        assert_eq!([names, more].concat(), ["b.example"]);
        assert_eq!((at + at_last, step), (stream.len() - 1, Step::Held));
    }
}

#[test]
fn each_request_of_a_connection_is_told_or_the_first() {
    let stream = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\nabc\
        GET / HTTP/1.1\r\nHost: b.example\r\n\r\nGET / HT";
    for cut in 0..stream.len() {
        let mut spoken = ProtocolSniffer::new(Http::Each);
        let (names, at, _) = follow(&mut spoken, &stream[..cut]).unwrap();
        let (more, last, step) = follow(&mut spoken, &stream[at..]).unwrap();
        assert_eq!([names, more].concat(), ["a.example", "b.example"], "{cut}");
        assert_eq!((at + last, step), (stream.len() - 8, Step::More));
    }
    let mut spoken = ProtocolSniffer::new(Http::First);
    let (names, at, step) = follow(&mut spoken, stream).unwrap();
    assert_eq!((names.len(), at, step), (1, 55, Step::Rest));
    assert_eq!(spoken.next(b""), Ok(Step::Rest));
}

#[test]
fn what_is_neither_is_refused() {
    for first in [&b"\0"[..], b"ssh", b"\x80", b" GET", b"\r\n"] {
        assert_eq!(
            ProtocolSniffer::new(Http::Each).next(first),
            Err(Refused::Unknown)
        );
    }
    let upgrade = b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\n\r\n";
    let next = |mode| ProtocolSniffer::new(mode).next(upgrade);
    assert_eq!(next(Http::Each), Err(Refused::Unsupported));
    assert!(matches!(next(Http::First), Ok(Step::Named(_, len)) if len == upgrade.len()));
}
