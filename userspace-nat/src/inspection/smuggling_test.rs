//! Requests that two readers read in two ways: each is refused, or what any reader could see in it
//! is judged.
use super::*;

/// Treatment of a client's stream.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Told {
    /// It is refused, once these were named.
    Refused(Refused),
    /// It goes on to its end, and these were named.
    Goes(Vec<String>),
}

/// The stream comes in pieces of so many bytes.
fn told(stream: &[u8], each: usize) -> Told {
    let mut spoken = ProtocolSniffer::new(Http::Each);
    let (mut names, mut at, mut there) = (Vec::new(), 0, 0);
    loop {
        match spoken.next(&stream[at..there]) {
            Ok(Step::Named(name, len)) => {
                names.push(name.name().without_dot());
                at += len;
            }
            Ok(Step::Pass(len)) => at += len,
            Ok(Step::More) if there < stream.len() => there = stream.len().min(there + each),
            Ok(Step::More) => {
                assert_eq!(at, stream.len(), "something is held");
                return Told::Goes(names);
            }
            Ok(step) => panic!("{step:?}"),
            Err(why) => return Told::Refused(why),
        }
    }
}

/// The request that is smuggled.
const EVIL: &str = "GET /admin HTTP/1.1\r\nHost: evil.test\r\n\r\n";

fn check(stream: &str, expected: &Told) {
    for each in [1, 2, 7, stream.len()] {
        let told = told(stream.as_bytes(), each);
        assert_eq!(&told, expected, "by {each}: {}", stream.escape_debug());
    }
}

/// `$EVIL` stands for the smuggled request, `$LEN` for its length, `$HEX` for that in hexadecimal.
fn filled(stream: &str) -> String {
    stream
        .replace("$EVIL", EVIL)
        .replace("$LEN", &EVIL.len().to_string())
        .replace("$HEX", &format!("{:x}", EVIL.len()))
}

