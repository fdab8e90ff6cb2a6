//! Data of clients of inspected connections.
use userspace_nat::fake::{hellos, initials};

use super::Seeds;
use crate::{inspect::dressed, tape::with_length};

pub(super) fn tls() -> Seeds {
    let hello = hellos::client_hello("api.example.test");
    let records = hellos::records(&hello, 30);
    let early = hellos::record(23, b"early");
    let again = [&records[..], &early, &hellos::record(20, &[1]), &records].concat();
    let with = |dress: u8, cut: u8, stream: &[u8]| [&[dress, 20, 0, cut], stream].concat();
    let hidden = hellos::client_hello_with(&[
        hellos::server_name(b"api.example.test"),
        (0xfe0d, vec![0; 8]),
    ]);
    vec![
        ("hello", with(0, 33, &records)),
        ("body", with(dressed::IN_RECORDS, 50, &hello[4..])),
        ("hidden", with(dressed::IN_RECORDS, 0, &hidden[4..])),
        ("again", with(dressed::RETRY, 120, &again)),
        ("answer", with(0, 0, &hellos::server_hello(true))),
    ]
}

pub(super) fn http() -> Seeds {
    let kept = "POST /a HTTP/1.1\r\nHost: api.example.test\r\nContent-Length: 3\r\n\r\nabc\
        GET http://api.example.test/ HTTP/1.1\r\nhost: api.example.test:80\r\n\r\n";
    let chunked = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n\
        5\r\nhello\r\n0\r\nX: y\r\n\r\nGET / HTTP/1.1\r\nHost: b.test\r\n\r\n";
    let with = |dress: u8, cut: u8, stream: &str| [&[dress, 0, cut], stream.as_bytes()].concat();
    vec![
        ("kept", with(0, 60, kept)),
        ("chunked", with(0, 80, chunked)),
        ("first", with(dressed::FIRST, 10, kept)),
        (
            "upgrade",
            with(
                0,
                0,
                "GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: h2c\r\n\r\n",
            ),
        ),
    ]
}

pub(super) fn quic() -> Seeds {
    let hello = hellos::client_hello("api.example.test");
    let (begin, end) = hello.split_at(40);
    let with = |how: u8, bytes: &[u8]| [&[how][..], &with_length(bytes)].concat();
    let parts = [
        with(1, &initials::crypto(40, end)),
        with(1, &initials::crypto(0, begin)),
    ]
    .concat();
    let acknowledges = with(1, &[2, 0, 0, 0, 0, 1, 0x1c, 0, 0, 0]);
    let evil = hellos::client_hello("evil.test");
    vec![
        ("whole", with(0x81, &initials::crypto(0, &hello))),
        (
            "parts",
            [&parts[..], &acknowledges, &with(0, b"\x40short")].concat(),
        ),
        (
            "two",
            [parts, with(2, &initials::crypto(0, &evil))].concat(),
        ),
        (
            "long-header",
            with(0, &[0xc0, 0, 0, 0, 1, 4, 1, 2, 3, 4, 0, 0, 4, 0, 0, 0, 0]),
        ),
    ]
}

pub(super) fn reassembly() -> Seeds {
    let segment = |at: u16, bytes: &[u8]| [&at.to_be_bytes()[..], &with_length(bytes)].concat();
    let first = [0xff, 0xff, 0xff, 0xf0];
    let of = |segments: &[Vec<u8>]| [&first[..], &segments.concat()].concat();
    vec![
        (
            "in-order",
            of(&[segment(0, b"abc"), segment(3, b"def"), segment(2, b"")]),
        ),
        (
            "out-of-order",
            of(&[
                segment(9, b"xyz"),
                segment(3, b"defghijk"),
                segment(0, b"abcd"),
            ]),
        ),
        ("far", of(&[segment(32_767, b"ab"), segment(0, b"a")])),
    ]
}
