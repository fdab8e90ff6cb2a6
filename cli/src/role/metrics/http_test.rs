use super::*;

#[test]
fn a_scrape_is_understood() {
    let get = Wanted::Metrics { head: false };
    for (request, wanted) in [
        ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", get),
        ("GET /metrics?a=b HTTP/1.0\n\n", get),
        (
            "HEAD /metrics HTTP/1.1\r\n\r\n",
            Wanted::Metrics { head: true },
        ),
    ] {
        assert_eq!(read(request.as_bytes()), Some(wanted), "{request:?}");
    }
    assert_eq!(read(b"GET /metrics HTTP/1.1\r\nHost: x\r\n"), None);
    assert_eq!(read(b""), None);
}

#[test]
fn anything_else_is_refused_by_its_status() {
    let endless = [b'a'; MAX_REQUEST];
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"\xff\xfe / HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (&endless[..], 431),
    ] {
        match read(request) {
            Some(Wanted::Refused(got, _)) => assert_eq!(got, status, "{request:?}"),
            other => panic!("{other:?} for {request:?}"),
        }
    }
}

#[test]
fn an_answer_says_how_long_it_is_and_that_it_is_the_last() {
    let text = String::from_utf8(answer(200, "text/plain", "abc", false)).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("\r\nContent-Length: 3\r\n"), "{text}");
    assert!(text.contains("\r\nConnection: close\r\n"), "{text}");
    assert!(text.ends_with("\r\n\r\nabc"), "{text}");
    let head = String::from_utf8(answer(200, "text/plain", "abc", true)).unwrap();
    assert!(head.contains("\r\nContent-Length: 3\r\n") && head.ends_with("\r\n\r\n"));
    assert!(
        String::from_utf8(answer(405, "", "", false))
            .unwrap()
            .contains("Allow: GET")
    );
}