#[test]
fn two_readings_are_refused() {
    use Refused::{Malformed, NoName, TooLong, Unsupported};
    // A POST of these fields and content; what comes after the fields is the request's rest.
    let posts = [
        // Length beside chunks, in either order.
        (
            Malformed,
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\nContent-Length: $LEN\r\n\r\n0\r\n\r\n$EVIL",
        ),
        // Two lengths, or one that is read in two ways.
        (
            Malformed,
            "Content-Length: 0\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Content-Length: $LEN\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (Malformed, "Content-Length: 0, $LEN\r\n\r\n$EVIL"),
        (Malformed, "Content-Length: 0$LEN\r\n\r\n$EVIL"),
        (Malformed, "Content-Length: 0\r\n $LEN\r\n\r\n$EVIL"),
        (Malformed, "Content-Length : $LEN\r\n\r\n$EVIL"),
        (Malformed, " Content-Length: $LEN\r\n\r\n$EVIL"),
        (Malformed, "Content_Length: $LEN\r\n\r\n$EVIL"),
        // Codings that are chunked to some only.
        (
            Malformed,
            "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: \u{b}chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        // Chunks.
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n0;x\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n0x2\r\nxx\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n2 \r\nxx\r\n0\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n2\r\nxxx0\r\n\r\n$EVIL",
        ),
        (Malformed, "Transfer-Encoding: chunked\r\n\r\n-1\r\n$EVIL"),
        (
            TooLong,
            "Transfer-Encoding: chunked\r\n\r\n100000000\r\n$EVIL",
        ),
        // Trailers.
        (Malformed, "Transfer-Encoding: chunked\r\n\r\n0\r\n$EVIL"),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n0\r\nHost: evil.test\r\n\r\n",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n$EVIL",
        ),
        // What others do with the content.
        (
            Malformed,
            "Expect: x 100-continue\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Expect: 100-continue\r\nExpect: x\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Connection: close, Content-Length\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (Malformed, "Connection: host\r\n\r\n"),
        // What is HTTP/1 no more afterwards.
        (
            Unsupported,
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n$EVIL",
        ),
        (
            Unsupported,
            "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Up_grade: x\r\nUpgrade: h2c\r\nUpgrade: h2c\r\n\r\n$EVIL",
        ),
        // Behind it.
        (Malformed, "Content-Length: 0\r\n\r\n\r\n$EVIL"),
        (Malformed, "Content-Length: 0\r\n\r\n\n$EVIL"),
        (Malformed, "Content-Length: 0\r\n\r\nGET /\r\n$EVIL"),
        (
            Unsupported,
            "Content-Length: 0\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ),
        (
            Malformed,
            "Content-Length: 0\r\n\r\n\u{16}\u{3}\u{1}\0\u{5}",
        ),
        // Content that is a request to a server that heeds no length, and to one behind it that is
        // given what was in the chunks.
        (Malformed, "Content-Length: $LEN\r\n\r\n$EVIL"),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n$HEX\r\n$EVIL\r\n0\r\n\r\n",
        ),
        (
            Malformed,
            "Transfer-Encoding: chunked\r\n\r\n1\r\nX\r\n$HEX\r\n$EVIL\r\n0\r\n\r\n",
        ),
        // Several hosts.
        (Malformed, "Host: evil.test\r\n\r\n"),
        (Malformed, "Content-Length: 0\r\nHost: a.example\r\n\r\n"),
    ];
    for (why, post) in posts {
        let stream = format!("POST / HTTP/1.1\r\nHost: a.example\r\n{post}");
        check(&filled(&stream), &Told::Refused(why));
    }
    let heads = [
        // Content without a meaning.
        (
            Malformed,
            "GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "Get / HTTP/1.1\r\nHost: a.example\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "HEAD / HTTP/1.1\r\nHost: a.example\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "DELETE / HTTP/1.1\r\nHost: a.example\r\nContent-Length: $LEN\r\n\r\n$EVIL",
        ),
        (
            Malformed,
            "TRACE / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1\r\n\r\nx",
        ),
        (
            Malformed,
            "GET / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        // HTTP/1.0 knows no chunks.
        (
            Malformed,
            "POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n$EVIL",
        ),
        // Targets.
        (
            Malformed,
            "GET http://evil.test/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            Malformed,
            "GET HTTP://evil.test HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            Malformed,
            "GET evil.test/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            Malformed,
            "GET evil.test:80 HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            NoName,
            "GET http://a.example@evil.test/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            NoName,
            "GET http://a.example\\@evil.test/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            NoName,
            "GET http:///evil.test/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (
            Unsupported,
            "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ),
        (Unsupported, "Connect / HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        // Hosts.
        (NoName, "GET / HTTP/1.0\r\n\r\n"),
        (
            NoName,
            "GET / HTTP/1.1\r\nHost: a.example evil.test\r\n\r\n",
        ),
        (
            NoName,
            "GET / HTTP/1.1\r\nHost: a.example/evil.test\r\n\r\n",
        ),
        (
            NoName,
            "GET / HTTP/1.1\r\nHost: a.example:80:evil.test\r\n\r\n",
        ),
        (NoName, "GET / HTTP/1.1\r\nHost: a.example:000080\r\n\r\n"),
        (NoName, "GET / HTTP/1.1\r\nHost: evil%2etest\r\n\r\n"),
        (NoName, "GET / HTTP/1.1\r\nHost: \"a.example\"\r\n\r\n"),
        (
            Malformed,
            "GET / HTTP/1.1\r\nHost : evil.test\r\nHost: a.example\r\n\r\n",
        ),
        (
            Malformed,
            "GET / HTTP/1.1\r\n Host: evil.test\r\nHost: a.example\r\n\r\n",
        ),
        (
            Malformed,
            "GET / HTTP/1.1\r\nHost: a.example\r\nX: y\n\nHost: evil.test\r\n\r\n",
        ),
        (Malformed, "GET / HTTP/1.1\r\nHost: a.example\r\nX\r\n\r\n"),
        (
            Malformed,
            "GET / HTTP/1.1\r\nHost: a.example\0evil.test\r\n\r\n",
        ),
        // Request lines.
        (Malformed, "GET / HTTP/1.1\nHost: a.example\n\n"),
        (Malformed, "GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET /  HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET / HTTP/1.1 \r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET\t/ HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET / HTTP/1.2\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET / HTTP/2.0\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET / http/1.1\r\nHost: a.example\r\n\r\n"),
        (Malformed, "GET /\r\nHost: a.example\r\n\r\n"),
        (Unsupported, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (Malformed, "PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n$EVIL"),
        (Malformed, "EHLO a.example\r\n"),
    ];
    for (why, stream) in heads {
        check(&filled(stream), &Told::Refused(why));
    }
}

#[test]
fn one_reading_goes_on_and_each_request_of_it_is_told() {
    let goes = [
        (
            "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\na=b",
            &["a.example"][..],
        ),
        (
            "POST / HTTP/1.1\r\nHost: a.example\r\ntransfer-encoding: Chunked\r\n\r\n\
             1\r\n=\r\n$HEX\r\n$EVIL\r\n1\r\nx\r\n0\r\nX-Sum: y\r\n\r\n$EVIL",
            &["a.example", "evil.test"],
        ),
        (
            "POST / HTTP/1.1\r\nHost: a.example\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n\
             abc$EVIL",
            &["a.example", "evil.test"],
        ),
        (
            "GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n$EVIL$EVIL",
            &["a.example", "evil.test", "evil.test"],
        ),
        (
            "OPTIONS * HTTP/1.1\r\nHost: a.example\r\nConnection: keep-alive\r\n\r\n$EVIL",
            &["a.example", "evil.test"],
        ),
        (
            "GET http://A.example:80/ HTTP/1.0\r\nHost: a.example.\r\nConnection: keep-alive\r\n\r\n\
             $EVIL",
            &["a.example", "evil.test"],
        ),
        (
            "GET //evil.test/ HTTP/1.1\r\nHost: a.example:\r\nX-Long: a b\u{e9}\r\n\r\n",
            &["a.example"],
        ),
    ];
    for (stream, names) in goes {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        check(&filled(stream), &Told::Goes(names));
    }
}
