use super::*;

fn read(stream: &str) -> Result<Option<(String, Body)>, Refused> {
    let head = parse(stream.as_bytes())?;
    Ok(head.map(|head| (head.name.name().without_dot(), head.body)))
}

fn with(fields: &str) -> Result<Option<(String, Body)>, Refused> {
    read(&format!(
        "POST / HTTP/1.1\r\nHost: a.example\r\n{fields}\r\n"
    ))
}

#[test]
fn a_request_is_read_when_it_is_whole() {
    let request = "GET /x?y HTTP/1.1\r\nhost:  A.example:8080 \r\nAccept: */*\r\n\r\n";
    for len in 0..request.len() {
        assert_eq!(read(&request[..len]), Ok(None), "{len}");
    }
    let found = parse(format!("{request}GET /").as_bytes())
        .unwrap()
        .unwrap();
    assert_eq!((found.len, found.upgrades), (request.len(), false));
    assert_eq!(found.name, HostName::parse(b"a.example").unwrap());
    assert_eq!(found.body, Body::Length(0));
}

#[test]
fn the_target_must_name_the_same_host() {
    let target = |target: &str| {
        read(&format!("GET {target} HTTP/1.1\r\nHost: a.example\r\n\r\n")).map(|_| ())
    };
    assert_eq!(target("http://A.example:80/x"), Ok(()));
    assert_eq!(target("http://a.example?x"), Ok(()));
    assert_eq!(target("/http://b.example/"), Ok(()));
    for other in [
        "http://b.example/",
        "http://b.example#a.example",
        "ftp://a.example/",
        "x",
        "*",
    ] {
        assert_eq!(target(other), Err(Refused::Malformed), "{other}");
    }
    for none in [
        "http://a.example@b.example/",
        "http://192.0.2.1/",
        "http://[::1]/",
    ] {
        assert_eq!(target(none), Err(Refused::NoName), "{none}");
    }
}

