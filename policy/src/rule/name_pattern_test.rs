use super::*;

fn shown(text: &str) -> String {
    text.parse::<NamePattern>().unwrap().to_string()
}

#[test]
fn names_are_read_and_shown_in_lower_case() {
    assert_eq!(shown("Example.COM."), "example.com");
    assert_eq!(shown(" *.Example.com:443/TCP "), "*.example.com:443/tcp");
    assert_eq!(shown("_srv.x-1.test:80-90"), "_srv.x-1.test:80-90");
    assert_eq!(
        shown("xn--bcher-kva.example/udp"),
        "xn--bcher-kva.example/udp"
    );
    assert_eq!(shown("host"), "host");
}

#[test]
fn an_address_is_not_meant_as_a_name() {
    for text in [
        "1.2.3.4",
        "1.2.3",
        "10.0.0.0/8:1",
        "::1",
        "[::1]:80",
        "a::b",
        "",
        ":80",
    ] {
        assert!(!NamePattern::is_meant_by(text), "{text}");
    }
    for text in ["a", "*.a", "1.2.3.example:80", "bücher.example", "*", "a b"] {
        assert!(NamePattern::is_meant_by(text), "{text}");
    }
}

#[test]
fn what_is_wrong_is_said() {
    let long = format!("{}.test", ["a"; 130].join("."));
    for (text, said) in [
        ("bücher.example", "`xn--`"),
        ("*", "--default"),
        ("a.*.test", "*.example.com"),
        ("*.*.test", "*.example.com"),
        ("a..test", "\"\" in \"a..test\""),
        ("-a.test", "\"-a\""),
        ("a b.test", "\"a b\""),
        ("1O.0.0.1", "nor an address"),
        ("a.test:0", "Port \"0\""),
        ("a.test/sctp", "\"sctp\""),
        ("a.test:1/icmp", "ICMP has no ports"),
        (&format!("{}.test", "a".repeat(64)), "63"),
        (&long, "253"),
    ] {
        let error = text.parse::<NamePattern>().unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
}
