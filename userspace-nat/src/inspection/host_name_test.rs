use super::*;

fn text(said: &[u8]) -> Option<String> {
    HostName::parse(said).map(|name| name.name().without_dot())
}

#[test]
fn case_and_the_last_dot_do_not_matter() {
    assert_eq!(
        text(b"WWW.Example.COM.").as_deref(),
        Some("www.example.com")
    );
    assert_eq!(HostName::parse(b"A.b"), HostName::parse(b"a.B."));
    assert_eq!(
        text(b"_dmarc.xn--bcher-kva.example").as_deref(),
        Some("_dmarc.xn--bcher-kva.example")
    );
}

#[test]
fn what_is_no_host_name_is_none() {
    let long = [b'a'; 64];
    let many = b"a.".repeat(127);
    let too_many = b"a.".repeat(128);
    assert!(HostName::parse(&many).is_some());
    for said in [
        &b""[..],
        b".",
        b"a..b",
        b".a",
        b"a.b..",
        b"192.0.2.1",
        b"example.0x7f",
        b"example.12",
        b"[::1]",
        b"a:80",
        b"a b.example",
        b"a\0.example",
        b"b\xc3\xbccher.example",
        &long,
        &too_many,
    ] {
        assert_eq!(text(said), None, "{}", said.escape_ascii());
    }
}