#[test]
fn one_host_and_a_name() {
    let host = |fields: &str| read(&format!("GET / HTTP/1.1\r\n{fields}\r\n")).map(|_| ());
    for none in [
        "",
        "Host:\r\n",
        "Host: 192.0.2.1\r\n",
        "Host: a.example:x\r\n",
        "Host: a.example, b.example\r\n",
    ] {
        assert_eq!(host(none), Err(Refused::NoName), "{none}");
    }
    for two in [
        "Host: a.example\r\nHost: a.example\r\n",
        "Host: a.example\r\nHost: b.example\r\n",
        "Host: a.example\r\n b.example\r\n",
        "Host : a.example\r\n",
        "Host: a.example\nX: y\r\n",
        "Host: a.example\rHost: b.example\r\n",
        "X: y\r\r\nHost: a.example\r\n",
        "Host: a.example\r\nX: \0\r\n",
    ] {
        assert_eq!(host(two), Err(Refused::Malformed), "{}", two.escape_debug());
    }
    assert_eq!(
        read("\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        Err(Refused::Malformed)
    );
    assert_eq!(
        read("GET / HTTP/2.0\r\nHost: a.example\r\n\r\n"),
        Err(Refused::Malformed)
    );
    assert_eq!(read("GET /\r\n\r\n"), Err(Refused::Malformed));
    assert_eq!(
        read("CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        Err(Refused::Unsupported)
    );
    let long = format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(MAX_HEAD));
    assert_eq!(read(&long), Err(Refused::TooLong));
}

#[test]
fn a_length_or_chunks_never_both() {
    let body = |fields: &str| with(fields).map(|found| found.unwrap().1);
    assert_eq!(body("Content-Length: 12\r\n"), Ok(Body::Length(12)));
    assert_eq!(body("Content-Length: 0\r\n"), Ok(Body::Length(0)));
    assert_eq!(body("Transfer-Encoding: Chunked\r\n"), Ok(Body::ChunkSize));
    for twofold in [
        "Content-Length: 12\r\nContent-Length: 12\r\n",
        "Content-Length: 12\r\nContent-Length: 13\r\n",
        "Content-Length: 012\r\n",
        "Content-Length: 00\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 1 2\r\n",
        "Content-Length: 12;\r\n",
        "Content-Length: \u{662}\r\n",
        "Content+Length: 12\r\n",
        "Transfer.Encoding: chunked\r\n",
        "Transfer-Encoding: \"chunked\"\r\n",
        "Transfer-Encoding: chunked;q=1\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: ,chunked\r\n",
        "Transfer-Encoding:\r\n",
        "Transfer-Encoding: \u{a0}chunked\r\n",
        "Content-Length: 12\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: +12\r\n",
        "Content-Length: 12, 12\r\n",
        "Content-Length: 0x12\r\n",
        "Content-Length:\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content_Length: 12\r\n",
        "Transfer_Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
    ] {
        assert_eq!(
            body(twofold),
            Err(Refused::Malformed),
            "{}",
            twofold.escape_debug()
        );
    }
    let old = "POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(read(old), Err(Refused::Malformed));
}

/// How much of a stream belongs to a body, given in pieces of `each` more bytes.
fn extent(mut body: Body, stream: &[u8], each: usize) -> Result<usize, Refused> {
    let (mut at, mut there) = (0, 0);
    loop {
        match body.take(&stream[at..there])? {
            None => return Ok(at),
            Some(0) if there == stream.len() => return Ok(usize::MAX),
            Some(0) => there = stream.len().min(there + each),
            Some(n) => at += n,
        }
    }
}

#[test]
fn a_body_ends_where_it_says_in_any_pieces() {
    let chunked = b"5\r\nhello\r\n0A\r\n0123456789\r\n0\r\nX: y\r\n\r\nGET /";
    for each in 1..chunked.len() {
        assert_eq!(
            extent(Body::ChunkSize, chunked, each),
            Ok(chunked.len() - 5)
        );
        assert_eq!(extent(Body::Length(7), chunked, each), Ok(7));
    }
    assert_eq!(extent(Body::Length(0), b"GET /", 1), Ok(0));
    for twofold in [
        &b"5;x=y\r\nhello\r\n"[..],
        b"5\nhello\r\n",
        b"5\rhello",
        b"+5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"\r\nhello",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\n",
        b"0\r\nX: y\n\r\n",
        // What a server that knows no trailers takes for a request, and what frames or routes.
        b"0\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"0\r\nX: y\r\n folded\r\n\r\n",
        b"0\r\nHost: b.example\r\n\r\n",
        b"0\r\nX: y\r\ncontent_length: 5\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n: y\r\n\r\n",
    ] {
        for each in [1, 100] {
            let found = extent(Body::ChunkSize, twofold, each);
            assert_eq!(found, Err(Refused::Malformed), "{}", twofold.escape_ascii());
        }
    }
    // Some count in 32 bits.
    for size in [
        "7fffffff\r\n",
        "ffffffff\r\n",
        "100000005\r\n",
        "0000000005\r\n",
    ] {
        let taken = extent(Body::ChunkSize, size.as_bytes(), 1);
        assert_eq!(taken, Err(Refused::TooLong), "{size}");
    }
    let trailer = [b"0\r\n".to_vec(), b"X: y\r\n".repeat(2_000)].concat();
    assert_eq!(
        extent(Body::ChunkSize, &trailer, 100),
        Err(Refused::TooLong)
    );
}

#[test]
fn content_that_begins_as_a_request_is_told() {
    /// Whether it does, in pieces of any size alike.
    fn begins(content: &[u8]) -> bool {
        let whole = Beginning::default().take(content);
        for size in 1..=content.len() {
            let mut beginning = Beginning::default();
            let mut taken = 0;
            for piece in content.chunks(size) {
                let here = beginning.take(piece);
                taken += here;
                if here < piece.len() {
                    break;
                }
            }
            assert_eq!(taken, whole);
        }
        whole < content.len()
    }
    for request in [
        &b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..],
        b"\r\n\n \tPOST\t/x  HTTP/1.0 \n",
        b"x y z HTTP/9.9\r",
        b"OPTIONS * http/1.1 HTTP/1.1\r\n",
        b"GET / HTTP/1.10 HTTP/1.0 x HTTP/1.1\t \r\n",
    ] {
        assert!(begins(request), "{}", request.escape_ascii());
    }
    for other in [
        &b""[..],
        b"{\"a\": \"GET / HTTP/1.1\r\n\"}",
        b"a=GET / HTTP/1.1\r\n",
        b"--b\r\nGET / HTTP/1.1\r\n",
        b"We speak HTTP/2 and HTTP/1.1, too\r\n",
        b"GET / HTTP/1.1",
        b"GET /\r\nHTTP/1.1\r\n",
        b"<a> b HTTP/1.1\r\n",
        b"a b HTTP/11\r\n",
    ] {
        assert!(!begins(other), "{}", other.escape_ascii());
    }
}
